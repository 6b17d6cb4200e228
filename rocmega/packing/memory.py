"""A plan carried out in memory, for one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.layouts import StoredMatrix
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.packing.plan import Field, Made, Plan

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


def make_fields(
    checkpoint: Checkpoint,
    plan: Plan,
    rank: int,
    device: torch.device | str = "cpu",
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, PackedMatrix | torch.Tensor]:
    """Field name -> packed matrices, or plain tensor, of one rank.

    before: called with the name of the field that each job makes a part of. Raises CheckpointError.
    """
    fields: dict[str, PackedMatrix | torch.Tensor] = {}
    for job in plan.jobs:
        before(job.field)
        if job.ranks is not None and rank not in job.ranks:
            continue
        for made in job.run(checkpoint, (rank,)):
            if made.field not in fields:
                fields[made.field] = _room(plan.fields[made.field], device)
            _put(fields[made.field], plan.fields[made.field], made)
    before("")
    return fields


def _room(field: Field, device: torch.device | str) -> PackedMatrix | torch.Tensor:
    if field.count:
        return PackedMatrix.empty(field.format, field.shape, field.count, device)
    return torch.empty(field.shape, dtype=field.dtype(), device="cpu" if field.host else device)


def _put(into: PackedMatrix | torch.Tensor, field: Field, made: Made) -> None:
    value = made.value
    if isinstance(into, PackedMatrix) and isinstance(value, StoredMatrix):
        into.put(made.index, value.values, value.scales, made.row)
    elif isinstance(into, torch.Tensor) and isinstance(value, torch.Tensor):
        rows = into if value.shape == into.shape else into[made.row : made.row + value.shape[0]]
        rows.copy_(value)
    else:
        raise TypeError(f"{field.name}: a plain tensor and a packed matrix were confused")
