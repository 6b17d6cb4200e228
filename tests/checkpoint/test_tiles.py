from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.checkpoint import tiles
from rocmega.checkpoint.tiles import PackedMatrix

FORMATS = ("f32", "bf16", "fp8")
sizes = st.integers(1, 150)


def random(format: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return values.to(tiles.dtype_of(format))


def bits(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.contiguous().view(torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_is_where_the_layout_says(format):
    """The definition, element by element: tile row, tile column, slot = chunk * 16 + row, element of the chunk."""
    matrix = random(format, 35, 150)
    packed = tiles.pack_tiles(matrix, format)
    chunk, columns = 16 // matrix.itemsize, 64 // matrix.itemsize
    assert packed.shape == (3, {"f32": 10, "bf16": 5, "fp8": 4}[format], 1024)
    slots = packed.view(matrix.dtype).view(*packed.shape[:2], 64, chunk).float()
    for row in range(48):
        for k in range(packed.shape[1] * columns):
            slot = k % columns // chunk * 16 + row % 16
            found = slots[row // 16, k // columns, slot, k % chunk]
            assert found == (matrix[row, k].float() if row < 35 and k < 150 else 0)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25, deadline=None)
@given(n=sizes, k=sizes)
def test_packing_is_undone(format, n, k):
    matrix = random(format, n, k)
    packed = tiles.pack_tiles(matrix, format)
    assert packed.nbytes == tiles.packed_bytes(format, n, k)
    assert torch.equal(bits(tiles.unpack_tiles(packed, format, n, k)), bits(matrix))


def test_bits_are_kept_even_of_nan():
    every_byte = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    packed = tiles.pack_tiles(every_byte, "fp8")
    assert torch.equal(bits(tiles.unpack_tiles(packed, "fp8", 2, 128)), bits(every_byte))


def test_padding_is_zero_even_in_used_memory():
    out = torch.full((1, 2, 1024), 0xFF, dtype=torch.uint8)
    tiles.pack_tiles(random("fp8", 3, 70), "fp8", out=out)
    values = tiles.unpack_tiles(out, "fp8", 16, 128).float()
    assert not values[3:].any()
    assert not values[:, 70:].any()


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 300), k=st.integers(1, 300))
def test_fp8_scales_apply_to_128x128_blocks(n, k):
    weight, scales = random("fp8", n, k), torch.rand(tiles.scale_grid(n, k)) + 0.5
    values = PackedMatrix.of(weight, "fp8", scales).dequantize()
    for row in {0, n // 2, n - 1}:
        for column in {0, k // 2, k - 1}:
            assert values[row, column] == weight[row, column].float() * scales[row // 128, column // 128]


@pytest.mark.parametrize("format", FORMATS)
def test_several_matrices_lie_one_after_the_other(format):
    packed = PackedMatrix.empty(format, (20, 40), count=3)
    scales = torch.tensor([[2.0]]) if format == "fp8" else None
    matrices = [random(format, 20, 40, seed) for seed in range(3)]
    for index, matrix in enumerate(matrices):
        packed.put(index, matrix, scales)
    assert packed.bytes() == 3 * tiles.packed_bytes(format, 20, 40) + (12 if scales is not None else 0)
    expected = torch.stack([matrix.float() * (1 if scales is None else 2) for matrix in matrices])
    assert torch.equal(packed.dequantize(), expected)
    assert torch.equal(packed.matrix(1).dequantize(), expected[1])
    assert packed.matrix(1).tiles.data_ptr() == packed.tiles[1].data_ptr()


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="pack_tiles wants"):
        tiles.pack_tiles(random("bf16", 4, 4), "f32")
    packed = PackedMatrix.empty("fp8", (4, 4))
    with pytest.raises(ValueError, match="needs scales"):
        packed.put(0, random("fp8", 4, 4))
    with pytest.raises(ValueError, match="not \\[4, 4\\]"):
        packed.put(0, random("fp8", 4, 5), torch.ones(1, 1))
