"""Packed weights: the tile-major layout that kernels stream, and its way back.

A matrix [N, K] (N outputs, K inputs) is padded with zeros to whole tiles and cut into tiles of 16 rows and 1 KB. A
tile is 64 slots of 16 bytes: slot `chunk * 16 + row` holds E = 16 / itemsize neighbouring inputs of one row, `chunk *
E` onwards. So a wave of 64 lanes reads a tile with one contiguous load of 16 bytes per lane, and each lane's bytes are
the operand that the matrix instruction wants from it. `hip/tile/tile.h` is the same definition for kernels.

FP8 scales stay as published: float32 [ceil(N / 128)][ceil(K / 128)].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE_ROWS = 16
TILE_BYTES = 1024
CHUNKS = 4  # of 16 bytes in a tile's row
SCALE_BLOCK = 128

# Format -> (dtype of the elements, columns that K is padded to: whole tiles and whole matrix instructions).
_FORMATS: dict[str, tuple[torch.dtype, int]] = {
    "f32": (torch.float32, 16),
    "bf16": (torch.bfloat16, 32),
    "fp8": (torch.float8_e4m3fn, 128),
}
# Elements are moved, never interpreted, so packing works on integers of the same size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def dtype_of(format: str) -> torch.dtype:
    """The torch dtype of a format's elements ("f32", "bf16", "fp8")."""
    return _FORMATS[format][0]


def chunk_elements(format: str) -> int:
    """Elements in one 16-byte slot."""
    return 16 // dtype_of(format).itemsize


def tile_columns(format: str) -> int:
    """Columns (inputs) of one tile: 16 for f32, 32 for bf16, 64 for fp8."""
    return CHUNKS * chunk_elements(format)


