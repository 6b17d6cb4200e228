"""What the figures were measured with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver

_PACKAGES = ("torch", "triton", "cuda-bindings", "hip-python", "numpy")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
# AMD's Infinity Cache lies beside the L2 caches that torch reports: 256 MB on MI300X and MI355X.
_INFINITY_CACHE = {"gfx942": 256 << 20, "gfx950": 256 << 20}


def environment(driver: Driver) -> dict[str, Any]:
    """Device, its driver and the versions of everything that took part."""
    import torch

    from rocmega import __version__

    facts = driver.facts()
    return {
        "rocmega": __version__,
        "device": facts.name,
        "arch": facts.arch,
        "compute_units": facts.compute_units,
        "memory_bytes": facts.memory_bytes,
        "cache_bytes": cache_bytes(driver),
        "device_driver": _device_driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": sys.version.split()[0],
        "os": platform.platform(),
        "packages": _versions(),
    }


def cache_bytes(driver: Driver) -> int:
    """The largest cache in front of the device's memory; 0 on a CPU, where nobody asks."""
    if driver.device.type == "cpu":
        return 0
    import torch

    return max(int(torch.cuda.get_device_properties(driver.device).L2_cache_size), _INFINITY_CACHE.get(driver.arch, 0))


def _device_driver() -> str | None:
    for file in _DRIVERS:
        with contextlib.suppress(OSError):
            return file.read_text().splitlines()[0].strip()
    return None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
