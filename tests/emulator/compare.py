"""The same steps by the CPU target and by an emulated code object, each with its own cache, compared in every bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rocmega.cache import PagedCache
from rocmega.drivers.base import Driver
from rocmega.drivers.host import HostDriver
from rocmega.models.glm import kernel
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.weights import GlmWeights
from rocmega.step import StepBatch, StepResult
from rocmega.toolchain import Artifact, compile
from tests.emulator.driver import MMA_K, EmulatorDriver, Execution

MAX_MODEL_LEN = 192
MORE = 16  # tokens that there is room for after the prompts
PAGES = 40  # of all requests together

# Tokens that each of so many rows has before the first step. The tiny models select 24 positions, a page holds 64:
# 23, 24, 63 and 64 are the borders.
LENGTHS = {1: [75], 3: [75, 10, 63], 16: [75, 10, 63, 1, 24, 64, 23, 140, 30, 25, 2, 127, 22, 66, 41, 128]}


class Recorded(MegaPath):
    """Keeps a copy of everything a launch may write, after each."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.records: list[dict[str, torch.Tensor]] = []

    def _launch(self) -> None:
        super()._launch()
        self.records.append({name: self.region(name).clone() for name in self._regions})


def host_artifact(config: GlmConfig, weights: GlmWeights, arch: str, activations: str) -> Artifact:
    """The CPU target with the matrix instructions of an architecture: they differ in how often a sum is rounded."""
    unit = kernel.unit(config, weights.formats, "host", activations=activations)
    return compile(replace(unit, defines={**unit.defines, "MMA_K": MMA_K[arch]}), "host")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass
class Side:
    """One driver's cache and mega-task."""

    cache: PagedCache
    path: Recorded


@dataclass
class Comparison:
    """`rows` requests, prefilled by the standard path in the memory that the emulated kernel reads."""

    config: GlmConfig
    weights: GlmWeights
    arch: str
    blocks: int
    lengths: Sequence[int]
    activations: str = "auto"
    mega_tasks: int = 1
    host_as: str = ""  # the architecture whose matrix instructions the host has; the same, if not given
    emulator: EmulatorDriver = field(init=False)
    host: HostDriver = field(init=False)

    def __post_init__(self) -> None:
        self.emulator, self.host = EmulatorDriver(self.arch), HostDriver()
        self.sides = [
            self._side(
                self.host, host_artifact(self.config, self.weights, self.host_as or self.arch, self.activations)
            ),
            self._side(self.emulator, None),
        ]
        self.positions = torch.tensor(self.lengths, dtype=torch.int32)
        self.tokens = self._prefill()

    def _side(self, driver: Driver, artifact: Artifact | None) -> Side:
        cache = PagedCache(self.config.cache_spec(self.weights.formats.cache), PAGES, driver)
        path = Recorded(
            self.config, self.weights, cache, driver, blocks=self.blocks, max_model_len=MAX_MODEL_LEN,
            mega_tasks=self.mega_tasks, activations=self.activations, artifact=artifact,
        )  # fmt: skip
        return Side(cache, path)

    def _prefill(self) -> torch.Tensor:
        """Prefills the emulator's cache and copies it to the host's; the first tokens to decode, int32 [rows]."""
        host, emulated = (side.cache for side in self.sides)
        for share in (1, MORE):  # so that the pages of a request are not neighbours
            for row, length in enumerate(self.lengths):
                for cache in (host, emulated):
                    cache.grow(row, share if share == 1 else length + MORE)
        standard, random, tokens = StandardPath(self.config, self.weights, emulated), torch.Generator(), []
        for row, length in enumerate(self.lengths):
            prompt = torch.randint(0, self.config.vocab_size, (length,), generator=random.manual_seed(row + 1))
            logits = standard.prefill(prompt.int(), 0, emulated.block_table([row])[0])
            tokens.append(int(logits.argmax()))
        for to, of in zip(_pools(host), _pools(emulated), strict=True):
            to.copy_(of)
        return torch.tensor(tokens, dtype=torch.int32)

    def batch(self) -> StepBatch:
        """The next step's; both caches have the same block tables."""
        table = self.sides[0].cache.block_table(range(len(self.lengths)), MAX_MODEL_LEN // 64)
        return StepBatch(self.tokens, self.positions, table)

    def step(self, seed: int | None) -> Execution:
        """One token of every row by both sides. Raises AssertionError if a bit differs; what the emulator took."""
        self.emulator.seed, self.host.seed = seed, seed or 0
        done = len(self.emulator.executions)
        host, emulated = (side.path.decode(self.batch()) for side in self.sides)
        differences = self.differences(host, emulated)
        assert not differences, f"{self.arch}, {self.blocks} blocks, seed {seed}: {'; '.join(differences)}"
        self.tokens, self.positions = host.tokens.clone(), self.positions + 1
        launches = self.emulator.executions[done:]
        return Execution(sum(item.instructions for item in launches), sum(item.seconds for item in launches))

    def differences(self, host: StepResult, emulated: StepResult) -> list[str]:
        """What differs, the earliest launch first, for a person to find the stage by."""
        found = []
        records = [side.path.records for side in self.sides]
        for number, (ours, theirs) in enumerate(zip(*records, strict=True)):
            names = [name for name in ours if not same_bits(ours[name], theirs[name])]
            if names:
                found.append(f"after launch {number}: {', '.join(names)}")
        for record in records:
            record.clear()
        for layer, (a, b) in enumerate(zip(*(side.cache.latent for side in self.sides), strict=True)):
            if not same_bits(a, b):
                found.append(f"latent cache of layer {layer}")
        for layer, (x, y) in enumerate(zip(*(side.cache.index for side in self.sides), strict=True)):
            if x is not None and y is not None and not same_bits(x, y):
                found.append(f"index cache of layer {layer}")
        assert host.logits is not None
        assert emulated.logits is not None
        if not same_bits(host.logits, emulated.logits):
            found.append(f"logits, by up to {float((host.logits - emulated.logits).abs().max()):.2e}")
        if not torch.equal(host.tokens, emulated.tokens):
            found.append(f"tokens {host.tokens.tolist()} and {emulated.tokens.tolist()}")
        return found

    def close(self) -> None:
        for side in self.sides:
            side.path.close()
            side.cache.close()


def _pools(cache: PagedCache) -> list[torch.Tensor]:
    return [*cache.latent, *(pool for pool in cache.index if pool is not None)]
