"""What a decode step of DeepSeek reads of its caches."""

from __future__ import annotations

from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.published import Formats


def cache_reads(config: DeepseekConfig, formats: Formats, context: int) -> dict[str, int]:
    """Bytes that one row reads, on every rank, with `context` tokens in the cache.

    Compressors' state is read once for each entry: of a step, the average.
    """
    spec = config.cache_spec(formats.cache)
    window, entries, keys = 0, 0, 0
    for layer, kind in enumerate(config.compressed):
        window += min(context, config.sliding_window)
        if kind is None:
            continue
        made = context // kind.ratio
        entries += made if kind.selector is None else min(made, config.index_topk)
        if kind.selector == layer:
            keys += _scored(config, layer, made)
    state = sum(
        pool.bytes() // kind.ratio
        for name, pool in spec.pools().items()
        if name.startswith("pending") and (kind := config.compressed[int(name.split(".")[1])])
    )
    return {
        "window entries": window * spec.entry_bytes("window", config.head_dim),
        "compressed entries": entries * spec.entry_bytes("entries", config.head_dim),
        "index keys": keys * spec.entry_bytes("keys", config.index_head_dim),
        "compressors' state": state,
    }


def _scored(config: DeepseekConfig, layer: int, made: int) -> int:
    """Index keys that a layer reads: those of candidates, where it is bound to them."""
    bound = config.candidates
    if bound is None or layer <= bound.source:
        return made
    return min(made, bound.blocks * bound.block_size)
