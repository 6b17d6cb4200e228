"""A part of a model as one of its own: its first layers; and random values of what no other family has."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from rocmega.errors import RequestError
from rocmega.models.deepseek.config import DeepseekConfig

if TYPE_CHECKING:
    from rocmega.models.common.random_weights import Plain
    from rocmega.packing.plan import Field


def first_layers(config: DeepseekConfig, layers: int) -> DeepseekConfig:
    """The model with its first layers only. Raises RequestError if it has not that many, or Engram comes later."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise RequestError(f"{layers} layers were asked for and the model has {config.num_hidden_layers}.")
    if config.engram is not None and max(config.engram.layers) >= layers:
        raise RequestError(f"{layers} layers do not reach Engram's layer {max(config.engram.layers)}: ask for more.")
    bound = config.candidates
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        compressed=config.compressed[:layers],
        hash_layers=config.hash_layers[:layers],
        candidates=bound if bound is not None and bound.source < layers else None,
    )


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
