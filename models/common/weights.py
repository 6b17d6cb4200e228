"""Packed weights in memory: what every family does alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.packing.memory import make_fields
from rocmega.packing.plan import Plan

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # layers packed, layers in all
Value = PackedMatrix | torch.Tensor
Layer = dict[str, Value]


def tensors_of(fields: Iterable[Value]) -> Iterator[torch.Tensor]:
    """Every tensor of some fields."""
    for field in fields:
        if isinstance(field, torch.Tensor):
            yield field
        else:
            yield field.tiles
            if field.scales is not None:
                yield field.scales


def carry_out(
    checkpoint: Checkpoint, plan: Plan, layers: int, progress: Progress | None, device: torch.device | str, rank: int
) -> dict[str, Value]:
    """Field name -> packed matrices or plain tensor of one rank. progress: called after each layer with (done, all)."""
    done = 0

    def on_job(name: str) -> None:
        nonlocal done
        layer = int(name.split(".")[1]) if name.startswith("layers.") else layers
        while done < layer:
            done += 1
            if progress is not None:
                progress(done, layers)

    return make_fields(checkpoint, plan, rank, device, on_job)


def is_of(field: str, section: range | None) -> bool:
    """Whether a field is in these layers, or in none; None: in any."""
    return section is None or not field.startswith("layers.") or int(field.split(".")[1]) in section


def by_layer(fields: Mapping[str, Value], layers: int) -> list[Layer]:
    """The fields "layers.N.X" as X of layer N."""
    out: list[Layer] = [{} for _ in range(layers)]
    for name, value in fields.items():
        if name.startswith("layers."):
            _, layer, field = name.split(".")
            out[int(layer)][field] = value
    return out
