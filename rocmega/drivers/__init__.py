"""Devices that kernels run on: the host, AMD GPUs through hip-python and NVIDIA GPUs through cuda-bindings."""

from rocmega.drivers.base import DeviceFacts, Driver, Function, Module, SharedBuffer
from rocmega.drivers.select import kind_for, pick

__all__ = ["DeviceFacts", "Driver", "Function", "Module", "SharedBuffer", "kind_for", "pick"]
