"""What a decode step of GLM reads of its caches, and how many of its stages wait for one another."""

from __future__ import annotations

from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.published import Formats


def cache_reads(config: GlmConfig, formats: Formats, context: int) -> dict[str, int]:
    """Bytes that one row reads, on every rank, with `context` tokens in the cache."""
    spec = config.cache_spec(formats.cache)
    size = spec.dtype.itemsize
    selected, scored = min(context, config.index_topk), context if selects(config, context) else 0
    return {
        "selected latents": config.num_hidden_layers * selected * spec.latent_dim * size,
        "index keys": sum(config.full_index) * scored * spec.index_dim * size,
    }


def hand_offs(config: GlmConfig, context: int) -> int:
    """How many stages, each waiting for the one before, lie between the token that goes in and the one that comes out.

    A path that launches a kernel for each of them, or several, has as many borders of kernels at least.
    """
    attention = 7  # low rank, queries, latent queries, attention, merge, out of the latent space, output
    scored = context > config.index_topk  # then index scores and a selection, beside the latent queries
    layers = sum(attention + (scored and full) for full in config.full_index)
    mlps = sum(2 if dense else 3 for dense in config.dense_layers)  # with the router, where there are experts
    return layers + mlps + 3  # embedding, head, choice


def selects(config: GlmConfig, context: int) -> bool:
    """Whether there is something to leave out: else indexers only make the keys that later steps will need."""
    return context > config.index_topk


def unread_fields(config: GlmConfig, context: int) -> frozenset[str]:
    """Fields of LayerWeights that a step at this context has no use for."""
    return frozenset() if selects(config, context) else frozenset({"index_q", "index_weights"})
