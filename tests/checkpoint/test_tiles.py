from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.checkpoint import tiles
from rocmega.checkpoint.tiles import PackedMatrix

FORMATS = ("f32", "bf16", "fp8")
FP8 = ("fp8", "fp8_32", "fp8_fnuz", "fp8_32_fnuz")
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


@pytest.mark.parametrize("format", FP8)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 300), k=st.integers(1, 300))
def test_fp8_scales_apply_to_blocks(format, n, k):
    block = 32 if "32" in format else 128
    weight, scales = random(format, n, k), torch.rand(tiles.scale_grid(n, k, block)) + 0.5
    values = PackedMatrix.of(weight, format, scales).dequantize()
    for row in {0, n // 2, n - 1}:
        for column in {0, k // 2, k - 1}:
            assert values[row, column] == weight[row, column].float() * scales[row // block, column // block]


def test_every_nibble_and_scale_of_mxfp4_is_where_the_layout_says():
    """16 bytes of a slot are 32 inputs of a row, the even one in the low nibble; scales lie in the order of slots."""
    n, k = 35, 160
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (n, k // 32), dtype=torch.uint8, generator=generator)
    packed = PackedMatrix.of(weight, "mxfp4", scales)
    assert packed.tiles.shape == (1, 3, 2, 1024)
    assert packed.scales is not None
    assert packed.scales.shape == (1, 3, 2, 64)
    assert packed.bytes() == 3 * 2 * (1024 + 64)
    for row in range(48):
        for column in range(256):
            slot = column % 128 // 32 * 16 + row % 16
            byte = int(packed.tiles[0, row // 16, column // 128, slot * 16 + column % 32 // 2])
            scale = int(packed.scales[0, row // 16, column // 128, slot])
            inside = row < n and column < k
            expected = (int(weight[row, column // 2]) >> column % 2 * 4) & 15 if inside else 0
            assert byte >> column % 2 * 4 & 15 == expected
            assert scale == (int(scales[row, column // 32]) if inside else 127)
    assert torch.equal(tiles.unpack_tiles(packed.tiles, "mxfp4", n, k)[0], weight)
    assert torch.equal(tiles.unpack_scales(packed.scales, n, k)[0], scales)


def test_all_e2m1_codes_with_all_e8m0_scales():
    """Against double precision: every product is a float32 number, but for the two NaNs."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([values, -values])
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)  # 32 numbers, one group
    weight = (codes[0::2] | codes[1::2] << 4).expand(256, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    found = PackedMatrix.of(weight.contiguous(), "mxfp4", scales).dequantize().double().numpy()
    expected = np.tile(table, 2)[None, :] * np.exp2(np.arange(256.0) - 127)[:, None]
    assert np.isnan(found[255]).all()
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)  # from 2^126 on, 6 and 4 are beyond float32
    assert np.array_equal(found[:255], expected[:255].astype(float))
    assert np.array_equal(np.signbit(found[:255]), np.signbit(expected[:255]))


def test_fnuz_has_the_same_values():
    """All 254 numbers: the bytes stay but for -0, the scale doubles."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    weight = codes.view(torch.float8_e4m3fn).view(2, 127)
    for scale in (1.0, 3.7e-5, 2.0**126, 2.0**-149):
        scales = torch.tensor([[scale]])
        ocp = PackedMatrix.of(weight, "fp8", scales).dequantize()
        fnuz = PackedMatrix.of(tiles.to_fnuz(weight), "fp8_fnuz", scales * 2).dequantize()
        assert not fnuz.isnan().any()
        assert torch.equal(ocp, fnuz)  # 0 == -0
    changed = bits(tiles.to_fnuz(weight)) != bits(weight)
    assert bits(weight)[changed].tolist() == [0x80]


def test_mxfp4_without_negative_zero():
    every_byte = torch.arange(256, dtype=torch.uint8)[None]
    found = tiles.without_negative_zero(every_byte)
    for byte in range(256):
        low, high = (0 if nibble == 8 else nibble for nibble in (byte & 15, byte >> 4))
        assert found[0, byte] == low | high << 4


@pytest.mark.parametrize("format", ["bf16", *FP8, "mxfp4"])
def test_a_matrix_may_be_packed_in_bands_of_rows(format):
    n, k = 300, 192
    whole, parts = (PackedMatrix.empty(format, (n, k), count=2) for _ in range(2))
    kind = tiles.FORMATS[format]
    weight = torch.randint(0, 126, (n, k // kind.numbers * kind.dtype.itemsize), dtype=torch.uint8).view(kind.dtype)
    grid = tiles.scale_grid(n, k, kind.block) if kind.block else (n, k // 32)
    scales = None if format == "bf16" else torch.rand(grid).to(torch.float32 if kind.block else torch.uint8)
    unit = kind.block or 1
    for matrix in (whole, parts):
        matrix.put(0, weight, scales)
    whole.put(1, weight, scales)
    for start in range(0, n, 128):
        stop = min(start + 128, n)
        part = None if scales is None else scales[start // unit : -(-stop // unit)]
        parts.put(1, weight[start:stop], part, row=start)
    assert torch.equal(whole.tiles, parts.tiles)
    assert scales is None or torch.equal(whole.scales, parts.scales)
    with pytest.raises(ValueError, match="matrix 0 from row 8 on"):
        parts.put(0, weight[:16], None if scales is None else scales[:1], row=8)


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
