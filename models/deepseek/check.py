"""DeepSeek's mega-task as a subject of the protocol checker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rocmega.cache import PAGE
from rocmega.models.common.check import DecodeSubject

if TYPE_CHECKING:
    import torch

    from rocmega.models.deepseek.cache import HybridCache

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
    "sample": ["tokens_out", "next_tokens", "adjusted", "candidates"],
}


class MegaSubject(DecodeSubject):
    """Contexts: one with more entries than any selection or set of candidates, which finishes an entry of every kind;
    one with hardly any; one in the middle of an entry.
    """

    writes = WRITES

    def _positions(self) -> Sequence[int]:
        longest = max(kind.ratio for kind in self.config.compressed if kind is not None)
        return PAGE + longest - 1, 2, 38

    def _pools(self, cache: HybridCache) -> Iterable[torch.Tensor]:
        return cache.pools.values()
