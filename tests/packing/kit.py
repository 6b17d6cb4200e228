"""What the tests of packing share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from rocmega.checkpoint import Checkpoint
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.models.glm.config import from_dir
from rocmega.models.glm.weights import plan_of
from rocmega.packing.memory import make_fields

KINDS = ("f32", "bf16", "fp8", "mxfp4")
Fields = Mapping[str, PackedMatrix | torch.Tensor]


def in_memory(checkpoint: Path, *, tp: int = 1, rank: int = 0, arch: str | None = None) -> Fields:
    """The fields that a pack has to have."""
    opened = Checkpoint(checkpoint)
    plan = plan_of(opened, from_dir(checkpoint), tp=tp, arch=arch)
    return make_fields(opened, plan, rank)


def same_bytes(one: Fields, other: Fields) -> bool:
    """Whether all fields are equal, byte for byte."""
    return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)


def _equal(one: PackedMatrix | torch.Tensor, other: PackedMatrix | torch.Tensor) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _same(one, other)
    assert isinstance(other, PackedMatrix)
    same = (one.format, one.n, one.k, one.count) == (other.format, other.n, other.k, other.count)
    scales = one.scales is None if other.scales is None else one.scales is not None and _same(one.scales, other.scales)
    return same and scales and _same(one.tiles, other.tiles)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def digests(directory: Path) -> dict[str, str]:
    """File name -> SHA-256, of everything below a directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
