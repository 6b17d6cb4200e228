"""Packed weights: the tile-major layout that kernels stream, and its way back.

A matrix [N, K] (N outputs, K inputs) is padded with zeros to whole tiles and cut into tiles of 16 rows and 1 KB. A
tile is 64 slots of 16 bytes: slot `chunk * 16 + row` holds E = 16 / itemsize neighbouring inputs of one row, `chunk *
E` onwards. So a wave of 64 lanes reads a tile with one contiguous load of 16 bytes per lane, and each lane's bytes are
the operand that the matrix instruction wants from it. `hip/tile/tile.h` is the same definition for kernels.

Formats, their elements, what K is padded to, and their scales:

    f32          float32                                     16   none
    bf16         bfloat16                                    32   none
    fp8          e4m3 bytes, OCP                            128   float32 [ceil(N / 128)][ceil(K / 128)]
    fp8_32       e4m3 bytes, OCP                            128   float32 [ceil(N / 32)][ceil(K / 32)]
    fp8_fnuz     e4m3 bytes as gfx942's instructions take   128   as fp8
    fp8_32_fnuz  them                                       128   as fp8_32
    mxfp4        two E2M1 numbers a byte, even k low        128   uint8 E8M0 [N / 16][K / 128][64]

FNUZ reads a byte as half of what OCP does and has no -0 (0x80 is its NaN). So the bytes stay, but 0x80 becomes 0x00,
and the scales double: exactly the same values. OCP's NaN (0x7f, 0xff) has no counterpart; no weight may hold it.

A 16-byte slot of an mxfp4 tile is 32 inputs of one row, which is one MX group, and the tile's 64 scale bytes lie in the
order of its slots. Padding is zeros with a scale of 1 (127). -0 stays what it is, except for gfx942, where E2M1 may be
widened to FNUZ: there it becomes +0 (`without_negative_zero`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rocmega.errors import RequestError

TILE_ROWS = 16
TILE_BYTES = 1024
SLOT_BYTES = 16
CHUNKS = 4  # slots in a tile's row
SCALE_BLOCK = 128
MX_GROUP = 32  # neighbouring inputs of one row that share an E8M0 scale
E8M0_ONE = 127
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; bit 3 is the sign

LAYOUT_TAG, LAYOUT_VERSION = "rocmega-tiles", 1  # of what this file defines: raise the version when a byte moves


@dataclass(frozen=True)
class Format:
    """How a packed matrix is stored.

    Fields:
        dtype: of an element.
        padding: inputs that K is padded to: whole tiles and whole matrix instructions.
        numbers: in an element; 2 for mxfp4.
        block: rows and columns of one float32 scale; 0 without float32 scales.
    """

    dtype: torch.dtype
    padding: int
    numbers: int = 1
    block: int = 0


FORMATS: dict[str, Format] = {
    "f32": Format(torch.float32, 16),
    "bf16": Format(torch.bfloat16, 32),
    "fp8": Format(torch.float8_e4m3fn, 128, block=SCALE_BLOCK),
    "fp8_32": Format(torch.float8_e4m3fn, 128, block=32),
    "fp8_fnuz": Format(torch.float8_e4m3fnuz, 128, block=SCALE_BLOCK),
    "fp8_32_fnuz": Format(torch.float8_e4m3fnuz, 128, block=32),
    "mxfp4": Format(torch.uint8, 128, numbers=2),
}
# Elements are moved, never interpreted: a whole slot is one number of this dtype.
_SLOT = torch.complex128
_BLOCK = 1 << 15  # words


def dtype_of(format: str) -> torch.dtype:
    """The torch dtype of a format's elements."""
    return FORMATS[format].dtype


def chunk_elements(format: str) -> int:
    """Inputs in one 16-byte slot."""
    return SLOT_BYTES // FORMATS[format].dtype.itemsize * FORMATS[format].numbers


def tile_columns(format: str) -> int:
    """Columns (inputs) of one tile: 16 for f32, 32 for bf16, 64 for FP8, 128 for mxfp4."""
    return CHUNKS * chunk_elements(format)


