"""Number formats and functions: all codes of the small formats, many values of the large ones.

Against tables in float64 that are made here from the formats' definitions.
"""

from __future__ import annotations

import numpy as np
import torch

from rocmega.drivers import Driver
from rocmega.selftest.primitives import FNUZ, OCP, codes
from tests.platform.kit import module_of, run

A = torch.zeros(1)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal in every bit, but for the kind of NaN."""
    got, want = got.float(), want.float()
    assert torch.equal(got.isnan(), want.isnan())
    fine = ~want.isnan()
    assert torch.equal(got[fine].view(torch.int32), want[fine].view(torch.int32))


def test_all_codes(device: Driver) -> None:
    codes(device, module_of(device))


def test_widening(device: Driver) -> None:
    """All pairs of bytes, and NaN in every place among 16."""
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    one_nan = torch.full((16, 16), 0x35, dtype=torch.uint8).fill_diagonal_(0x7F)
    codes = torch.cat([pairs, one_nan.flatten(), one_nan.flatten() | 0x80])
    words = codes.numel() // 2
    out, fnuz = run("widen", codes, words=(words, words), n=codes.numel() // 16, driver=device)
    same(out.view(torch.bfloat16), OCP[codes.int()])
    # FNUZ as packs have it: no NaN, and nothing that is one in OCP. Read as OCP, but by gfx942, it is twice the value.
    times = 1 if device.arch == "gfx942" else 2
    packed = (codes != 0x80) & (codes & 0x7F != 0x7F)
    same(fnuz.view(torch.bfloat16)[packed], FNUZ[codes.int()][packed] * times)


def test_subnormals_whatever_torch_does() -> None:
    torch.set_flush_denormal(True)
    try:
        out, _ = run("decode_all", A, words=(1024, 256 * 8))
    finally:
        torch.set_flush_denormal(False)
    same(out.view(4, 256).view(torch.float32)[0], OCP)


def values_to_round(count: int) -> torch.Tensor:
    """Random, every number of both formats and the middle between neighbours, the smallest, and too large ones."""
    random = torch.Generator().manual_seed(7)
    spread = torch.randn(count * 6 // 10, generator=random)
    spread *= torch.exp2(torch.randint(-14, 10, spread.shape, generator=random).float())
    raw = torch.randint(-(1 << 31), 1 << 31, (count * 4 // 10,), generator=random).to(torch.int32).view(torch.float32)
    edges = []
    for table in (OCP, FNUZ):
        numbers = table[~table.isnan()].unique().float()
        middles = (numbers[1:] + numbers[:-1]) / 2
        for exact in (numbers, middles):
            edges += [exact, torch.nextafter(exact, torch.tensor(1e9)), torch.nextafter(exact, torch.tensor(-1e9))]
    special = torch.tensor(
        [0.0, -0.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), 1e-40, 448, 464, 465, 480]
    )
    return torch.cat([spread, raw, *edges, special])


def nearest_even(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Of a table's numbers the nearest to x, float64; halfway the one with an even byte; beyond the largest, that."""
    numbers = table[:128][~table[:128].isnan()]  # by byte, hence ascending
    size = x.double().abs().nan_to_num().clamp_max(numbers[-1])
    above = torch.searchsorted(numbers, size).clamp_min(1)
    down, up = size - numbers[above - 1], numbers[above] - size
    byte = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return torch.where(x.isnan(), float("nan"), torch.copysign(numbers[byte], x.double()))


def test_rounding(device: Driver) -> None:
    """A million values; in an emulator a tenth. torch's conversion, which the standard path uses, is the same one."""
    x = values_to_round(100_000 if device.name == "emulator" else 1_000_000)
    out, _ = run("encode", x, words=(x.numel(), 1), n=x.numel(), driver=device)
    nan = x.isnan()
    for shift, table, dtype in ((0, OCP, torch.float8_e4m3fn), (8, FNUZ, torch.float8_e4m3fnuz)):
        got, want = table[out >> shift & 255], nearest_even(x, table)
        same(got, want + 0.0 if table is FNUZ else want)  # which has no -0
        assert got[nan].isnan().all()
        largest = float(table.nan_to_num().max())
        same(x.clamp(-largest, largest).to(dtype), want + 0.0 if table is FNUZ else want)
    assert not ((out[~nan] >> 8 & 255) == 0x80).any()
    same((out >> 16).to(torch.int16).view(torch.bfloat16), x.bfloat16())


def test_functions(device: Driver) -> None:
    x = torch.cat([torch.linspace(-140, 140, 40001), torch.linspace(-2, 2, 20001), torch.tensor([0.0, float("nan")])])
    n = x.numel()
    out, out2 = run("functions", x, words=(2 * n, 2 * n), n=n, driver=device)
    (exp, sigmoid), (exp2, silu) = out.view(2, -1).view(torch.float32), out2.view(2, -1).view(torch.float32)
    d = x.double()
    tiny, huge = 2.0**-126, float(np.finfo(np.float32).max)
    for got, want, bound in (
        (exp, d.exp(), 3e-7),
        (exp2, d.exp2(), 3e-7),
        (sigmoid, d.sigmoid(), 4e-7),
        (silu, d * d.sigmoid(), 5e-7),
    ):
        assert got[-1].isnan()
        normal = (want.abs() >= 1.001 * tiny) & (want.abs() <= huge) & (x > -87)
        assert ((got.double() - want).abs() / want.abs())[normal].max() < bound
    assert (exp[:-1][d[:-1].exp() < 0.999 * tiny] == 0).all()
    assert exp[:-1][d[:-1] > 88.8].isinf().all()
    assert (exp2[:-1][d[:-1] < -126] == 0).all()
    assert exp2[:-1][d[:-1] >= 128].isinf().all()
    zero = -2
    assert exp[zero] == 1
    assert exp2[zero] == 1
    assert sigmoid[zero] == 0.5