def tile_grid(format: str, n: int, k: int) -> tuple[int, int]:
    """Tiles of a packed [n, k] matrix as (rows of tiles, tiles in a row), padding included."""
    padding = _FORMATS[format][1]
    padded_k = -(-k // padding) * padding
    return -(-n // TILE_ROWS), padded_k // tile_columns(format)


def packed_bytes(format: str, n: int, k: int) -> int:
    """Bytes of the tiles of one packed [n, k] matrix, scales not counted."""
    rows, columns = tile_grid(format, n, k)
    return rows * columns * TILE_BYTES


def scale_grid(n: int, k: int) -> tuple[int, int]:
    """Shape of the 128x128 block scales of an [n, k] matrix."""
    return -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)


def pack_tiles(weight: torch.Tensor, format: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Packs `weight` [n, k], already in the format's dtype.

    Returns uint8 [rows of tiles, tiles in a row, 1024]; writes into `out` of that shape if given.
    """
    dtype, _ = _FORMATS[format]
    if weight.dtype != dtype or weight.dim() != 2:
        raise ValueError(f"pack_tiles wants a matrix of {dtype}, not {weight.dtype} {list(weight.shape)}")
    n, k = weight.shape
    rows, columns = tile_grid(format, n, k)
    if out is None:
        out = torch.empty(rows, columns, TILE_BYTES, dtype=torch.uint8, device=weight.device)
    bits, chunk = _BITS[dtype.itemsize], chunk_elements(format)
    source = weight.contiguous().view(bits)
    padded_n, padded_k = rows * TILE_ROWS, columns * tile_columns(format)
    if (padded_n, padded_k) != (n, k):
        padded = source.new_zeros(padded_n, padded_k)
        padded[:n, :k] = source
        source = padded
    tiles = source.view(rows, TILE_ROWS, columns, CHUNKS, chunk).permute(0, 2, 3, 1, 4)
    out.view(bits).view(rows, columns, CHUNKS, TILE_ROWS, chunk).copy_(tiles)
    return out


def unpack_tiles(tiles: torch.Tensor, format: str, n: int, k: int) -> torch.Tensor:
    """The inverse of `pack_tiles`: uint8 [..., rows, columns, 1024] to [..., n, k] in the format's dtype."""
    dtype = dtype_of(format)
    *outer, rows, columns, _ = tiles.shape
    slots = (
        tiles.contiguous()
        .view(_BITS[dtype.itemsize])
        .view(-1, rows, columns, CHUNKS, TILE_ROWS, chunk_elements(format))
    )
    matrix = slots.permute(0, 1, 4, 2, 3, 5).reshape(*outer, rows * TILE_ROWS, columns * tile_columns(format))
    return matrix[..., :n, :k].contiguous().view(dtype)


def expand_scales(scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Block scales [..., ceil(n / 128), ceil(k / 128)] to one scale per element, [..., n, k]."""
    by_row = scales.repeat_interleave(SCALE_BLOCK, dim=-2)[..., :n, :]
    return by_row.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :k]


def dequantize_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """E4M3 [..., n, k] times its 128x128 block scales, as float32: what the checkpoint's format means."""
    n, k = weight.shape[-2:]
    return weight.to(torch.float32).mul_(expand_scales(scales, n, k))


@dataclass(frozen=True)
class PackedMatrix:
    """`count` packed matrices [n, k] of equal size, one after the other.

    Fields:
        format: "f32", "bf16" or "fp8".
        n: rows (outputs) of one matrix, without padding.
        k: columns (inputs) of one matrix, without padding.
        tiles: uint8 [count, rows of tiles, tiles in a row, 1024], contiguous.
        scales: float32 [count, ceil(n / 128), ceil(k / 128)] for fp8, else None.
        count: how many matrices.
    """

    format: str
    n: int
    k: int
    tiles: torch.Tensor
    scales: torch.Tensor | None = None
    count: int = 1

    @classmethod
    def empty(
        cls, format: str, shape: Sequence[int], count: int = 1, device: torch.device | str = "cpu"
    ) -> PackedMatrix:
        """Room for `count` matrices of shape [n, k]; fill it with `put`."""
        n, k = shape
        rows, columns = tile_grid(format, n, k)
        tiles = torch.empty(count, rows, columns, TILE_BYTES, dtype=torch.uint8, device=device)
        scales = torch.empty(count, *scale_grid(n, k), device=device) if format == "fp8" else None
        return cls(format, n, k, tiles, scales, count)

    @classmethod
    def of(cls, weight: torch.Tensor, format: str, scales: torch.Tensor | None = None) -> PackedMatrix:
        """Packs one matrix [n, k] that is already in the format's dtype."""
        packed = cls.empty(format, weight.shape, device=weight.device)
        packed.put(0, weight, scales)
        return packed

    def put(self, index: int, weight: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Packs `weight` [n, k], in the format's dtype, as matrix `index`."""
        if tuple(weight.shape) != (self.n, self.k):
            raise ValueError(f"matrix {index} is {list(weight.shape)}, not {[self.n, self.k]}")
        if (scales is None) != (self.scales is None):
            raise ValueError(f"a matrix of format {self.format} {'needs' if scales is None else 'has no'} scales")
        if self.scales is not None and scales is not None:
            self.scales[index].copy_(scales)
        pack_tiles(weight.to(self.tiles.device), self.format, out=self.tiles[index])

    def matrix(self, index: int) -> PackedMatrix:
        """Matrix `index` alone; shares the memory."""
        scales = None if self.scales is None else self.scales[index : index + 1]
        return PackedMatrix(self.format, self.n, self.k, self.tiles[index : index + 1], scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values: [n, k], or [count, n, k] for several matrices."""
        values = unpack_tiles(self.tiles, self.format, self.n, self.k)
        values = values.to(torch.float32) if self.scales is None else dequantize_fp8(values, self.scales)
        return values.to(dtype)[0] if self.count == 1 else values.to(dtype)

    def bytes(self) -> int:
        """Device bytes: tiles with their padding, and scales."""
        return self.tiles.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, device: torch.device | str) -> PackedMatrix:
        """The same matrices on another device."""
        scales = None if self.scales is None else self.scales.to(device)
        return PackedMatrix(self.format, self.n, self.k, self.tiles.to(device), scales, self.count)
