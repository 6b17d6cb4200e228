"""GLM's mega-task as a subject of the protocol checker: whole decode steps of a small model with random weights."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rocmega.cache import PAGE, PagedCache
from rocmega.checkpoint import Checkpoint
from rocmega.drivers.host import HostDriver
from rocmega.errors import RequestError
from rocmega.models.glm.config import GlmConfig, from_dir
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.presets import WRITABLE, write_checkpoint
from rocmega.models.glm.weights import pack
from rocmega.step import StepBatch

if TYPE_CHECKING:
    from rocmega.check import Case, Subject

# Which stage may store to which regions (descriptor.h). `error` is anybody's.
WRITES = {
    "embed": ["x"],
    "down": ["down_q", "down_kv", "down_index"],
    "cache_entry": ["latent_cache", "index_cache", "cache_flags"],
    "query": ["query", "index_query"],
    "index_scores": ["index_scores", "score_flags"],
    "select": ["selection", "selection_flags"],
    "latent_query": ["latent_query"],
    "attend": ["partial_out", "partial_stat", "partial_flags"],
    "merge": ["latent_out"],
    "value_up": ["attention_out"],
    "output": ["x"],
    "router": ["router_scores"],
    "gate_up": ["middle"],
    "down_sum": ["x"],
    "head": ["best", "logits"],
    "sample": ["tokens_out"],
}


class GlmSubject:
    """Steps of up to three rows: longer than the selection, shorter, and at a page border. Contexts are noise.

    Cases of two rows take two steps, the second with one of them, so that it meets the leavings of another width.
    """

    blocks: Sequence[int] = (1, 2, 3, 4, 5, 7)
    rows: Sequence[int] = (1, 2, 3)

    def __init__(self, preset: str, dtype: str) -> None:
        with tempfile.TemporaryDirectory(prefix="rocmega-check-") as folder:
            directory = write_checkpoint(preset, Path(folder) / preset, dtype)
            self.config: GlmConfig = from_dir(directory)
            self.weights = pack(Checkpoint(directory), self.config)
        self.name = f"{preset} ({dtype})"
        self.driver = HostDriver()
        self.driver.writes = WRITES
        beyond = self.config.index_topk + PAGE
        self.positions = torch.tensor([beyond, 5, PAGE], dtype=torch.int32)
        self._make_cache(torch.Generator().manual_seed(7))

    def _make_cache(self, random: torch.Generator) -> None:
        counts = [int(position) // PAGE + 1 for position in self.positions]
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        scattered = torch.randperm(sum(counts), generator=random).to(torch.int32)
        for row, pages in enumerate(scattered.split(counts)):
            self.table[row, : len(pages)] = pages
        self.tokens = torch.randint(0, self.config.vocab_size, (2, len(counts)), generator=random).to(torch.int32)
        self.cache = PagedCache(self.config.cache_spec(self.weights.formats.cache), len(scattered), self.driver)
        self.noise = [torch.randn(pool.shape, generator=random).to(pool.dtype) for pool in self._pools]

    @property
    def _pools(self) -> list[torch.Tensor]:
        return [pool for pool in (*self.cache.latent, *self.cache.index) if pool is not None]

    def run(self, case: Case) -> bytes:
        """Logits, tokens and cache entries of all steps of the case."""
        longest = int(self.positions.max()) + 2
        path = MegaPath(self.config, self.weights, self.cache, self.driver, blocks=case.blocks, max_model_len=longest)
        for pool, noise in zip(self._pools, self.noise, strict=True):
            pool.copy_(noise)
        try:
            made = [self._step(path, 0, case.rows)]
            if case.rows == 2:
                made.append(self._step(path, 1, 1))
            return b"".join(made)
        finally:
            path.close()

    def _step(self, path: MegaPath, number: int, rows: int) -> bytes:
        positions, table = self.positions[:rows] + number, self.table[:rows]
        result = path.decode(StepBatch(self.tokens[number, :rows], positions, table))
        assert result.logits is not None
        pages = table.gather(1, positions[:, None].long() // PAGE)[:, 0].long()
        entries = [pool[pages, positions.long() % PAGE] for pool in self._pools]
        tensors = [result.logits, result.tokens, *entries]
        return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def subject(preset: str, dtype: str, ranks: int) -> Callable[[], Subject]:
    """Makes the subject, in whatever process. Raises RequestError if the preset is none that can be made."""
    if preset not in WRITABLE:
        raise RequestError(f"the checker cannot make {preset!r}: choose one of {', '.join(WRITABLE)}.")
    if ranks != 1:
        raise RequestError("the checker runs one rank of this model.")
    return functools.partial(GlmSubject, preset, dtype)
