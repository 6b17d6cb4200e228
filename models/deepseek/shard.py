"""A part of a model as one of its own: one rank's, or its first layers; and random values of what no other family has.

A rank alone has nobody to sum up with: models/glm/shard.py says what then stands for the others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.tiles import scaled
from rocmega.errors import RequestError
from rocmega.models.deepseek.config import DeepseekConfig, Engram
from rocmega.models.deepseek.engram import primes
from rocmega.packing.plan import divide

if TYPE_CHECKING:
    from rocmega.models.common.random_weights import Plain
    from rocmega.models.common.weights import Layer
    from rocmega.models.deepseek.weights import DeepseekWeights
    from rocmega.packing.plan import Field

_SHARED = ("num_attention_heads", "o_groups", "moe_intermediate_size", "vocab_size")
_ADDED = ("o_b", "down", "shared_down")  # what ranks sum up
# Rows of a column of Engram's tables, where they have to be short: both tables of V4.1 are 2.5 GB then, which no cache
# holds, and not 203 GB.
_COLUMN = 200_000


def rank_config(config: DeepseekConfig, tp: int) -> DeepseekConfig:
    """What one of `tp` ranks runs. Raises ConfigError if they cannot share the model evenly.

    Of Engram's keys and value a rank makes some channels, which then stand for the others', too.
    """
    sizes = {name: getattr(config, name) for name in _SHARED}
    engram = config.engram
    divide({**sizes, "hidden_size": config.hidden_size} if engram else sizes, tp)
    shares = {name: size // tp for name, size in sizes.items()}
    return dataclasses.replace(config, **shares, engram=engram and dataclasses.replace(engram, copies=tp))


def alone(weights: DeepseekWeights) -> DeepseekWeights:
    """One rank's weights as those of a model of its own, whose layers add this rank's share once for every rank.

    Shares the memory of all but what depends on it. Raises RequestError for MXFP4 and a number of ranks that is no
    power of two.
    """
    tp, rank = weights.tp, weights.rank
    if tp == 1:
        return weights
    layers: list[Layer] = []
    for layer in weights.layers:
        sinks = layer["sinks"]
        assert isinstance(sinks, torch.Tensor)
        added = {name: scaled(layer[name], tp) for name in _ADDED}  # type: ignore[arg-type]
        layers.append({**layer, **added, "sinks": sinks.view(tp, -1)[rank]})
    return dataclasses.replace(weights, layers=layers, tp=1, rank=0)


def measurable(config: DeepseekConfig) -> tuple[DeepseekConfig, str]:
    """The model with random weights on one GPU, and what is not as published then, for people: "" if nothing.

    Engram's tables lie in host memory, once for all ranks of a machine. A GPU that is measured has short ones itself.
    """
    engram = config.engram
    if engram is None or engram.vocab_size <= _COLUMN:
        return config, ""
    columns = primes(len(engram.layers), engram.max_ngram_size, engram.n_heads, _COLUMN)
    short = dataclasses.replace(engram, vocab_size=_COLUMN, rows=tuple(map(sum, columns)))
    note = (
        f"Engram's tables are short, {short.rows[0]:,} rows in the device's memory, not {engram.rows[0]:,} in the "
        "host's: a token looks up as many"
    )
    return dataclasses.replace(config, engram=short), note


def first_layers(config: DeepseekConfig, layers: int) -> DeepseekConfig:
    """The model with its first layers only. Raises RequestError if it has not that many."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise RequestError(f"{layers} layers were asked for and the model has {config.num_hidden_layers}.")
    bound = config.candidates
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        compressed=config.compressed[:layers],
        hash_layers=config.hash_layers[:layers],
        candidates=bound if bound is not None and bound.source < layers else None,
        engram=None if config.engram is None else _first_tables(config.engram, layers),
    )


def _first_tables(engram: Engram, layers: int) -> Engram | None:
    """Those of the first layers: what the others' columns are does not change them."""
    there = tuple(layer for layer in engram.layers if layer < layers)
    return dataclasses.replace(engram, layers=there, rows=engram.rows[: len(there)]) if there else None


def plain_fields(config: DeepseekConfig) -> Plain:
    """For `random_fields`: tables, mixing weights, biases of this family."""

    def make(field: Field, source: torch.Generator, device: torch.device | str) -> torch.Tensor | None:
        name, shape = field.name.rsplit(".", 1)[-1], field.shape

        def integers(low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=source, device=device, dtype=dtype)

        if name == "experts_of_token":
            order = torch.rand(shape[0], config.n_routed_experts, generator=source, device=device).argsort(-1)
            return order[:, : shape[1]].to(torch.int32).contiguous()
        if name == "token_map":
            assert config.engram is not None
            return integers(0, config.engram.compressed_vocab_size, torch.int32)
        if name == "engram_codes":
            return integers(0, 127, torch.uint8)  # e4m3 without NaN
        if name == "engram_scales":
            return integers(119, 122, torch.uint8)
        if not name.endswith(("_mix", "_base", "_ape", "sinks")):
            return None
        values = torch.empty(shape, device=device).normal_(generator=source)
        return values / math.sqrt(shape[-1]) if name.endswith("_mix") else values * 0.5

    return make
