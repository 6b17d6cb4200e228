"""One rank of a model as a model of its own: fewer heads, narrower MLPs, a smaller vocabulary; or fewer layers.

A rank alone has nobody to sum up with. Where it is measured, it takes its own share for everybody's: the mega-task by
the hand-offs that it has for the others (rocmega.parallel.Loopback), other paths by weights that are as many times as
large.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rocmega.checkpoint.tiles import scaled
from rocmega.errors import RequestError
from rocmega.models.glm.config import GlmConfig
from rocmega.packing.plan import divide

if TYPE_CHECKING:
    from rocmega.models.glm.weights import GlmWeights

_SHARED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def rank_config(config: GlmConfig, tp: int) -> GlmConfig:
    """What one of `tp` ranks runs. Raises ConfigError if they cannot share the model evenly."""
    sizes = {name: getattr(config, name) for name in _SHARED}
    divide(sizes, tp)
    return dataclasses.replace(config, **{name: size // tp for name, size in sizes.items()})


def measurable(config: GlmConfig) -> tuple[GlmConfig, str]:
    """The model with random weights on one GPU, and what is not as published then, for people: nothing."""
    return config, ""


def plain_fields(config: GlmConfig) -> None:
    """For `random_fields`: fields that are no matrices are as everybody's."""


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


def alone(weights: GlmWeights) -> GlmWeights:
    """One rank's weights as those of a model of its own, whose layers add this rank's share once for every rank.

    Shares the memory of all but what depends on it. Raises RequestError for MXFP4 and a number of ranks that is no
    power of two.
    """
    if weights.tp == 1:
        return weights
    layers = [
        {**layer, **{name: scaled(layer[name], weights.tp) for name in ("o", "down")}}  # type: ignore[arg-type]
        for layer in weights.layers
    ]
    return dataclasses.replace(weights, layers=layers, tp=1, rank=0)
