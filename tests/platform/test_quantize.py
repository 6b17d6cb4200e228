"""Activations quantized in LDS, group by group, against the formulas of the standard path: equal in every number."""

from __future__ import annotations

import pytest
import torch

from rocmega.drivers import Driver
from rocmega.models.common.formulas import fp8_activations, mxfp8_activations
from rocmega.selftest.primitives import E8M0, FNUZ, OCP
from tests.platform.kit import run
from tests.platform.test_formats import nearest_even


def activations(groups: int) -> torch.Tensor:
    """bf16 [groups, 128]: of very different size, within a group too; ties, subnormals, zeros, next to none, huge."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(groups, 128, generator=random) * torch.exp2(torch.randint(-40, 40, (groups, 1), generator=random))
    x[::3] *= torch.exp2(torch.randint(-12, 1, (len(x[::3]), 128), generator=random))
    numbers = OCP[:127].float()
    middles = torch.cat([(numbers[1:] + numbers[:-1]) / 2, torch.tensor([448.0, 0.0])])
    x[1], x[2] = middles, -middles  # 448 among them: with a scale of 1 each is halfway between two numbers
    x[3], x[4], x[5] = 0, x[4] / x[4].abs().max() * 1e-38, x[5] / x[5].abs().max() * 3e38
    x[6, 1:] = 0
    return x.to(torch.bfloat16)


def fp8_values(raw: torch.Tensor, fnuz: bool) -> torch.Tensor:
    """32 words of bytes, then the scale."""
    table = FNUZ if fnuz else OCP
    return table[raw[:, :32].contiguous().view(torch.uint8).int()].float() * raw[:, 32:33].view(torch.float32)


def mx_values(raw: torch.Tensor, native: bool) -> torch.Tensor:
    """Of each 16 words 8 of bytes, then the scale's; or as bf16."""
    if not native:
        return raw.view(torch.bfloat16).float()
    groups = raw.view(-1, 16)
    values = OCP[groups[:, :8].contiguous().view(torch.uint8).int()] * E8M0[groups[:, 8:9]]
    return values.float().view(len(raw), 128)


@pytest.mark.parametrize("kind", ["fp8", "mx"])
@pytest.mark.parametrize("mma_k", [32, 16])
def test_groups(kind: str, mma_k: int, device: Driver) -> None:
    """A million numbers; in an emulator 50,000."""
    if mma_k == 16 and device.name != "host":
        pytest.skip("a variant of the host")
    x = activations(400 if device.name == "emulator" else 7_900)
    words = x.numel() // 2
    out, _ = run(f"groups_{kind}", x, words=(words, 1), n=len(x), mma_k=mma_k, driver=device)
    raw, like_gfx942 = out.view(-1, 64), device.arch == "gfx942" or (device.name == "host" and mma_k == 16)
    if kind == "fp8":
        got, want = fp8_values(raw, like_gfx942), fp8_activations(x.float())
    else:
        native = device.arch == "gfx950" or (device.name == "host" and mma_k == 32)
        got, want = mx_values(raw, native), mxfp8_activations(x.float())
    assert want.isfinite().all()
    assert torch.equal(got, want)


def test_formulas_round_to_the_nearest() -> None:
    """The scale makes the largest magnitude 448, or nearly with a power of two; numbers go to the nearest of e4m3."""
    x = activations(2_000).float()
    for quantized, size in ((fp8_activations(x), 128), (mxfp8_activations(x), 32)):
        groups = x.view(-1, size)
        most = groups.abs().amax(1, keepdim=True)
        scale = most.clamp_min(1e-10).double() / 448
        if size == 32:
            scale = torch.exp2(torch.ceil(torch.log2(most.double() / 448)).clamp_min(-126))
            expected = nearest_even(groups.double() / scale, OCP) * scale
            assert torch.equal(quantized.view(-1, size).double()[most[:, 0] > 0], expected[most[:, 0] > 0])
        # In float32 a quotient is 2^-23 off, which next to a tie may be the other number: half a step, and a little.
        step = torch.maximum(groups.double().abs() * 2.0**-3, scale * 2.0**-9)
        assert ((quantized.view(-1, size).double() - groups.double()).abs() <= 0.501 * step).all()
