"""A family's mega-task as a subject of the protocol checker: decode steps of a small model with random weights."""

from __future__ import annotations

import functools
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from rocmega import registry
from rocmega.cache import PAGE, pages_for
from rocmega.checkpoint import Checkpoint
from rocmega.drivers.host import HostDriver
from rocmega.parallel.threads import ThreadRanks
from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice, Uses
from rocmega.step import StepBatch

if TYPE_CHECKING:
    from rocmega.check import Case
    from rocmega.models.common.mega import DecodePath

T = TypeVar("T")

MOST_STEPS = 3  # of a case
DRAWN = SamplingParams(temperature=1.3, top_p=0.9)
PENALIZED = SamplingParams(temperature=1.0, presence_penalty=1.0)


class DecodeSubject(ABC):
    """Steps of up to three requests, their contexts noise.

    Cases of two rows take two steps, the second with one of them, so that it meets the leavings of another width.
    In cases of three, tokens are drawn and penalized; where the kernel can, two of the rows go on for two tokens in one
    launch. Cases of four have successive tokens of one request, the second of which attends to what the first has
    written in the same step. Several ranks run in one launch, each with its part of the weights and a cache of its own;
    they choose the likeliest tokens, one step a launch.

    Fields of a family's class:
        writes: stage -> the regions (descriptor.h) and caches that it may store to. What is nowhere named is anybody's.
        rows: what its steps can be: four only where a step may have several tokens of a request.
    """

    writes: ClassVar[Mapping[str, Sequence[str]]]
    blocks: Sequence[int] = (1, 2, 3, 4, 5, 7)
    rows: Sequence[int] = (1, 2, 3)

    def __init__(self, preset: str, dtype: str, ranks: int = 1) -> None:
        self.name = f"{preset} ({dtype})" + f", {ranks} ranks" * (ranks > 1)
        self.driver = HostDriver()
        self.driver.writes = self.writes
        self._ranks = ThreadRanks(ranks, self.driver) if ranks > 1 else None
        if self._ranks:
            self.blocks = tuple(blocks for blocks in self.blocks if blocks * ranks <= 8)
        presets = registry.presets_of(preset)
        self._family = functools.partial(registry.family_module, presets.preset(preset)["model_type"])
        with tempfile.TemporaryDirectory(prefix="rocmega-check-") as folder:
            directory = presets.write_checkpoint(preset, Path(folder) / preset, dtype)
            self.config = registry.load_config(directory)
            pack = self._family("weights").pack
            self.weights = [pack(Checkpoint(directory), self.config, tp=ranks, rank=rank) for rank in range(ranks)]
        self.positions = torch.tensor(self._positions(), dtype=torch.int32)
        random = torch.Generator().manual_seed(7)
        tokens = torch.randint(0, self.config.vocab_size, (MOST_STEPS, len(self.positions)), generator=random)
        self.tokens = tokens.to(torch.int32)
        self.caches = [self._cache(rank) for rank in range(ranks)]
        self.noise = [self._noise(pool, random) for pool in self._pools(self.caches[0])]

    @abstractmethod
    def _positions(self) -> Sequence[int]:
        """Of the three requests' first tokens."""

    @abstractmethod
    def _pools(self, cache: Any) -> Iterable[torch.Tensor]:
        """All that a cache keeps."""

    def _driver(self, rank: int) -> HostDriver:
        return self._ranks.drivers[rank] if self._ranks else self.driver

    def _cache(self, rank: int) -> Any:
        """With room for all steps. Pages of one request do not lie together."""
        lengths = [int(position) + MOST_STEPS for position in self.positions]
        spec = self.config.cache_spec(self.weights[0].formats.cache)
        cache = spec.open(sum(map(pages_for, lengths)), len(lengths), self._driver(rank))
        for pages in range(1, pages_for(max(lengths)) + 1):
            for request, length in enumerate(lengths):
                cache.grow(request, min(length, pages * PAGE))
        return cache

    def _noise(self, pool: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        if not pool.is_floating_point():  # tokens, or records of bytes
            return torch.randint(0, self.config.vocab_size, pool.shape, generator=random).to(pool.dtype)
        return torch.randn(pool.shape, generator=random).to(pool.dtype)

    def _on_each_rank(self, work: Callable[[int], T]) -> list[T]:
        return self._ranks.run(work) if self._ranks else [work(0)]

    def run(self, case: Case) -> bytes:
        """Logits and tokens of all steps of the case, and the caches after them, on all ranks."""
        paths = self._on_each_rank(lambda rank: self._path(rank, case.blocks))
        try:
            return b"".join(self._on_each_rank(lambda rank: self._steps(paths[rank], rank, case.rows)))
        finally:
            self._on_each_rank(lambda rank: paths[rank].close())

    def _path(self, rank: int, blocks: int) -> DecodePath:
        path: DecodePath = self._family("mega").MegaPath(
            self.config,
            self.weights[rank],
            self.caches[rank],
            self._driver(rank),
            blocks=blocks,
            max_model_len=int(self.positions.max()) + MOST_STEPS,
            group=self._ranks.members[rank] if self._ranks else None,
        )
        return path

    def _steps(self, path: DecodePath, rank: int, rows: int) -> bytes:
        pools = list(self._pools(self.caches[rank]))
        for pool, noise in zip(pools, self.noise, strict=True):
            pool.copy_(noise)
        made = [self._step(path, rank, 0, rows)]
        if rows == 2:
            made.append(self._step(path, rank, 1, 1))
        if rows == 3 and path.tokens_per_launch > 1:
            made.append(self._launch_of_two_tokens(path, rank, 1, 2))
        return b"".join([*made, *map(_bytes, pools)])

    def _step(self, path: DecodePath, rank: int, number: int, rows: int) -> bytes:
        choices = self._choices(number) if rows == 3 and not self._ranks else None
        result = path.decode(self._batch(rank, number, rows), choices=choices)
        assert result.logits is not None
        return _bytes(result.logits) + _bytes(result.tokens)

    def _launch_of_two_tokens(self, path: Any, rank: int, number: int, rows: int) -> bytes:
        choices = None if self._ranks else [None, Choice(DRAWN, 5, number)]
        return _bytes(torch.tensor(list(path.launch_many(self._batch(rank, number, rows), 2, [()] * rows, choices))))

    def _batch(self, rank: int, number: int, rows: int) -> StepBatch:
        requests = [0, 1, 1, 2] if rows == 4 else list(range(rows))
        earlier = [requests[:row].count(request) for row, request in enumerate(requests)]  # of its tokens in this step
        positions = self.positions[requests] + number + torch.tensor(earlier, dtype=torch.int32)
        return StepBatch(self.tokens[number, requests], positions, self.caches[rank].block_table(requests))

    def _choices(self, number: int) -> list[Choice | None]:
        """The likeliest token, a drawn one, and one with penalties."""
        used = Uses(frozenset(range(0, self.config.vocab_size, 3)), Counter({7: 2, 12: 1}))
        return [None, Choice(DRAWN, 5, number), Choice(PENALIZED, 6, number, used)]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
