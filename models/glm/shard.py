"""One rank of a model as a model of its own: fewer heads, narrower MLPs, a smaller vocabulary; or fewer layers."""

from __future__ import annotations

import dataclasses

from rocmega.errors import RequestError
from rocmega.models.glm.config import GlmConfig
from rocmega.packing.plan import divide

_SHARED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def rank_config(config: GlmConfig, tp: int) -> GlmConfig:
    """What one of `tp` ranks runs. Raises ConfigError if they cannot share the model evenly."""
    sizes = {name: getattr(config, name) for name in _SHARED}
    divide(sizes, tp)
    return dataclasses.replace(config, **{name: size // tp for name, size in sizes.items()})


def first_layers(config: GlmConfig, layers: int) -> GlmConfig:
    """The model with its first layers only. Raises RequestError if it has not that many."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise RequestError(f"{layers} layers were asked for and the model has {config.num_hidden_layers}.")
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        dense_layers=config.dense_layers[:layers],
        full_index=config.full_index[:layers],
    )
