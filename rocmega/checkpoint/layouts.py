"""How published checkpoints store matrices.

    values          scales                                  layout   found in
    F32, BF16       none                                    f32, bf16
    F8_E4M3 [N, K]  `X.weight_scale_inv` F32, 128x128       fp8      GLM, DeepSeek V3
                    `X.scale` F8_E8M0, 128x128              fp8      DeepSeek V4
                    `X.scale` F8_E8M0, 32x32                fp8_32   DeepSeek V4.1
                    `X.scale` F8_E8M0 [N, K/32]             mxfp8    DeepSeek V4.1, Engram tables
    I8 [N, K/2]     `X.scale` F8_E8M0 [N, K/32]             mxfp4    DeepSeek V4 and V4.1, experts
    U8 [N, K/2]     `X.weight_scale` U8 [N, K/32]           mxfp4    AMD Quark, GLM's experts

X.weight is the values' name. The last block of scales may be partial. E8M0 block scales become float32, which is exact;
the bytes of weights and of MX scales stay as they are. MXFP4 has the even k in the low nibble. A layout's name is also
that of the packed format (`tiles`) with the same content, but for mxfp8: its rows are looked up, not multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint import tiles
from rocmega.checkpoint.tiles import FORMATS, MX_GROUP, scale_grid
from rocmega.errors import CheckpointError

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint

_PLAIN = {"F32": "f32", "BF16": "bf16"}
_NIBBLES = ("I8", "U8")  # two E2M1 numbers a byte
_E8M0 = ("F8_E8M0", "U8")
_BLOCKS = {128: "fp8", 32: "fp8_32"}
_MX = ("mxfp4", "mxfp8")


@dataclass(frozen=True)
class MatrixInfo:
    """What the headers say of a matrix.

    Fields:
        name: of the values' tensor.
        layout: "f32", "bf16", "fp8", "fp8_32", "mxfp4" or "mxfp8".
        n, k: of the matrix, whatever its storage.
        scale: name of the scales' tensor, if there is one.
    """

    name: str
    layout: str
    n: int
    k: int
    scale: str | None = None


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix, or some of its rows or columns, as a checkpoint stores it.

    Fields:
        layout: see above; after `to`, any packed format.
        values: [n, k] in the layout's dtype; for mxfp4 uint8 [n, k / 2].
        scales: float32 [ceil(n / block), ceil(k / block)]; for mxfp4 and mxfp8 uint8 [n, k / 32]; else None.
    """

    layout: str
    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1] * self._numbers

    def rows(self, start: int, stop: int) -> StoredMatrix:
        """Rows [start, stop). Raises ValueError if no grid of scale blocks fits them (`divides`)."""
        scales = None if self.scales is None else self.scales[_blocks(self._block(0), start, stop)]
        return replace(self, values=self.values[start:stop], scales=scales)

    def columns(self, start: int, stop: int) -> StoredMatrix:
        """Columns [start, stop), copied. Raises ValueError as `rows` does."""
        scales = None if self.scales is None else self.scales[:, _blocks(self._block(1), start, stop)]
        values = self.values[:, start // self._numbers : stop // self._numbers].contiguous()
        return replace(self, values=values, scales=scales)

    def to(self, format: str) -> StoredMatrix:
        """The same values in another format: FP8 with finer blocks, FP8 as gfx942 has it, or float32 and bf16.

        Exact but for the rounding from float32 to bf16. Raises ValueError for a change that would need quantization.
        """
        if format == self.layout:
            return self
        if format in ("f32", "bf16"):
            return StoredMatrix(format, self.dequantize().to(FORMATS[format].dtype))
        if (
            self.scales is None
            or self.layout in _MX
            or not format.startswith("fp8")
            or not self.layout.startswith("fp8")
        ):
            raise ValueError(f"a matrix stored as {self.layout} cannot become {format}")
        values, scales = self.values, self.scales
        block, wanted = FORMATS[self.layout].block, FORMATS[format].block
        if wanted > block:
            raise ValueError(f"{self.layout} has finer scales than {format}")
        if wanted < block:
            scales = _refined(scales, self.n, self.k, block, wanted)
        if FORMATS[format].dtype != values.dtype:
            if values.dtype != torch.float8_e4m3fn:
                raise ValueError(f"{self.layout} cannot become {format}")
            values, scales = tiles.to_fnuz(values), scales * 2
        return StoredMatrix(format, values, scales)

    def dequantize(self) -> torch.Tensor:
        """The values, float32 [n, k]."""
        if self.scales is None:
            return self.values.to(torch.float32)
        if self.layout == "mxfp4":
            return tiles.dequantize_mxfp4(self.values, self.scales)
        if self.layout == "mxfp8":
            groups = self.values.to(torch.float32).unflatten(-1, (-1, MX_GROUP))
            return groups.mul_(tiles.e8m0_values(self.scales)[..., None]).flatten(-2)
        return tiles.dequantize_fp8(self.values, self.scales, FORMATS[self.layout].block)

    @property
    def _numbers(self) -> int:
        return 2 if self.layout == "mxfp4" else 1

    def _block(self, axis: int) -> int:
        if self.layout in _MX:
            return (1, MX_GROUP)[axis]
        return FORMATS[self.layout].block


def divides(size: int, parts: int, block: int) -> bool:
    """Whether each of `parts` equal parts of `size` rows or columns has a grid of scale blocks of its own.

    A part may begin at a block's border, or lie within one block, whose scale it then has to itself.
    """
    part = size // parts
    return all(start % block == 0 or start % block + part <= block for start in range(0, size, max(1, part)))


def _blocks(block: int, start: int, stop: int) -> slice:
    if start % block and start % block + stop - start > block:
        raise ValueError(f"{start} to {stop} begins inside a block of {block} and ends outside")
    return slice(start // block, -(-stop // block))


def scale_names(name: str) -> tuple[str, ...]:
    """Where the scales of a weight may be."""
    return f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"


def examine(checkpoint: Checkpoint, name: str) -> MatrixInfo:
    """How a matrix is stored, from the headers alone.

    Raises CheckpointError, one clause that names tensors and files, if it is stored in no way we know.
    """
    info, at = checkpoint.info(name), checkpoint.file(name).name
    if len(info.shape) != 2:
        raise CheckpointError(f"tensor {name} in {at} is {list(info.shape)}, not a matrix")
    n, width = info.shape
    if info.dtype in _PLAIN:
        return MatrixInfo(name, _PLAIN[info.dtype], n, width)
    packed = info.dtype in _NIBBLES
    if not packed and info.dtype != "F8_E4M3":
        raise CheckpointError(f"tensor {name} in {at} is {checkpoint.dtype(name)}, which is not supported there")
    kind = "MXFP4" if packed else "FP8"
    found = [scale for scale in scale_names(name) if scale in checkpoint]
    if len(found) != 1:
        # An FP8 weight's scales are missed under the name that most checkpoints use.
        missed = scale_names(name)[1 if packed else 0]
        state = f"is there as {' and '.join(found)}" if found else "is missing"
        raise CheckpointError(f"tensor {missed}, the scales of an {kind} weight in {at}, {state}")
    return _with_scales(checkpoint, name, found[0], packed)


def _with_scales(checkpoint: Checkpoint, name: str, scale: str, packed: bool) -> MatrixInfo:
    (n, width), info = checkpoint.shape(name), checkpoint.info(scale)
    wrong = f"tensor {scale} in {checkpoint.file(scale).name} is {checkpoint.dtype(scale)} {list(info.shape)}, not"
    if packed:
        if width * 2 % MX_GROUP:
            raise CheckpointError(f"tensor {name} is {[n, width]} bytes, which is no whole number of MX groups a row")
        if info.shape != (n, width * 2 // MX_GROUP) or info.dtype not in _E8M0:
            raise CheckpointError(f"{wrong} E8M0 {[n, width * 2 // MX_GROUP]}")
        return MatrixInfo(name, "mxfp4", n, width * 2, scale)
    for block, layout in _BLOCKS.items():
        if info.shape == scale_grid(n, width, block) and info.dtype in ("F32", "F8_E8M0"):
            return MatrixInfo(name, layout, n, width, scale)
    if width % MX_GROUP == 0 and info.shape == (n, width // MX_GROUP) and info.dtype == "F8_E8M0":
        return MatrixInfo(name, "mxfp8", n, width, scale)
    grids = " or ".join(f"{list(scale_grid(n, width, block))} (one per {block}x{block})" for block in _BLOCKS)
    raise CheckpointError(f"{wrong} torch.float32 {grids}")


def read_matrix(
    checkpoint: Checkpoint, name: str, rows: tuple[int, int] | None = None, format: str | None = None
) -> StoredMatrix:
    """A matrix of a checkpoint, or its rows [start, stop) alone, in memory of its own.

    format: what it is wanted in, as stored by default; see `StoredMatrix.to`. Raises CheckpointError, naming the
    tensor, if it cannot be read or holds a NaN or, among its scales, a number that cannot be one.
    """
    info = examine(checkpoint, name)
    layout, values, scales = info.layout, checkpoint.read(name, rows), None
    if values.dtype == torch.float8_e4m3fn and has_fp8_nan(values):
        raise _damaged(checkpoint, name, "a NaN, FP8 byte 0x7f or 0xff,")
    if layout in _MX and info.scale is not None:
        values = values.view(torch.uint8) if layout == "mxfp4" else values
        scales = checkpoint.read(info.scale, rows).view(torch.uint8)
        if bool((scales == 255).any()):
            raise _damaged(checkpoint, info.scale, "a NaN, E8M0 byte 255,")
    elif info.scale is not None:
        scales = _block_scales(checkpoint, info.scale)
        if format is not None and 0 < FORMATS[format].block < FORMATS[layout].block:  # rows may need finer blocks
            scales = _refined(scales, info.n, info.k, FORMATS[layout].block, FORMATS[format].block)
            layout = _BLOCKS[FORMATS[format].block]
        if rows is not None:
            scales = scales[_blocks(FORMATS[layout].block, *rows)]
    matrix = StoredMatrix(layout, values, scales)
    return matrix if format is None else matrix.to(format)


def _refined(scales: torch.Tensor, n: int, k: int, block: int, finer: int) -> torch.Tensor:
    """Scales of an [n, k] matrix, one per block x block, repeated to one per finer x finer."""
    return tiles.expand_scales(scales, *scale_grid(n, k, finer), block // finer)


def _block_scales(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    scales = checkpoint.read(name)
    if scales.dtype != torch.float32:
        scales = tiles.e8m0_values(scales.view(torch.uint8))
    # Twice a scale has to be a number too, for FNUZ.
    if not bool((scales.abs() < 2.0**127).all()) or bool((scales < 0).any()):
        raise _damaged(checkpoint, name, "a scale that is negative, infinite or no number,")
    return scales


def _damaged(checkpoint: Checkpoint, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.file(name)}: tensor {name} holds {what} which no weight may be: the file is damaged, or the "
        "quantization went wrong. Fetch the file again."
    )


def has_fp8_nan(values: torch.Tensor) -> bool:
    """Whether OCP e4m3 values hold a NaN: 0x7f or 0xff."""
    import numpy as np

    bits = values.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    whole = bits.size // 8 * 8
    if ((bits[whole:] & 0x7F) == 0x7F).any():
        return True
    # Eight bytes at a time: adding 1 to seven bits carries into the eighth only from 0x7f. Blocks that stay in cache.
    words = bits[:whole].view(np.uint64)
    seven, one, high = (np.uint64(int(f"{byte:02x}" * 8, 16)) for byte in (0x7F, 0x01, 0x80))
    for start in range(0, words.size, 1 << 15):
        block = words[start : start + (1 << 15)] & seven
        block += one
        if np.bitwise_or.reduce(block) & high:
            return True
    return False
