"""A loaded tiny model on the standard path, and transformers' word on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

from rocmega.cache import PagedCache, TorchMemory
from rocmega.checkpoint import Checkpoint
from rocmega.models.glm import presets
from rocmega.models.glm.config import GlmConfig, from_dir
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.weights import GlmWeights, pack
from tests.models.driven import Driven
from tests.models.glm.kit import Bench, Server

PROMPT = 75  # tokens; more than three times the tiny models' index_topk
STEPS = 65  # the first token is prefill's

# Awkward dimensions: several chunks, groups, splits and scale blocks everywhere, and hardly one that divides evenly.
ODD = {
    **presets.PRESETS["glm-5.2-tiny"],
    "hidden_size": 1056, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
    "first_k_dense_replace": 1, "intermediate_size": 720, "moe_intermediate_size": 464,
    "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 176, "kv_lora_rank": 96,
    "index_n_heads": 32, "index_topk": 100, "vocab_size": 528,
}  # fmt: skip

# Half of the tiny model's layers, for what is run with many orders and blocks: a dense one and mixtures, selections of
# their own and shared ones; and each slot of a region, which layers take in turns, is written again.
SHALLOW = {
    **presets.PRESETS["glm-5.2-tiny"],
    "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"], "first_k_dense_replace": 1,
}  # fmt: skip
# Of the second half of a mixture, waves have nothing to do: an expert's part is one unit of FP8.
SINGLE = {**SHALLOW, "num_experts_per_tok": 1}
OWN = {"odd": ODD, "shallow": SHALLOW, "single": SINGLE}


@dataclass
class Model(Driven):
    """A packed model with a cache of its own."""

    config: GlmConfig
    weights: GlmWeights
    pages: int = 16
    cache: PagedCache = field(init=False)
    path: StandardPath = field(init=False)

    def __post_init__(self):
        self.cache = PagedCache(self.config.cache_spec(self.weights.formats.cache), self.pages, TorchMemory())
        self.path = StandardPath(self.config, self.weights, self.cache)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices gain nothing from threads, and lose much where other processes want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def packed(tiny_checkpoint) -> Callable[..., tuple[GlmConfig, GlmWeights]]:
    """Configuration and packed weights of a tiny checkpoint; arguments as for `tiny_checkpoint`, also of OWN.

    activations: what they are packed for.
    """

    @cache
    def load(*args, activations: str = "auto", **options) -> tuple[GlmConfig, GlmWeights]:
        with pytest.MonkeyPatch.context() as patch:
            for name, config in OWN.items():
                patch.setitem(presets.PRESETS, name, config)
            patch.setattr(presets, "WRITABLE", (*presets.WRITABLE, *OWN))
            directory = tiny_checkpoint(*args, **options)
        config = from_dir(directory)
        return config, pack(Checkpoint(directory), config, activations=activations)

    return load


@pytest.fixture
def model(packed) -> Callable[..., Model]:
    """A tiny model with an empty cache; arguments as for `tiny_checkpoint`, and pages."""
    return lambda *args, pages=16, **options: Model(*packed(*args, **options), pages=pages)


@pytest.fixture(scope="session")
def bench(packed) -> Iterator[Callable[..., Bench]]:
    """bench("odd", "bf16", positions, blocks=7): a mega-task over noise."""
    made: list[Bench] = []

    def make(name: str = "glm-5.2-tiny", dtype: str = "f32", *args, **options) -> Bench:
        weights = packed(name, dtype, activations=options.get("activations", "auto"))
        made.append(Bench(*weights, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def server(packed) -> Callable[..., Server]:
    made: list[Server] = []

    def make(name: str = "glm-5.2-tiny", dtype: str = "f32", **options) -> Server:
        made.append(Server(*packed(name, dtype, activations=options.get("activations", "auto")), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def prompt() -> torch.Tensor:
    return torch.randint(0, 512, (PROMPT,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def reference(tiny_checkpoint, prompt) -> Callable[..., tuple[list[int], torch.Tensor]]:
    """transformers' greedy tokens and the logits row behind each; arguments as for `tiny_checkpoint`."""
    transformers = pytest.importorskip("transformers", minversion="5.7.0")

    @cache
    def run(*args, **options) -> tuple[list[int], torch.Tensor]:
        directory: Path = tiny_checkpoint(*args, **options)
        hf = transformers.GlmMoeDsaForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        ).eval()
        return _greedy(hf, prompt[None], STEPS)

    return run


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