def tile_grid(format: str, n: int, k: int) -> tuple[int, int]:
    """Tiles of a packed [n, k] matrix as (rows of tiles, tiles in a row), padding included."""
    padding = FORMATS[format].padding
    padded_k = -(-k // padding) * padding
    return -(-n // TILE_ROWS), padded_k // tile_columns(format)


def packed_bytes(format: str, n: int, k: int) -> int:
    """Bytes of the tiles of one packed [n, k] matrix, scales not counted."""
    rows, columns = tile_grid(format, n, k)
    return rows * columns * TILE_BYTES


def scale_grid(n: int, k: int, block: int = SCALE_BLOCK) -> tuple[int, int]:
    """Shape of the block scales of an [n, k] matrix."""
    return -(-n // block), -(-k // block)


def scale_shape(format: str, n: int, k: int) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and shape of one packed matrix's scales, None for formats without."""
    if format == "mxfp4":
        return torch.uint8, (*tile_grid(format, n, k), CHUNKS * TILE_ROWS)
    block = FORMATS[format].block
    return (torch.float32, scale_grid(n, k, block)) if block else None


def pack_tiles(weight: torch.Tensor, format: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Packs `weight`, [n, k] in the format's dtype; for mxfp4 its bytes, [n, k / 2].

    Returns uint8 [rows of tiles, tiles in a row, 1024]; writes into `out` of that shape if given.
    """
    kind = FORMATS[format]
    if weight.dtype != kind.dtype or weight.dim() != 2:
        raise ValueError(f"pack_tiles wants a matrix of {kind.dtype}, not {weight.dtype} {list(weight.shape)}")
    n, width = weight.shape
    rows, columns = tile_grid(format, n, width * kind.numbers)
    if out is None:
        out = torch.empty(rows, columns, TILE_BYTES, dtype=torch.uint8, device=weight.device)
    source = weight.contiguous().view(torch.uint8)
    padded = (rows * TILE_ROWS, columns * CHUNKS * SLOT_BYTES)
    if padded != tuple(source.shape):
        whole = source.new_zeros(padded)
        whole[:n, : source.shape[1]] = source
        source = whole
    elif source.storage_offset() % SLOT_BYTES:
        source = source.clone()  # a slot is moved as one number, which has to begin at a multiple of its size
    slots = source.view(_SLOT).view(rows, TILE_ROWS, columns, CHUNKS).permute(0, 2, 3, 1)
    out.view(_SLOT).view(rows, columns, CHUNKS, TILE_ROWS).copy_(slots)
    return out


def unpack_tiles(tiles: torch.Tensor, format: str, n: int, k: int) -> torch.Tensor:
    """The inverse of `pack_tiles`: uint8 [..., rows, columns, 1024] to [..., n, k] ([..., n, k / 2] for mxfp4)."""
    kind = FORMATS[format]
    *outer, rows, columns, _ = tiles.shape
    slots = tiles.contiguous().view(-1, rows, columns, CHUNKS, TILE_ROWS, SLOT_BYTES)
    matrix = slots.permute(0, 1, 4, 2, 3, 5).reshape(*outer, rows * TILE_ROWS, columns * CHUNKS * SLOT_BYTES)
    return matrix[..., :n, : k // kind.numbers * kind.dtype.itemsize].contiguous().view(kind.dtype)


def pack_scales(scales: torch.Tensor, format: str, n: int, k: int, out: torch.Tensor) -> None:
    """Writes one matrix's scales into `out` of `scale_shape`.

    scales: float32 [ceil(n / block), ceil(k / block)]; for mxfp4 uint8 [n, k / 32].
    """
    if format != "mxfp4":
        out.copy_(scales)
        return
    rows, columns = tile_grid(format, n, k)
    padded = (rows * TILE_ROWS, columns * CHUNKS)
    if padded != tuple(scales.shape):
        whole = scales.new_full(padded, E8M0_ONE)
        whole[: scales.shape[0], : scales.shape[1]] = scales
        scales = whole
    slots = scales.view(rows, TILE_ROWS, columns, CHUNKS).permute(0, 2, 3, 1)
    out.view(rows, columns, CHUNKS, TILE_ROWS).copy_(slots)


def unpack_scales(scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The E8M0 bytes of packed mxfp4 scales [..., rows, columns, 64] as [..., n, k / 32]."""
    *outer, rows, columns, _ = scales.shape
    slots = scales.view(*outer, rows, columns, CHUNKS, TILE_ROWS)
    matrix = slots.movedim(-1, -3).reshape(*outer, rows * TILE_ROWS, columns * CHUNKS)
    return matrix[..., :n, : k // MX_GROUP]


# What the formats mean.


def expand_scales(scales: torch.Tensor, n: int, k: int, block: int = SCALE_BLOCK) -> torch.Tensor:
    """Block scales [..., ceil(n / block), ceil(k / block)] to one scale per element, [..., n, k]."""
    by_row = scales.repeat_interleave(block, dim=-2)[..., :n, :]
    return by_row.repeat_interleave(block, dim=-1)[..., :k]


def dequantize_fp8(weight: torch.Tensor, scales: torch.Tensor, block: int = SCALE_BLOCK) -> torch.Tensor:
    """E4M3 [..., n, k] (OCP or FNUZ, as the dtype says) times its block scales, as float32."""
    n, k = weight.shape[-2:]
    return weight.to(torch.float32).mul_(expand_scales(scales, n, k, block))


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n, k / 2], the even k in the low nibble, and E8M0 bytes [..., n, k / 32]: float32 [..., n, k]."""
    table = _e2m1(packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = table[nibbles.to(torch.int32)].unflatten(-1, (-1, MX_GROUP))
    return values.mul_(e8m0_values(scales)[..., None]).flatten(-2)


_TABLES: dict[torch.device, torch.Tensor] = {}


def _e2m1(device: torch.device) -> torch.Tensor:
    """What E2M1's 16 codes mean: brought to a device once, since a graph cannot hold copies from the host."""
    if device not in _TABLES:
        _TABLES[device] = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
    return _TABLES[device]


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as float32: 2^(byte - 127), NaN for 255."""
    wide = codes.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << 23)  # 2^-127 is subnormal
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)


def to_fnuz(weight: torch.Tensor) -> torch.Tensor:
    """OCP e4m3 as FNUZ e4m3 of half the value; double the scales. The bytes of NaN mean numbers there: refuse them."""
    return _without_lone_signs(weight.contiguous().view(torch.uint8), 0x7F).view(torch.float8_e4m3fnuz)


def without_negative_zero(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of two E2M1 numbers each, with +0 in place of -0."""
    return _without_lone_signs(packed.contiguous(), 0x77)


def _without_lone_signs(bits: torch.Tensor, others: int) -> torch.Tensor:
    """Clears each sign bit whose number has no other bit set. others: a byte's bits that are no signs.

    Adding `others` to them carries into a sign's place unless they are all 0.
    """
    if bits.device.type != "cpu" or bits.numel() % 8:
        return bits & ((bits & others) + others | others)
    out = torch.empty_like(bits)
    source, result = (tensor.view(-1).numpy().view("uint64") for tensor in (bits, out))
    mask = source.dtype.type(int(f"{others:02x}" * 8, 16))
    for start in range(0, source.size, _BLOCK):  # eight bytes at a time, in blocks that stay in cache
        block = source[start : start + _BLOCK] & mask
        block += mask
        block |= mask
        block &= source[start : start + _BLOCK]
        result[start : start + _BLOCK] = block
    return out


@dataclass(frozen=True)
class PackedMatrix:
    """`count` packed matrices [n, k] of equal size, one after the other.

    Fields:
        format: a key of FORMATS.
        n: rows (outputs) of one matrix, without padding.
        k: columns (inputs) of one matrix, without padding.
        tiles: uint8 [count, rows of tiles, tiles in a row, 1024], contiguous.
        scales: [count, *scale_shape], None for formats without.
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
        wanted = scale_shape(format, n, k)
        scales = None if wanted is None else torch.empty(count, *wanted[1], dtype=wanted[0], device=device)
        return cls(format, n, k, tiles, scales, count)

    @classmethod
    def of(cls, weight: torch.Tensor, format: str, scales: torch.Tensor | None = None) -> PackedMatrix:
        """Packs one matrix that is already in the format's dtype; arguments as for `put`."""
        n, width = weight.shape
        packed = cls.empty(format, (n, width * FORMATS[format].numbers), device=weight.device)
        packed.put(0, weight, scales)
        return packed

    def put(self, index: int, weight: torch.Tensor, scales: torch.Tensor | None = None, row: int = 0) -> None:
        """Packs `weight`, [n, k] in the format's dtype (mxfp4: uint8 [n, k / 2]), as matrix `index`.

        Fewer rows become those from `row` on: whole tiles and blocks of scales. scales: as `pack_scales` takes them.
        """
        (rows, width), numbers = weight.shape, FORMATS[self.format].numbers
        block = FORMATS[self.format].block or TILE_ROWS
        last = row + rows == self.n
        if width * numbers != self.k or row + rows > self.n or row % block or (not last and rows % block):
            place = f" from row {row} on" if row else ""
            raise ValueError(f"matrix {index}{place} is {list(weight.shape)}, not {[self.n, self.k // numbers]}")
        if (scales is None) != (self.scales is None):
            raise ValueError(f"a matrix of format {self.format} {'needs' if scales is None else 'has no'} scales")
        if self.scales is not None and scales is not None:
            into = self.scales[index][_part(row, rows, block)]
            pack_scales(scales.to(self.scales.device), self.format, rows, self.k, into)
        pack_tiles(weight.to(self.tiles.device), self.format, out=self.tiles[index][_part(row, rows, TILE_ROWS)])

    def matrix(self, index: int) -> PackedMatrix:
        """Matrix `index` alone; shares the memory."""
        scales = None if self.scales is None else self.scales[index : index + 1]
        return PackedMatrix(self.format, self.n, self.k, self.tiles[index : index + 1], scales)

    def gather(self, indices: torch.Tensor) -> PackedMatrix:
        """Copies of the matrices `indices` [count], in this order."""
        scales = None if self.scales is None else self.scales[indices]
        return PackedMatrix(self.format, self.n, self.k, self.tiles[indices], scales, indices.shape[0])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values: [n, k], or [count, n, k] for several matrices."""
        values = unpack_tiles(self.tiles, self.format, self.n, self.k)
        if self.scales is None:
            values = values.to(torch.float32)
        elif self.format == "mxfp4":
            values = dequantize_mxfp4(values, unpack_scales(self.scales, self.n, self.k))
        else:
            values = dequantize_fp8(values, self.scales, FORMATS[self.format].block)
        return values.to(dtype)[0] if self.count == 1 else values.to(dtype)

    def bytes(self) -> int:
        """Device bytes: tiles with their padding, and scales."""
        return self.tiles.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, device: torch.device | str) -> PackedMatrix:
        """The same matrices on another device."""
        scales = None if self.scales is None else self.scales.to(device)
        return PackedMatrix(self.format, self.n, self.k, self.tiles.to(device), scales, self.count)


def scaled(matrix: PackedMatrix, factor: int) -> PackedMatrix:
    """The matrix times a factor, exactly where that is a power of two. Formats with scales share the tiles.

    Raises RequestError for mxfp4, whose scales are powers of two, and another factor.
    """
    if matrix.scales is None:
        values = matrix.tiles.view(dtype_of(matrix.format)) * factor
        return replace(matrix, tiles=values.view(torch.uint8))
    if matrix.format != "mxfp4":
        return replace(matrix, scales=matrix.scales * factor)
    if factor & (factor - 1):
        raise RequestError(f"MXFP4 weights cannot be made {factor} times as large: their scales are powers of two.")
    return replace(matrix, scales=matrix.scales + (factor.bit_length() - 1))


def _part(row: int, rows: int, unit: int) -> slice:
    return slice(row // unit, -(-(row + rows) // unit))
