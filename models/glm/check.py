"""GLM's mega-task as a subject of the protocol checker: whole decode steps of a small model with random weights."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from rocmega.cache import PAGE, PagedCache
from rocmega.checkpoint import Checkpoint
from rocmega.drivers.host import HostDriver
from rocmega.errors import RequestError
from rocmega.models.glm.config import GlmConfig, from_dir
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.presets import WRITABLE, write_checkpoint
from rocmega.models.glm.weights import pack
from rocmega.parallel.threads import ThreadRanks
from rocmega.step import StepBatch

if TYPE_CHECKING:
    from rocmega.check import Case, Subject

T = TypeVar("T")

# Which stage may store to which regions (descriptor.h). `error` is anybody's.
X = ["x", "x_normed", "x_squares"]
WRITES = {
    "embed": X,
    "down": ["q_normed", "q_squares", "down_kv", "down_index"],
    "index_weights": ["down_index"],
    "cache_entry": ["latent_cache", "index_cache", "cache_flags"],
    "query": ["query", "index_query"],
    "index_scores": ["index_scores", "score_flags"],
    "select": ["selection", "selection_flags"],
    "latent_query": ["latent_query"],
    "attend": ["partial_out", "partial_stat", "partial_flags"],
    "merge": ["latent_out"],
    "value_up": ["attention_out"],
    "output": [*X, "parts"],
    "reduce": X,
    "router": ["router_scores"],
    "gate_up": ["middle"],
    "down_sum": [*X, "parts"],
    "head": ["best", "logits"],
    "sample": ["tokens_out", "ring", "candidates"],
}


class GlmSubject:
    """Steps of up to three requests: longer than the selection, shorter, and at a page border. Contexts are noise.

    Cases of two rows take two steps, the second with one of them, so that it meets the leavings of another width. Cases
    of four have successive tokens of one request, the second of which attends to what the first has written in the
    same step.
    Several ranks run in one launch, each with its part of the weights and a cache of its own.
    """

    blocks: Sequence[int] = (1, 2, 3, 4, 5, 7)
    rows: Sequence[int] = (1, 2, 3, 4)

    def __init__(self, preset: str, dtype: str, ranks: int = 1) -> None:
        self.name = f"{preset} ({dtype})" + f", {ranks} ranks" * (ranks > 1)
        self.driver = HostDriver()
        self.driver.writes = WRITES
        self._ranks = ThreadRanks(ranks, self.driver) if ranks > 1 else None
        if self._ranks:
            self.blocks = tuple(blocks for blocks in self.blocks if blocks * ranks <= 8)
        with tempfile.TemporaryDirectory(prefix="rocmega-check-") as folder:
            directory = write_checkpoint(preset, Path(folder) / preset, dtype)
            self.config: GlmConfig = from_dir(directory)
            self.weights = [pack(Checkpoint(directory), self.config, tp=ranks, rank=rank) for rank in range(ranks)]
        beyond = self.config.index_topk + PAGE
        self.positions = torch.tensor([beyond, 5, PAGE], dtype=torch.int32)
        self._make_caches(torch.Generator().manual_seed(7))

    def _make_caches(self, random: torch.Generator) -> None:
        counts = [int(position) // PAGE + 1 for position in self.positions]
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        scattered = torch.randperm(sum(counts), generator=random).to(torch.int32)
        for row, pages in enumerate(scattered.split(counts)):
            self.table[row, : len(pages)] = pages
        self.tokens = torch.randint(0, self.config.vocab_size, (2, len(counts)), generator=random).to(torch.int32)
        spec = self.config.cache_spec(self.weights[0].formats.cache)
        self.caches = [PagedCache(spec, len(scattered), self._driver(rank)) for rank in range(len(self.weights))]
        self.noise = [torch.randn(pool.shape, generator=random).to(pool.dtype) for pool in self._pools(0)]

    def _driver(self, rank: int) -> HostDriver:
        return self._ranks.drivers[rank] if self._ranks else self.driver

    def _pools(self, rank: int) -> list[torch.Tensor]:
        cache = self.caches[rank]
        return [pool for pool in (*cache.latent, *cache.index) if pool is not None]

    def _on_each_rank(self, work: Callable[[int], T]) -> list[T]:
        return self._ranks.run(work) if self._ranks else [work(0)]

    def run(self, case: Case) -> bytes:
        """Logits, tokens and cache entries of all steps of the case, on all ranks."""
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
        for pool, noise in zip(self._pools(rank), self.noise, strict=True):
            pool.copy_(noise)
        made = [self._step(path, rank, 0, rows)]
        if rows == 2:
            made.append(self._step(path, rank, 1, 1))
        return b"".join(made)

    def _step(self, path: MegaPath, rank: int, number: int, rows: int) -> bytes:
        requests = [0, 1, 1, 2] if rows == 4 else list(range(rows))
        later = torch.tensor([requests[:row].count(request) for row, request in enumerate(requests)])
        positions, table = self.positions[requests] + number + later.to(torch.int32), self.table[requests]
        result = path.decode(StepBatch(self.tokens[number, requests], positions, table))
        assert result.logits is not None
        pages = table.gather(1, positions[:, None].long() // PAGE)[:, 0].long()
        entries = [pool[pages, positions.long() % PAGE] for pool in self._pools(rank)]
        tensors = [result.logits, result.tokens, *entries]
        return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def subject(preset: str, dtype: str, ranks: int) -> Callable[[], Subject]:
    """Makes the subject, in whatever process. Raises RequestError if the preset is none that can be made."""
    if preset not in WRITABLE:
        raise RequestError(f"the checker cannot make {preset!r}: choose one of {', '.join(WRITABLE)}.")
    return functools.partial(GlmSubject, preset, dtype, ranks)
