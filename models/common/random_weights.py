"""Weights without a checkpoint: a plan's shapes and formats with random values, made where they will be used.

Each field's values come from its name and a seed. They are as large as a trained model's, roughly: products keep the
size of what goes in, and what a layer adds to the residual stream is scaled by 1 / sqrt(2 * layers), as such models are
initialized, so that rounding does not grow from layer to layer until it is all that one sees.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.tiles import (
    FORMATS,
    PackedMatrix,
    dequantize_mxfp4,
    dtype_of,
    tile_columns,
    tile_grid,
    unpack_scales,
    unpack_tiles,
    without_negative_zero,
)
from rocmega.models.common.weights import Value
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.packing.plan import Field, Plan

_LARGEST_NAN = 0x7F  # e4m3: 0x7f and 0xff are OCP's NaN, 0x80 is FNUZ's
_FNUZ_NAN = 0x80
_RESIDUAL = ("o", "down", "o_b", "shared_down")  # what is added to the residual stream
_GAINS = {"head": 4.0, "router": 2.0}  # of products whose results are compared; others keep the size of their input


Plain = Callable[["Field", torch.Generator, "torch.device | str"], "torch.Tensor | None"]


def random_fields(
    plan: Plan,
    layers: int,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    shares: int = 1,
    seed: int = 0,
    progress: Progress = silent,
    plain: Plain | None = None,
) -> dict[str, Value]:
    """The fields of a plan with random values: the same ones for the same seed, rank and kind of device.

    Fields that all ranks hold are equal on all of them. shares: how many ranks' shares of what a layer adds will be
    summed up, if they are equal. plain: makes a family's fields that are no matrices; None for what is as usual.
    """
    made: dict[str, Value] = {}
    for done, field in enumerate(plan.fields.values()):
        progress("making random weights", done, len(plan.fields))
        key = f"{field.name}#{rank if field.split else 'all'}#{seed}"
        generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
        own = None if plain is None or field.count else plain(field, generator, device)
        if own is None:
            made[field.name] = _random_field(field, math.sqrt(2 * layers) * shares, generator, device)
        else:
            made[field.name] = own
    return made


def _random_field(field: Field, additions: float, generator: torch.Generator, device: torch.device | str) -> Value:
    name = field.name.rsplit(".", 1)[-1]
    if not field.count:
        values = torch.empty(field.shape, dtype=dtype_of(field.format), device=device).normal_(generator=generator)
        return _vector(name, values)
    gain = _GAINS.get(name, 1.0) / (additions if name in _RESIDUAL else 1.0)
    matrix = PackedMatrix.empty(field.format, field.shape, field.count, device)
    _fill(matrix, gain / math.sqrt(matrix.k), generator)
    return matrix


def _vector(name: str, noise: torch.Tensor) -> torch.Tensor:
    """The embedding, a norm's weight, or biases, from standard normal noise."""
    if name == "embedding":
        return noise
    if name == "router_bias":
        return noise * 0.05
    if name == "index_k_norm":  # weight, then bias
        return torch.stack([1 + noise[0] * 0.1, noise[1] * 0.1])
    return 1 + noise * 0.1


def _fill(matrix: PackedMatrix, deviation: float, generator: torch.Generator) -> None:
    """Random values of this standard deviation, straight into the tiles: they are noise in any order."""
    if matrix.scales is None:
        matrix.tiles.view(dtype_of(matrix.format)).normal_(0, deviation, generator=generator)
    elif matrix.format == "mxfp4":
        matrix.tiles.random_(0, 256, generator=generator)
        matrix.tiles.copy_(without_negative_zero(matrix.tiles))  # gfx942 wants none, others do not mind
        code = 127 + round(math.log2(deviation / _deviation(matrix.format)))
        matrix.scales.random_(code - 1, code + 2, generator=generator)
    else:
        matrix.tiles.random_(0, 254, generator=generator)  # one value for each byte that is no NaN of OCP's
        matrix.tiles.add_(matrix.tiles >= _LARGEST_NAN)
        matrix.tiles.masked_fill_(matrix.tiles == _FNUZ_NAN, 0)  # and -0 is worth as much as +0
        scale = deviation / _deviation(matrix.format)
        matrix.scales.uniform_(0.5 * scale, 1.5 * scale, generator=generator)
        if matrix.format.startswith("fp8_32"):  # blocks of 32x32 are published with powers of two
            matrix.scales.copy_(matrix.scales.log2_().round_().exp2_())
    if _is_padded(matrix):
        _clear_padding(matrix)


def _deviation(format: str) -> float:
    """Root mean square of the values that `_fill` draws, before scaling."""
    codes = torch.arange(256, dtype=torch.uint8)
    if format == "mxfp4":
        values = dequantize_mxfp4(codes[None], torch.full((1, 16), 127, dtype=torch.uint8))
    else:
        values = codes[(codes & _LARGEST_NAN) != _LARGEST_NAN].view(dtype_of(format)).to(torch.float32).nan_to_num(0)
    return float(values.square().mean().sqrt())


def _is_padded(matrix: PackedMatrix) -> bool:
    rows, columns = tile_grid(matrix.format, matrix.n, matrix.k)
    return rows * 16 != matrix.n or columns * tile_columns(matrix.format) != matrix.k


def _clear_padding(matrix: PackedMatrix) -> None:
    """Padding is zeros, which kernels count on."""
    for index in range(matrix.count):
        values = unpack_tiles(matrix.tiles[index], matrix.format, matrix.n, matrix.k)
        scales = None if matrix.scales is None else matrix.scales[index]
        if scales is not None and FORMATS[matrix.format].numbers == 2:
            scales = unpack_scales(scales, matrix.n, matrix.k).clone()
        matrix.put(index, values, scales)
