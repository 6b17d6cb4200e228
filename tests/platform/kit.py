"""Runs the kernels of primitives.hip on the host, or on the GPU that is here."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from rocmega.drivers.base import Driver, Module
from rocmega.drivers.host import HostDriver
from rocmega.toolchain import Unit, compile

SOURCE = Path(__file__).with_name("primitives.hip")
THREADS = 256
LARGE_LDS = 4096  # bytes of the array whose size comes with the launch on NVIDIA GPUs


class Args(ctypes.Structure):
    _fields_ = [*[(name, ctypes.c_uint64) for name in ("a", "b", "out", "out2")], ("n", ctypes.c_uint32)]


def unit(mma_k: int = 32) -> Unit:
    """mma_k 16: the host computes as gfx942 does."""
    return Unit("primitives", SOURCE, {}, {} if mma_k == 32 else {"MMA_K": mma_k})


@cache
def module(mma_k: int = 32) -> Module:
    return HostDriver().load(compile(unit(mma_k), "host"))


@cache
def gpu_module(driver: Driver) -> Module:
    return driver.load(compile(unit(), driver.arch))


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
    driver: Driver | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a kernel; its outputs as int32 of so many words. out2: what the second holds before."""
    driver = driver or HostDriver()
    loaded = module(mma_k) if driver.name == "host" else gpu_module(driver)
    a = a.to(driver.device)
    b = a if b is None else b.to(driver.device)
    with driver.shared("out", 4 * words[0]) as first, driver.shared("out2", 4 * words[1]) as second:
        if out2 is not None:
            second.tensor.copy_(out2.view(torch.uint8))
        args = Args(driver.constant(a), driver.constant(b), first.address, second.address, n)
        args_there = torch.frombuffer(bytearray(args), dtype=torch.uint8).to(driver.device)
        lds = LARGE_LDS if driver.name == "cuda" else 0
        driver.launch(loaded.function(name), driver.constant(args_there), blocks, THREADS, lds)
        driver.synchronize()
        return first.tensor.view(torch.int32).cpu().clone(), second.tensor.view(torch.int32).cpu().clone()
