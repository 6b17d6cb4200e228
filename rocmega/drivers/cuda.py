"""The driver for NVIDIA GPUs, on cuda-bindings (the driver API, in torch's context)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from rocmega.drivers.base import DeviceFacts, Function
from rocmega.drivers.gpu import IPC_HANDLE_BYTES, GpuDriver, PointerArgument
from rocmega.errors import DriverError

CAPABILITIES = {(9, 0): "sm_90"}
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
MAPPED = 2  # CU_MEMHOSTALLOC_DEVICEMAP


def load_bindings() -> Any:
    """The module of cuda-bindings. Raises DriverError if it is not installed or does not load."""
    try:
        from cuda.bindings import driver
    except Exception as error:  # a broken installation raises anything
        raise DriverError(
            f"The CUDA bindings cannot be imported ({error}). Install them with `pip install cuda-bindings` "
            "(Python 3.11 or newer)."
        ) from error
    return driver


class CudaDriver(GpuDriver):
    """One NVIDIA GPU. index: torch's number of it, None for torch's current one. bindings: for tests."""

    name = "cuda"

    def __init__(self, index: int | None = None, *, bindings: Any = None) -> None:
        self.cuda = bindings if bindings is not None else load_bindings()
        try:
            self._call("cuInit", 0)
            count = int(self._call("cuDeviceGetCount")[0])
        except Exception as error:  # the bindings load libcuda at the first call
            raise DriverError(
                f"No NVIDIA GPU can be used: {str(error).rstrip('.')}. Install the NVIDIA driver, or use device='host'."
            ) from error
        if count == 0:
            raise DriverError("No NVIDIA GPU was found: the driver sees no device. Check CUDA_VISIBLE_DEVICES.")
        _check_torch()
        chosen = _current() if index is None else index
        if not 0 <= chosen < count:
            raise DriverError(f"There is no GPU number {chosen}: the NVIDIA driver sees {count}.")
        self.ordinal = self._call("cuDeviceGet", chosen)[0]
        capability = self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")
        if capability not in CAPABILITIES:
            raise DriverError(
                f"GPU {chosen} has compute capability {capability[0]}.{capability[1]}; kernels exist for 9.0."
            )
        super().__init__(chosen, CAPABILITIES[capability])
        if not self._attribute("COOPERATIVE_LAUNCH"):
            raise DriverError(f"GPU {chosen} refuses cooperative launches, which the mega-task needs.")
        self.context = self._call("cuDevicePrimaryCtxRetain", self.ordinal)[0]

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Calls the library; what it returns after the error code. Raises DriverError for an error."""
        error, *results = getattr(self.cuda, name)(*args)
        if error != self.cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name} failed: {self._describe(error)}.")
        return tuple(results)

    def _describe(self, error: Any) -> str:
        try:
            text = self.cuda.cuGetErrorString(error)[1].decode()
        except Exception:  # only the wording of a message depends on it
            text = ""
        return f"{getattr(error, 'name', error)}{f' ({text})' if text else ''}"

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self.ordinal)[0])

    def _activate(self) -> None:
        self._call("cuCtxSetCurrent", self.context)

    def _read_facts(self) -> DeviceFacts:
        name = self._call("cuDeviceGetName", 256, self.ordinal)[0]
        return DeviceFacts(
            name=name.split(b"\0")[0].decode(),
            arch=self.arch,
            compute_units=self._attribute("MULTIPROCESSOR_COUNT"),
            memory_bytes=int(self._call("cuDeviceTotalMem", self.ordinal)[0]),
            lds_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            xcds=1,
        )

    def _allocate(self, nbytes: int, peers: bool) -> int:
        return int(self._call("cuMemAlloc", nbytes)[0])

    def _allocate_mapped(self, nbytes: int) -> tuple[int, int]:
        host = int(self._call("cuMemHostAlloc", nbytes, MAPPED)[0])
        try:
            return host, int(self._call("cuMemHostGetDevicePointer", host, 0)[0])
        except BaseException:
            self._free_mapped(host)
            raise

    def _free_mapped(self, host: int) -> None:
        self._call("cuMemFreeHost", host)

    def _zero(self, address: int, nbytes: int) -> None:
        self._call("cuMemsetD8", address, 0, nbytes)
        self._call("cuCtxSynchronize")

    def _free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def _load(self, image: bytes, path: Path) -> Any:
        try:
            return self._call("cuModuleLoadData", image)[0]
        except DriverError as error:
            raise DriverError(f"The compiled kernel {path} cannot be loaded: {error}") from error

    def _unload(self, module: Any) -> None:
        self._call("cuModuleUnload", module)

    def _function(self, module: Any, name: str) -> Any:
        error, function = self.cuda.cuModuleGetFunction(module, name.encode())
        if error == self.cuda.CUresult.CUDA_ERROR_NOT_FOUND:
            return None
        if error != self.cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(f"cuModuleGetFunction failed for {name}: {self._describe(error)}.")
        return function

    def _allow_dynamic_lds(self, function: Function, nbytes: int) -> None:
        attribute = self.cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function.handle, attribute, nbytes)

    def _blocks_per_unit(self, function: Function, threads: int, dynamic_lds: int) -> int:
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._call(call, function.handle, threads, dynamic_lds)[0])

    def _launch(
        self, function: Function, argument: PointerArgument, blocks: int, threads: int, dynamic_lds: int, stream: int
    ) -> None:
        sizes = (blocks, 1, 1, threads, 1, 1, dynamic_lds)
        self._call("cuLaunchCooperativeKernel", function.handle, *sizes, stream, argument.array_address)

    def _wait(self) -> None:
        self._call("cuCtxSynchronize")

    def _export(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)[0]
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def _open(self, handle: bytes) -> int:
        filled = self.cuda.CUipcMemHandle()
        ctypes.memmove(filled.getPtr(), handle, IPC_HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", filled, PEER_ACCESS)[0])

    def _close_peer(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def close(self) -> None:
        """Gives back what was allocated and loaded here, and our hold on torch's context."""
        super().close()
        if self.context is not None:
            self._call("cuDevicePrimaryCtxRelease", self.ordinal)
            self.context = None


def _check_torch() -> None:
    import torch

    if torch.version.cuda is None:
        raise DriverError(
            f"PyTorch {torch.__version__} is not a CUDA build, and it owns the tensors and streams. Install it from "
            "the CUDA index of pytorch.org."
        )
    if not torch.cuda.is_available():
        raise DriverError("PyTorch sees no NVIDIA GPU. Check the driver's version, and CUDA_VISIBLE_DEVICES.")


def _current() -> int:
    import torch

    torch.cuda.init()  # makes the context that this driver then shares
    return torch.cuda.current_device()
