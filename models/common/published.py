"""Comparing a checkpoint's headers with what a model expects of them: what every family does alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rocmega.checkpoint.layouts import scale_names
from rocmega.errors import CheckpointError

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint

Expected = dict[str, tuple[tuple[int, ...], str]]  # tensor name -> (shape, kind), scales not counted
Layouts = dict[str, dict[str, str]]  # kind -> layout -> the first tensor that has it

_PLAIN = {"F32": "f32", "BF16": "bf16"}
_NARROW = ("F8_E4M3", "U8", "I8")


def scale_name(name: str) -> str:
    """The FP8 block scales' tensor of a weight, in checkpoints that have float32 ones."""
    return scale_names(name)[0]


def plain_layout(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> str:
    """How a tensor that nobody quantizes is stored, "f32" or "bf16"; CheckpointError with what is wrong with it."""
    at = checkpoint.file(name).name
    stored = _PLAIN.get(checkpoint.info(name).dtype)
    check_shape(checkpoint, name, shape)
    if stored is None:
        raise CheckpointError(f"tensor {name} in {at} is {checkpoint.dtype(name)}, which is not supported there")
    return stored


def check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError if a tensor has another shape."""
    if checkpoint.shape(name) != shape:
        at = checkpoint.file(name).name
        raise CheckpointError(f"tensor {name} in {at} is {list(checkpoint.shape(name))}, not {list(shape)}")


def check_matrix_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> bool:
    """The same of a matrix that may be quantized; whether its bytes hold two numbers each."""
    packed = checkpoint.info(name).dtype in ("U8", "I8")
    stored = (shape[0], shape[1] // 2) if packed else shape
    if checkpoint.shape(name) != stored:
        at = checkpoint.file(name).name
        raise CheckpointError(f"tensor {name} in {at} is {list(checkpoint.shape(name))}, not {list(shape)}")
    return packed


def mixtures(layouts: Layouts, groups: Mapping[str, str]) -> Iterator[str]:
    """Dtypes that differ within a group of matrices, or float32 beside anything else.

    groups: kind -> the beginning of a sentence about its matrices.
    """
    for kind, of in groups.items():
        if len(layouts[kind]) > 1:
            yield f"{of} of different dtypes, {_named(layouts[kind])}, and one launch runs one format"
    found = {layout: name for kind in groups for layout, name in layouts[kind].items()}
    if "f32" in found and len(found) > 1 and all(len(layouts[kind]) < 2 for kind in groups):
        yield f"the big matrices are of different dtypes, {_named(found)}, and float32 stands alone"


def _named(layouts: dict[str, str]) -> str:
    return " and ".join(f"{layout} ({name})" for layout, name in layouts.items())


def extra(
    checkpoint: Checkpoint, expected: Expected, quantizable: Iterable[str], ignored: Callable[[str], bool]
) -> Iterator[str]:
    """Tensors that the model's mathematics has no place for: biases, other scales, parts that a layer does not have."""
    kinds = set(quantizable)
    scales = {scale: name for name, (_, kind) in expected.items() if kind in kinds for scale in scale_names(name)}
    for name in checkpoint.names():
        if name in expected or ignored(name):
            continue
        weight = scales.get(name)
        if weight is not None and weight in checkpoint and checkpoint.info(weight).dtype in _NARROW:
            continue
        yield f"tensor {name} is not part of the model that config.json describes"


def raise_faults(checkpoint: Checkpoint, faults: Iterable[str]) -> None:
    """Raises CheckpointError if there are any."""
    listed = list(dict.fromkeys(faults))  # a damaged file is met once per tensor
    if listed:
        shown = "; ".join(fault.rstrip(".") for fault in listed[:8])
        shown += f"; and {len(listed) - 8} more" if len(listed) > 8 else ""
        raise CheckpointError(
            f"{checkpoint.directory} does not hold the model of its config.json: {shown}. Fetch the checkpoint again, "
            "or use the config.json that belongs to it."
        )
