"""Wave and LDS primitives on the host, with and without checks."""

from __future__ import annotations

import pytest
import torch

from rocmega.drivers.host import HostDriver
from tests.platform.kit import THREADS, run

DRIVERS = [HostDriver(), HostDriver(seed=4), HostDriver(seed=2, check=True)]


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of 64 floats as halves are added to halves."""
    while values.numel() > 1:
        half = values.numel() // 2
        values = values[:half] + values[half:]
    return values


@pytest.fixture(params=DRIVERS, ids=["plain", "seed", "check"])
def driver(request: pytest.FixtureRequest) -> HostDriver:
    return request.param


def test_wave(driver: HostDriver) -> None:
    v = torch.randint(0, 1 << 30, (THREADS,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    v[200] = 77
    out, read = run("wave_ops", v, words=(5 * THREADS, THREADS), driver=driver)
    waves, terms = v.view(-1, 64), (v % 1000).float() * 0.37
    for wave in range(4):
        total = tree_sum(terms[wave * 64 : wave * 64 + 64]).expand(64)
        assert torch.equal(out[wave * 64 : wave * 64 + 64].view(torch.float32), total)
    key = (waves.long() << 20) | torch.arange(THREADS).view(-1, 64)
    most = key.max(1).values.repeat_interleave(64)
    assert torch.equal(
        out[THREADS : 3 * THREADS].view(2, -1).long() & 0xFFFFFFFF, torch.stack([most & 0xFFFFFFFF, most >> 32])
    )
    ballot = ((waves & 1).long() << torch.arange(64)).sum(1).repeat_interleave(64)
    half = torch.where(torch.arange(THREADS) % 2 == 1, ballot >> 32, ballot) & 0xFFFFFFFF
    assert torch.equal(out[3 * THREADS : 4 * THREADS].long() & 0xFFFFFFFF, half)
    assert torch.equal(out[4 * THREADS :], (waves == 77).any(1).int().repeat_interleave(64))
    assert torch.equal(read, waves[:, (7 * torch.arange(64) + 3) % 64].reshape(-1))


def test_lds(driver: HostDriver) -> None:
    v = torch.randint(0, 1 << 30, (THREADS,), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    out, out2 = run("lds_ops", v, words=(65 + 16, 2), driver=driver)
    assert torch.equal(out[:64].long(), torch.bincount(v.long() % 64, minlength=64))
    bits = 0
    for x in v.tolist():
        bits |= 1 << x % 32
    assert out[64].item() & 0xFFFFFFFF == bits
    assert torch.equal(out[65:].view(torch.float32), torch.arange(64.0).view(16, 4).sum(1))
    terms = (v % 1000).float() * 0.37
    total = torch.zeros(1)
    for wave in range(4):
        total = total + tree_sum(terms[wave * 64 : wave * 64 + 64])
    assert out2[0] == int((v == 77).any())
    assert out2[1:].view(torch.float32) == total
