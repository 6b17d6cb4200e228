"""A loaded tiny model on the standard path, and the word of two others on it: transformers, and reference.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rocmega.cache import TorchMemory
from rocmega.checkpoint import Checkpoint
from rocmega.models.deepseek.cache import HybridCache
from rocmega.models.deepseek.config import DeepseekConfig, from_dir
from rocmega.models.deepseek.reference import Reference
from rocmega.models.deepseek.standard import StandardPath
from rocmega.models.deepseek.weights import DeepseekWeights, pack
from tests.models.driven import Driven

FAMILIES = ("deepseek-v4-flash-tiny", "deepseek-v4.1-flash-tiny")
PROMPT = 75  # tokens: beyond the window, every ratio, index_topk and the candidates of the tiny models
STEPS = 65  # the first token is prefill's
STALE = 1e4  # what the caches hold where nothing of the request was written: large, and finite as old entries are


@dataclass
class Model(Driven):
    """A packed model with a cache of its own, full of stale values."""

    config: DeepseekConfig
    weights: DeepseekWeights
    pages: int = 20
    requests: int = 16
    cache: HybridCache = field(init=False)
    path: StandardPath = field(init=False)

    def __post_init__(self):
        spec = self.config.cache_spec(self.weights.formats.cache)
        self.cache = spec.open(self.pages, self.requests, TorchMemory())
        for pool in self.cache.pools.values():
            pool.fill_(STALE)
        self.path = StandardPath(self.config, self.weights, self.cache)


def load(directory: Path, **options) -> Model:
    config = from_dir(directory)
    return Model(config, pack(Checkpoint(directory), config), **options)


def transformers_model(directory: Path) -> Any:
    """transformers' own class with a checkpoint's weights, float32."""
    transformers = pytest.importorskip("transformers", minversion="5.8.0")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    of = transformers.DeepseekV4ForCausalLM
    return of.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def reference_model(directory: Path, **options) -> Reference:
    config = json.loads((directory / "config.json").read_text())
    checkpoint = Checkpoint(directory)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    return Reference(config.get("text_config", config), weights, **options)


def is_v41(directory: Path) -> bool:
    return "text_config" in json.loads((directory / "config.json").read_text())


@torch.no_grad()
def all_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits after every one of some tokens, by transformers without a cache or by the reference."""
    if is_v41(directory):
        reference = reference_model(directory)
        return torch.stack([reference.step(token).float() for token in tokens.tolist()])
    return transformers_model(directory)(input_ids=tokens[None], use_cache=False).logits[0].float()


@torch.no_grad()
def _greedy(hf, prompt: torch.Tensor, steps: int) -> tuple[list[int], torch.Tensor]:
    out = hf(input_ids=prompt, use_cache=True)
    # The cache argument's name depends on the version.
    key = "past_key_values" if getattr(out, "past_key_values", None) is not None else "cache"
    rows = [out.logits[0, -1].float()]
    for _ in range(steps - 1):
        out = hf(input_ids=rows[-1].argmax()[None, None], use_cache=True, **{key: out[key]})
        rows.append(out.logits[0, -1].float())
    return [int(row.argmax()) for row in rows], torch.stack(rows)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices gain nothing from threads, and lose much where other processes want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def packed(tiny_checkpoint) -> Callable[..., tuple[DeepseekConfig, DeepseekWeights]]:
    """Configuration and packed weights of a tiny checkpoint; arguments as for `tiny_checkpoint`.

    activations: what they are packed for.
    """

    @cache
    def made(*args, activations: str = "auto", **options) -> tuple[DeepseekConfig, DeepseekWeights]:
        directory = tiny_checkpoint(*args, **options)
        config = from_dir(directory)
        return config, pack(Checkpoint(directory), config, activations=activations)

    return made


@pytest.fixture
def model(packed) -> Callable[..., Model]:
    """A tiny model with an empty cache; arguments as for `tiny_checkpoint`, and pages."""
    return lambda *args, pages=20, **options: Model(*packed(*args, **options), pages=pages)


@pytest.fixture(scope="session")
def prompt() -> torch.Tensor:
    return torch.randint(0, 512, (PROMPT,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint, prompt) -> Callable[..., tuple[list[int], torch.Tensor]]:
    """Greedy tokens after the prompt and the logits row behind each: transformers' for V4, the reference's for V4.1."""

    @cache
    def run(*args, **options) -> tuple[list[int], torch.Tensor]:
        directory = tiny_checkpoint(*args, **options)
        if is_v41(directory):
            return reference_model(directory).greedy(prompt.tolist(), STEPS)
        return _greedy(transformers_model(directory), prompt[None], STEPS)

    return run


@pytest.fixture(scope="session")
def everywhere(tiny_checkpoint, prompt) -> Callable[[str], torch.Tensor]:
    """The logits after every token of the prompt, float32 [75, 512], by the oracle."""
    return cache(lambda name: all_logits(tiny_checkpoint(name), prompt))
