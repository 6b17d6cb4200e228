"""Wave and LDS primitives."""

from __future__ import annotations

import torch

from rocmega.drivers import Driver
from tests.platform.kit import THREADS, run


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of a wave as halves are added to halves."""
    while values.numel() > 1:
        half = values.numel() // 2
        values = values[:half] + values[half:]
    return values


def width_of(driver: Driver) -> int:
    return 32 if driver.name == "cuda" else 64


def test_wave(driver: Driver) -> None:
    width = width_of(driver)
    v = torch.randint(0, 1 << 30, (THREADS,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    v[200] = 77
    out, read = run("wave_ops", v, words=(5 * THREADS, THREADS), driver=driver)
    waves, terms = v.view(-1, width), ((v % 1000).float() * 0.37).view(-1, width)
    sums = torch.cat([tree_sum(wave).expand(width) for wave in terms])
    assert torch.equal(out[:THREADS].view(torch.float32), sums)
    key = (waves.long() << 20) | torch.arange(THREADS).view(-1, width)
    most = key.max(1).values.repeat_interleave(width)
    assert torch.equal(
        out[THREADS : 3 * THREADS].view(2, -1).long() & 0xFFFFFFFF, torch.stack([most & 0xFFFFFFFF, most >> 32])
    )
    ballot = ((waves & 1).long() << torch.arange(width)).sum(1).repeat_interleave(width)
    high = (torch.arange(THREADS) % 2 == 1) & (width == 64)
    half = torch.where(high, ballot >> 32, ballot) & 0xFFFFFFFF
    assert torch.equal(out[3 * THREADS : 4 * THREADS].long() & 0xFFFFFFFF, half)
    assert torch.equal(out[4 * THREADS :], (waves == 77).any(1).int().repeat_interleave(width))
    assert torch.equal(read, waves[:, (7 * torch.arange(width) + 3) % width].reshape(-1))


def test_lds(driver: Driver) -> None:
    v = torch.randint(0, 1 << 30, (THREADS,), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    out, out2 = run("lds_ops", v, words=(65 + 16, 2), driver=driver)
    assert torch.equal(out[:64].long(), torch.bincount(v.long() % 64, minlength=64))
    bits = 0
    for x in v.tolist():
        bits |= 1 << x % 32
    assert out[64].item() & 0xFFFFFFFF == bits
    assert torch.equal(out[65:].view(torch.float32), torch.arange(64.0).view(16, 4).sum(1))
    total = torch.zeros(1)
    for wave in ((v % 1000).float() * 0.37).view(-1, width_of(driver)):
        total = total + tree_sum(wave)
    assert out2[0] == int((v == 77).any())
    assert out2[1:].view(torch.float32) == total
