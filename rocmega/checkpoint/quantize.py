"""Weights in the published formats, for small models with random weights and for tests. Nearest even, saturating."""

from __future__ import annotations

import torch

from rocmega.checkpoint.tiles import E8M0_ONE, MX_GROUP, SCALE_BLOCK, e8m0_values, scale_grid

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def quantize_fp8(
    weight: torch.Tensor, block: int = SCALE_BLOCK, e8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 matrix [n, k] as e4m3 and one scale per block, whose largest value becomes at most 448.

    The scales are float32 [ceil(n / block), ceil(k / block)], or with e8m0 the bytes of powers of two.
    """
    n, k = weight.shape
    rows, columns = scale_grid(n, k, block)
    padded = weight.new_zeros(rows * block, columns * block)
    padded[:n, :k] = weight
    blocks = padded.view(rows, block, columns, block)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / E4M3_MAX
    stored = next_e8m0(scales) if e8m0 else scales
    if e8m0:
        scales = e8m0_values(stored)
    quantized = (blocks / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized.view(padded.shape)[:n, :k].contiguous(), stored


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 matrix [n, k] as bytes of two E2M1 numbers [n, k / 2], the even k low, and E8M0 bytes [n, k / 32]."""
    groups = weight.unflatten(-1, (-1, MX_GROUP))
    codes = next_e8m0(groups.abs().amax(-1) / E2M1_MAX)
    nibbles = to_e2m1(groups / e8m0_values(codes)[..., None]).flatten(-2)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, codes


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of float32 values, uint8, one a byte."""
    size = values.abs().clamp(max=E2M1_MAX)
    # Steps of 1/2 below 2, of 1 below 4, of 2 from there on; code numbers count them.
    codes = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    return codes.to(torch.uint8) | (values < 0).to(torch.uint8) << 3


def quantize_mxfp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows [n, k] as e4m3 [n, k] and E8M0 bytes [n, k / 32]."""
    groups = rows.unflatten(-1, (-1, MX_GROUP))
    codes = next_e8m0(groups.abs().amax(-1) / E4M3_MAX)
    values = (groups / e8m0_values(codes)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn).flatten(-2), codes


def next_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """The bytes of the smallest powers of two that are at least `scales`; 1 for a scale of 0."""
    fraction, exponent = torch.frexp(scales)
    codes = (exponent - (fraction == 0.5).to(exponent.dtype) + E8M0_ONE).clamp(0, 254)
    return torch.where(scales > 0, codes, E8M0_ONE).to(torch.uint8)
