"""Chooses the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocmega.errors import DriverError

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver

KINDS = ("auto", "host", "hip", "cuda")


def kind_for(choice: str = "auto") -> str:
    """The driver that a choice means here: auto is the GPU that torch can use, else the host."""
    if choice not in KINDS:
        raise DriverError(f"There is no device {choice!r}; choose one of {', '.join(KINDS)}.")
    if choice != "auto":
        return choice
    import torch

    if not torch.cuda.is_available():
        return "host"
    return "hip" if torch.version.hip is not None else "cuda"


def pick(choice: str = "auto", *, index: int | None = None, seed: int | None = None) -> Driver:
    """Opens a device: "auto", "host", "hip" or "cuda". index: the GPU's number; seed: of the host's scheduler.

    Where torch has a GPU, "auto" does not fall back to the host, which would be slower than anybody expects: what the
    GPU lacks is raised as DriverError.
    """
    kind = kind_for(choice)
    if kind == "hip":
        from rocmega.drivers.hip import HipDriver

        return HipDriver(index)
    if kind == "cuda":
        from rocmega.drivers.cuda import CudaDriver

        return CudaDriver(index)
    from rocmega.drivers.host import HostDriver

    return HostDriver(seed=seed)
