"""The files of one rank's pack, byte by byte: safetensors, one for each layer and one for the rest.

Sizes and offsets follow from the fields alone, so parts can be written in any order. Tiles come first and the data
begin at a multiple of 4 KB, so every tile is as aligned in a mapped file as the kernels could wish.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from rocmega.checkpoint import tiles
from rocmega.checkpoint.layouts import StoredMatrix
from rocmega.packing.plan import DRAFT, ITEMSIZE, Field, Made

ALIGNMENT = 4096
REST, DRAFT_FILE = "top.safetensors", "draft.safetensors"


@dataclass(frozen=True)
class PackFile:
    """One file.

    Fields:
        name: in the pack's directory.
        header: its first bytes, up to the data.
        offsets: tensor name -> where in the file it begins.
        sizes: tensor name -> bytes.
    """

    name: str
    header: bytes
    offsets: dict[str, int]
    sizes: dict[str, int]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(self.sizes.values())


def file_of(field: str) -> str:
    """The file that holds a field."""
    parts = field.split(".")
    if field.startswith(DRAFT):
        return DRAFT_FILE
    return f"layer-{int(parts[1]):05d}.safetensors" if parts[0] == "layers" else REST


def lay_out(fields: Iterable[Field]) -> dict[str, PackFile]:
    """File name -> file, for the fields of one rank."""
    by_file: dict[str, list[Field]] = {}
    for field in fields:
        by_file.setdefault(file_of(field.name), []).append(field)
    return {name: _file(name, of) for name, of in by_file.items()}


def _file(name: str, fields: list[Field]) -> PackFile:
    tensors = [(tensor, *entry) for field in fields for tensor, entry in field.tensors().items()]
    tensors.sort(key=_rank)
    entries: dict[str, object] = {"__metadata__": {"layout": f"{tiles.LAYOUT_TAG} {tiles.LAYOUT_VERSION}"}}
    begin, offsets, sizes = 0, {}, {}
    for tensor, dtype, shape in tensors:
        size = prod(shape) * ITEMSIZE[dtype]
        entries[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        offsets[tensor], sizes[tensor] = begin, size
        begin += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return PackFile(name, header, {tensor: len(header) + at for tensor, at in offsets.items()}, sizes)


def _rank(entry: tuple[str, str, tuple[int, ...]]) -> int:
    """Tiles, then scales of bytes, then plain tensors, and float32 scales, whose sizes are the least even, last."""
    name, dtype, _ = entry
    if name.endswith(".tiles"):
        return 0
    return (1 if dtype == "U8" else 3) if name.endswith(".scales") else 2


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor, and where in it they begin."""

    tensor: str
    offset: int
    data: torch.Tensor  # uint8 [bytes]


def pieces(field: Field, made: Made) -> Iterator[Piece]:
    """A part of a field as it lies in the file."""
    value = made.value
    if isinstance(value, torch.Tensor):
        row_bytes = prod(field.shape[1:]) * value.dtype.itemsize
        yield Piece(field.name, made.row * row_bytes, _bytes(value))
        return
    packed = _packed(field, value)
    yield _piece(field, made, "tiles", packed.tiles[0], tiles.TILE_ROWS)
    if packed.scales is not None:
        unit = tiles.TILE_ROWS if field.format == "mxfp4" else tiles.FORMATS[field.format].block
        yield _piece(field, made, "scales", packed.scales[0], unit)


def _packed(field: Field, value: StoredMatrix) -> tiles.PackedMatrix:
    if value.layout != field.format or value.k != field.shape[1]:
        raise ValueError(f"{field.name} wants {field.format} {list(field.shape)}, not {value.layout}")
    return tiles.PackedMatrix.of(value.values, field.format, value.scales)


def _piece(field: Field, made: Made, what: str, data: torch.Tensor, unit: int) -> Piece:
    """`data` is [rows of units, ...]; the tensor [count, all rows of units, ...]."""
    row_bytes = data[0].nbytes
    whole = -(-field.shape[0] // unit) * row_bytes
    return Piece(f"{field.name}.{what}", made.index * whole + made.row // unit * row_bytes, _bytes(data))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
