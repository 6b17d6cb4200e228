"""Runs the kernels of hip/measure/primitives.hip on the host, or on the GPU that is here."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from rocmega.drivers.base import Driver, Module
from rocmega.drivers.host import HostDriver
from rocmega.selftest import primitives
from rocmega.selftest.primitives import THREADS as THREADS
from rocmega.selftest.primitives import unit as unit
from rocmega.toolchain import compile


@cache
def module(mma_k: int = 32) -> Module:
    return HostDriver().load(compile(unit(mma_k), "host"))


@cache
def gpu_module(driver: Driver) -> Module:
    return primitives.load(driver)


def module_of(driver: Driver) -> Module:
    return module() if driver.name == "host" else gpu_module(driver)


def run(
    name: str, a: torch.Tensor, b: torch.Tensor | None = None, *, mma_k: int = 32, driver: Driver | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launches a kernel, as `primitives.run`. mma_k: of the host."""
    driver = driver or HostDriver()
    loaded = module(mma_k) if driver.name == "host" else gpu_module(driver)
    return primitives.run(driver, loaded, name, a, b, **options)
