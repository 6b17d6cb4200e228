"""The header of one safetensors file, checked before any of its bytes are trusted."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rocmega.errors import CheckpointError

# The safetensors format's own limit; a longer header is damage, or an attempt to make us allocate.
MAX_HEADER_BYTES = 100_000_000

# safetensors dtype name -> (torch attribute, bytes of an element); only what published checkpoints hold.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    dtype: str  # safetensors name: a key of DTYPES where we know it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header alone.

    Raises CheckpointError, naming the file, if it is missing, shorter than its header promises, or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(f"{path} is {size} bytes long, too short for a safetensors file: fetch it again.")
            length = struct.unpack("<Q", start)[0]
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} says that its header is {length} bytes long, more than the {MAX_HEADER_BYTES} that "
                    "safetensors allows: the file is damaged or of another format. Fetch it again, or convert it."
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: its header needs {8 + length} bytes and the file has {size}. Fetch it again."
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check that the file is there, whole."
        ) from None
    return _check_extents(path, _parse(path, text), 8 + length, size - 8 - length)


def _parse(path: Path, text: bytes) -> dict[str, dict[str, Any]]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise CheckpointError(
            f"{path} has no readable safetensors header: it is damaged or of another format. Fetch it again."
        )
    header.pop("__metadata__", None)
    return header


def _check_extents(path: Path, header: dict[str, dict[str, Any]], start: int, available: int) -> dict[str, TensorInfo]:
    tensors = {}
    for name, entry in header.items():
        shape: Any = entry.get("shape")
        dtype: Any = entry.get("dtype")
        offsets: Any = entry.get("data_offsets")
        if not (isinstance(dtype, str) and _naturals(shape) and _naturals(offsets) and len(offsets) == 2):
            raise CheckpointError(f"{path}: the header's entry for tensor {name} is damaged. Fetch the file again.")
        begin, end = offsets
        if end > available:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {end} of the data and the file has {available}. "
                "Fetch it again."
            )
        if begin > end or (dtype in DTYPES and end - begin != prod(shape) * DTYPES[dtype][1]):
            raise CheckpointError(
                f"{path}: tensor {name} is {dtype} {list(shape)} but has {end - begin} bytes: the header is damaged. "
                "Fetch the file again."
            )
        tensors[name] = TensorInfo(dtype, tuple(shape), start + begin, end - begin)
    return tensors


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
