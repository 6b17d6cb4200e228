"""What a decode step of GLM reads of its caches."""

from __future__ import annotations

from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.published import Formats


def cache_reads(config: GlmConfig, formats: Formats, context: int) -> dict[str, int]:
    """Bytes that one row reads, on every rank, with `context` tokens in the cache."""
    spec = config.cache_spec(formats.cache)
    size = spec.dtype.itemsize
    selected = min(context, config.index_topk)
    return {
        "selected latents": config.num_hidden_layers * selected * spec.latent_dim * size,
        "index keys": sum(config.full_index) * context * spec.index_dim * size,
    }
