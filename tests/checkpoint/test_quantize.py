"""Quantization against definitions in double precision: nearest, ties to even, saturating."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocmega.checkpoint.quantize import quantize_fp8, quantize_mxfp4
from rocmega.checkpoint.tiles import dequantize_fp8, dequantize_mxfp4, e8m0_values

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def random(n: int, k: int) -> torch.Tensor:
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(-40, 40, (n, 1), generator=generator).float().exp2()
    return torch.randn(n, k, generator=generator) * spread


def nearest_even(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Indices of the nearest of ascending numbers; halfway, the even index."""
    above = np.clip(np.searchsorted(numbers, values), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    to_high = (values - low > high - values) | ((values - low == high - values) & (above % 2 == 0))
    return above - 1 + to_high


def test_mxfp4_is_the_nearest_code():
    weight = random(1000, 1024)
    packed, codes = quantize_mxfp4(weight)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).numpy()
    scale = np.repeat(e8m0_values(codes).double().numpy(), 32, axis=1)
    wanted = nearest_even(np.minimum(np.abs(weight.double().numpy()) / scale, 6), E2M1)
    assert np.array_equal(nibbles & 7, wanted)
    assert np.array_equal(nibbles >> 3, (weight < 0).numpy())
    # The scale is the smallest power of two that keeps the largest number in range.
    largest = np.abs(weight.double().numpy()).reshape(1000, 32, 32).max(-1)
    assert (largest / e8m0_values(codes).double().numpy() <= 6).all()
    assert (largest / (e8m0_values(codes).double().numpy() / 2) > 6).all()


def test_ties_of_mxfp4_go_to_the_even_code():
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    row = torch.tensor([6.0, *middles, *-middles]).float()
    packed, codes = quantize_mxfp4(torch.nn.functional.pad(row, (0, 32 - len(row)))[None])
    assert codes.tolist() == [[127]]
    values = dequantize_mxfp4(packed, codes)[0, 1:15].tolist()
    evens = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert values == evens + [-value for value in evens]


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("e8m0", [False, True])
def test_fp8_is_the_nearest_number(block, e8m0):
    weight = random(200, 320)
    quantized, stored = quantize_fp8(weight, block, e8m0)
    scales = e8m0_values(stored) if e8m0 else stored
    assert scales.shape == (-(-200 // block), -(-320 // block))
    by_element = scales.repeat_interleave(block, 0)[:200].repeat_interleave(block, 1)[:, :320]
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    scaled = np.abs((weight / by_element).double().numpy())  # the division rounds in float32, as the reference's does
    assert np.array_equal(quantized.view(torch.uint8).numpy() & 0x7F, nearest_even(np.minimum(scaled, 448), numbers))
    assert (scaled <= 448 * (1 + 1e-6)).all()
    if e8m0:
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    error = (dequantize_fp8(quantized, scales, block) - weight).abs()
    assert (error <= weight.abs() / 16 + by_element * 2**-10).all()


def test_blocks_of_zeros_stay_zeros():
    packed, codes = quantize_mxfp4(torch.zeros(2, 64))
    assert codes.tolist() == [[127, 127]] * 2
    assert not dequantize_mxfp4(packed, codes).any()
    quantized, scales = quantize_fp8(torch.zeros(2, 64), 32, True)
    assert not dequantize_fp8(quantized, e8m0_values(scales), 32).any()
