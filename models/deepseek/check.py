"""DeepSeek's mega-task as a subject of the protocol checker: whole decode steps of small random models."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from rocmega.cache import PAGE
from rocmega.checkpoint import Checkpoint
from rocmega.drivers.host import HostDriver
from rocmega.errors import RequestError
from rocmega.models.deepseek.cache import HybridCache
from rocmega.models.deepseek.config import from_dir
from rocmega.models.deepseek.mega import MegaPath
from rocmega.models.deepseek.presets import WRITABLE, write_checkpoint
from rocmega.models.deepseek.weights import pack
from rocmega.parallel.threads import ThreadRanks
from rocmega.step import StepBatch

if TYPE_CHECKING:
    from rocmega.check import Case, Subject

T = TypeVar("T")

# Which stage may store to which regions (descriptor.h) and caches (cache.py). `error` is anybody's.
X = ["x", "x_normed", "x_squares"]
WRITES = {
    "look_up": ["looked_up", "recent"],
    "engram_map": ["mapped", "mapped_parts"],
    "embed": ["h", *X],
    "engram_gather": ["mapped"],
    "engram_dots": ["dots"],
    "engram_add": ["h_engram", *X],
    "mix": ["products"],
    "collapse": X,
    "site": ["site"],
    "down": ["q_normed", "q_squares", "down_kv"],
    "down_wide": ["down_wide"],
    "window_entry": ["window", "window_flags"],
    "compress": ["entries", "pending", "latent", "entry_flags"],
    "key_products": ["key_values"],
    "compress_keys": ["keys", "pending_keys", "key_flags"],
    "query": ["query", "query_squares", "index_query"],
    "index_scores": ["index_scores", "score_flags"],
    "candidates": ["candidates_taken", "candidate_flags"],
    "select": ["selection", "selection_flags"],
    "attend": ["partial_out", "partial_stat", "partial_flags"],
    "merge": ["attention_out"],
    "output_groups": ["grouped"],
    "output": ["h", *X, "parts"],
    "router": ["router_scores"],
    "shared_gate_up": ["shared_middle"],
    "shared_down": ["shared_out"],
    "gate_up": ["middle"],
    "down_sum": ["h", *X, "parts"],
    "reduce": ["h", *X],
    "head": ["best", "logits"],
    "sample": ["tokens_out", "candidates"],
}


class DeepseekSubject:
    """Steps of up to three rows, their contexts noise: one with more entries than any selection or set of candidates,
    which finishes an entry of every kind; one with hardly any; one in the middle of an entry.

    Cases of two rows take two steps, the second with one of them, so that it meets the leavings of another width.
    Several ranks run in one launch, each with its part of the weights and a cache of its own.
    """

    blocks: Sequence[int] = (1, 2, 3, 4, 5, 7)
    rows: Sequence[int] = (1, 2, 3)

    def __init__(self, preset: str, dtype: str, ranks: int = 1) -> None:
        self.name = f"{preset} ({dtype})" + f", {ranks} ranks" * (ranks > 1)
        self.driver = HostDriver()
        self.driver.writes = WRITES
        self._ranks = ThreadRanks(ranks, self.driver) if ranks > 1 else None
        if self._ranks:
            self.blocks = tuple(blocks for blocks in self.blocks if blocks * ranks <= 8)
        with tempfile.TemporaryDirectory(prefix="rocmega-check-") as folder:
            directory = write_checkpoint(preset, Path(folder) / preset, dtype)
            self.config = from_dir(directory)
            self.weights = [pack(Checkpoint(directory), self.config, tp=ranks, rank=rank) for rank in range(ranks)]
        ratios = [kind.ratio for kind in self.config.compressed if kind is not None]
        self.positions = torch.tensor([PAGE + max(ratios) - 1, 2, 38], dtype=torch.int32)
        random = torch.Generator().manual_seed(7)
        tokens = torch.randint(0, self.config.vocab_size, (2, len(self.positions)), generator=random)
        self.tokens = tokens.to(torch.int32)
        self.caches = [self._cache(rank) for rank in range(ranks)]
        self.noise = [self._noise(pool, random) for pool in self.caches[0].pools.values()]

    def _driver(self, rank: int) -> HostDriver:
        return self._ranks.drivers[rank] if self._ranks else self.driver

    def _cache(self, rank: int) -> HybridCache:
        pages = sum(int(position) // PAGE + 2 for position in self.positions)
        spec = self.config.cache_spec(self.weights[0].formats.cache)
        cache = spec.open(pages, len(self.positions), self._driver(rank))
        for row, position in enumerate(self.positions.tolist()):
            cache.grow(row, position + 2)
        return cache

    def _noise(self, pool: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        if not pool.is_floating_point():  # tokens
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

    def _path(self, rank: int, blocks: int) -> MegaPath:
        return MegaPath(
            self.config,
            self.weights[rank],
            self.caches[rank],
            self._driver(rank),
            blocks=blocks,
            max_model_len=int(self.positions.max()) + 2,
            group=self._ranks.members[rank] if self._ranks else None,
        )

    def _steps(self, path: MegaPath, rank: int, rows: int) -> bytes:
        pools = self.caches[rank].pools.values()
        for pool, noise in zip(pools, self.noise, strict=True):
            pool.copy_(noise)
        made = self._step(path, rank, 0, rows)
        if rows == 2:
            made += self._step(path, rank, 1, 1)
        return made + b"".join(_bytes(pool) for pool in pools)

    def _step(self, path: MegaPath, rank: int, number: int, rows: int) -> bytes:
        table = self.caches[rank].block_table(range(rows))
        batch = StepBatch(self.tokens[number, :rows], self.positions[:rows] + number, table)
        result = path.decode(batch)
        assert result.logits is not None
        return _bytes(result.logits) + _bytes(result.tokens)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def subject(preset: str, dtype: str, ranks: int) -> Callable[[], Subject]:
    """Makes the subject, in whatever process. Raises RequestError if the preset is none that can be made."""
    if preset not in WRITABLE:
        raise RequestError(f"the checker cannot make {preset!r}: choose one of {', '.join(WRITABLE)}.")
    return functools.partial(DeepseekSubject, preset, dtype, ranks)
