"""Loads and stores of every scope and width."""

from __future__ import annotations

import pytest
import torch

from rocmega.drivers import Driver
from rocmega.drivers.host import HostDriver
from tests.platform.kit import THREADS, run

A = torch.zeros(1)


def hand_over(driver: Driver) -> None:
    out, _ = run("hand_over", A, words=(3 * THREADS, 4), blocks=2, driver=driver)
    assert torch.equal(out[2 * THREADS :], 7 + 8 * torch.arange(THREADS, dtype=torch.int32))


@pytest.mark.parametrize("scope", ["plain", "device", "system"])
def test_copies(driver: Driver, scope: str) -> None:
    data = torch.arange(7 * THREADS, dtype=torch.int32)
    out, _ = run(f"copy_{scope}", A, words=(7 * THREADS,) * 2, out2=data, driver=driver)
    assert torch.equal(out, data)


def test_streams_and_claims(driver: Driver) -> None:
    data = torch.arange(4 * THREADS, dtype=torch.int32)
    out, who = run("streams", data, words=(4 * THREADS, 1 + THREADS), driver=driver)
    assert torch.equal(out, data)
    assert who[0] == 1
    assert who[1:].sum() == 1


@pytest.mark.parametrize("check", [False, True])
def test_hand_over(check: bool) -> None:
    for seed in range(12):
        hand_over(HostDriver(seed, check))


def test_hand_over_on_a_gpu(gpu: Driver) -> None:
    for _ in range(100):
        hand_over(gpu)
