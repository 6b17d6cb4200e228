"""Runs the kernels of primitives.hip on the host."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from rocmega.drivers.host import HostDriver, HostModule
from rocmega.toolchain import Unit, compile

SOURCE = Path(__file__).with_name("primitives.hip")
THREADS = 256


class Args(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("a", "b", "out", "out2")] + [("n", ctypes.c_uint32)]


def unit(mma_k: int = 32) -> Unit:
    """mma_k 16: the host computes as gfx942 does."""
    return Unit("primitives", SOURCE, {}, {} if mma_k == 32 else {"MMA_K": mma_k})


@cache
def module(mma_k: int = 32) -> HostModule:
    return HostDriver().load(compile(unit(mma_k), "host"))


def run(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor | None = None,
    *,
    words: tuple[int, int],
    n: int = 0,
    blocks: int = 1,
    mma_k: int = 32,
    out2: torch.Tensor | None = None,
    driver: HostDriver | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a kernel; its outputs as int32 of so many words. out2: what the second holds before."""
    driver = driver or HostDriver()
    with driver.shared("out", 4 * words[0]) as first, driver.shared("out2", 4 * words[1]) as second:
        if out2 is not None:
            second.tensor.copy_(out2.view(torch.uint8))
        b = a if b is None else b
        args = Args(driver.constant(a), driver.constant(b), first.address, second.address, n)
        driver.launch(module(mma_k).function(name), ctypes.addressof(args), blocks, THREADS)
        return first.tensor.view(torch.int32).clone(), second.tensor.view(torch.int32).clone()
