"""The mega-task on a real GPU: the CPU target's tokens, the same bits for every block count, and over long replays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rocmega.cache import PagedCache
from rocmega.checkpoint import Checkpoint
from rocmega.drivers.select import kind_for, pick
from rocmega.models.glm import config as glm_config
from rocmega.models.glm import mega, standard, weights
from rocmega.step import StepBatch

pytestmark = pytest.mark.skipif(kind_for() == "host", reason="needs a GPU")

CONTEXT, PROMPT = 512, 75
# The matrix units round sums in their own way, so a GPU's bits are not the CPU target's. f32 runs as three TF32
# products on NVIDIA, about 1e-6 a product; the bound leaves room for eight layers of them.
F32_BOUND = 1e-3


@dataclass
class Model:
    """A tiny model on one device, with room for 16 requests of CONTEXT tokens."""

    config: Any
    packed: Any
    driver: Any
    cache: PagedCache
    standard: standard.StandardPath
    activations: str

    @classmethod
    def load(cls, checkpoint: Path, device: str, activations: str = "auto") -> Model:
        driver = pick(device)
        config = glm_config.from_dir(checkpoint)
        packed = weights.pack(
            Checkpoint(checkpoint), config, device=driver.device, arch=driver.arch, activations=activations
        )
        cache = PagedCache(config.cache_spec(packed.formats.cache), 16 * CONTEXT // 64, driver)
        path = standard.StandardPath(config, packed, cache, activations=activations)
        return cls(config, packed, driver, cache, path, activations)

    def mega(self, **options: Any) -> mega.MegaPath:
        options = {"max_model_len": CONTEXT, "activations": self.activations, **options}
        return mega.MegaPath(self.config, self.packed, self.cache, self.driver, **options)

    def prefill(self, request: int, prompt: torch.Tensor) -> int:
        self.cache.grow(request, CONTEXT)
        [table] = self.cache.block_table([request], CONTEXT // 64)
        return int(self.standard.prefill(prompt.to(self.driver.device), 0, table).argmax())

    def batch(self, requests: list[int], tokens: list[int], positions: list[int]) -> StepBatch:
        table = self.cache.block_table(requests, CONTEXT // 64)
        return StepBatch(torch.tensor(tokens).int(), torch.tensor(positions).int(), table)


def prompt_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).int()


# Weights, and what they meet.
FORMATS = [("f32", "auto"), ("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("mxfp4", "auto"), ("mxfp4", "fp8")]


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Model:
    dtype, activations = request.param
    return Model.load(tiny_checkpoint("glm-5.2-tiny", dtype), "auto", activations)


@pytest.mark.parametrize("dtype", ["f32", "fp8", "mxfp4"])
def test_tokens_of_the_cpu_target(dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """With f32 activations, on the CPU target transformers' tokens."""
    checkpoint = tiny_checkpoint("glm-5.2-tiny", dtype)
    here, host = (Model.load(checkpoint, device, "f32") for device in ("auto", "host"))
    paths = here.mega(), host.mega()
    token = here.prefill(0, prompt_of(PROMPT, 1))
    assert token == host.prefill(0, prompt_of(PROMPT, 1))
    for step in range(64):
        results = [
            path.decode(m.batch([0], [token], [PROMPT + step])) for path, m in zip(paths, (here, host), strict=True)
        ]
        assert int(results[0].tokens[0]) == int(results[1].tokens[0]), f"step {step}"
        assert float((results[0].logits.cpu() - results[1].logits).abs().max()) < F32_BOUND
        token = int(results[0].tokens[0])


def test_bits_do_not_depend_on_blocks_or_splits(model: Model) -> None:
    lengths = {0: 1, 1: 23, 2: 64, 3: 75, 4: 200}
    for request, length in lengths.items():
        model.prefill(request, prompt_of(length, request))
    batch = model.batch(list(lengths), [7, 8, 9, 10, 11], list(lengths.values()))
    first = None
    all_blocks = model.driver.facts().compute_units
    for options in (
        *({"blocks": blocks} for blocks in (1, 2, 3, 7, 16, 33, all_blocks)),
        {"mega_tasks": 2},
        {"mega_tasks": 8},
    ):
        path = model.mega(**options)
        for _ in range(3):
            result = path.decode(batch)
            first = result.logits.clone() if first is None else first
            assert torch.equal(result.logits, first), options
        path.close()


def test_long_replay(model: Model) -> None:
    """2,000 steps of changing rows and contexts: every output equals its first occurrence, bit for bit."""
    order = random.Random(3)
    for request in range(16):
        model.prefill(request, prompt_of(20 + 9 * request, request))
    path = model.mega()
    cases = []
    for _ in range(40):
        requests = order.sample(range(16), order.choice((1, 1, 2, 3, 5, 8, 16)))
        positions = [20 + 9 * request for request in requests]
        cases.append(model.batch(requests, [order.randrange(512) for _ in requests], positions))
    seen: dict[int, torch.Tensor] = {}
    for _ in range(2000):
        case = order.randrange(len(cases))
        logits = path.decode(cases[case]).logits
        assert logits is not None
        if case in seen:
            assert torch.equal(logits, seen[case]), f"case {case}"
        else:
            seen[case] = logits.clone()
