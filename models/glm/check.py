"""GLM's mega-task as a subject of the protocol checker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rocmega.cache import PAGE
from rocmega.models.common.check import DecodeSubject

if TYPE_CHECKING:
    import torch

    from rocmega.cache import PagedCache

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
    "sample": ["tokens_out", "ring", "next_tokens", "adjusted", "candidates"],
}


class MegaSubject(DecodeSubject):
    """Contexts: longer than the selection, shorter, and at a page border."""

    writes = WRITES
    rows: Sequence[int] = (1, 2, 3, 4)

    def _positions(self) -> Sequence[int]:
        return self.config.index_topk + PAGE, 5, PAGE

    def _pools(self, cache: PagedCache) -> Iterable[torch.Tensor]:
        return [pool for pool in (*cache.latent, *cache.index) if pool is not None]
