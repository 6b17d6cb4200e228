"""GLM-5.2's layers without a checkpoint: shapes alone, or random weights made where they are used."""

from __future__ import annotations

from dataclasses import replace

import torch

from rocmega.checkpoint.tiles import PackedMatrix, dtype_of
from rocmega.models.common.random_weights import random_fields
from rocmega.models.common.weights import Value
from rocmega.models.glm.config import GlmConfig, from_dict
from rocmega.models.glm.plan import plan
from rocmega.models.glm.presets import preset
from rocmega.models.glm.published import Formats
from rocmega.models.glm.shard import first_layers, rank_config
from rocmega.models.glm.weights import GlmWeights, assemble
from rocmega.packing.plan import Plan

RANKS = 8  # a layer's real dimensions, as one of so many ranks has them


def rank_of_glm52(
    layers: int, format: str, device: str, *, arch: str | None = None, **changes: int
) -> tuple[GlmConfig, GlmWeights]:
    """One rank's part of the first layers, by default 3 dense ones and then mixtures. format: fp8, bf16, f32, mxfp4.

    device "meta": shapes alone. changes: of config.json.
    """
    config = first_layers(from_dict({**preset("glm-5.2"), **changes}), layers)
    island = "f32" if format == "f32" else "bf16"
    formats = Formats("fp8" if format == "mxfp4" else format, island, format)
    todo = plan(config, formats, tp=RANKS, arch=arch)
    fields = _shapes(todo) if device == "meta" else random_fields(todo, layers, device)
    part = assemble(todo.formats, config, fields, RANKS)
    return rank_config(config, RANKS), replace(part, tp=1, rank=0)  # of a model of its own


def _shapes(todo: Plan) -> dict[str, Value]:
    made: dict[str, Value] = {}
    for name, field in todo.fields.items():
        if field.count:
            made[name] = PackedMatrix.empty(field.format, field.shape, field.count, "meta")
        else:
            made[name] = torch.empty(field.shape, dtype=dtype_of(field.format), device="meta")
    return made
