"""The driver for AMD GPUs, on hip-python."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from rocmega.drivers.base import DeviceFacts, Function
from rocmega.drivers.gpu import IPC_HANDLE_BYTES, GpuDriver, PointerArgument
from rocmega.errors import DriverError
from rocmega.toolchain.compilers import AMD_TARGETS

# Compute units of one XCD. Where the runtime does not tell the number of XCDs, it follows: 304 of MI300X and MI325X are
# 8 of 38, 228 of MI300A 6 of 38, 256 of MI350X and MI355X 8 of 32, 80 of MI308X 4 of 20; partitions have fewer XCDs.
UNITS_PER_XCD = {"gfx942": (38, 20), "gfx950": (32,)}
UNCACHED = 3  # hipDeviceMallocUncached: the bindings do not name it
PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess
MAPPED = 2  # hipHostMallocMapped
COHERENT = 1 << 30  # hipHostMallocCoherent: fine-grained, no GPU cache keeps it


def load_bindings() -> Any:
    """The module of hip-python. Raises DriverError if it is not installed or does not load."""
    try:
        from hip import hip
    except Exception as error:  # a broken installation raises anything
        raise DriverError(
            f"The HIP bindings cannot be imported ({error}). Install them with `pip install hip-python`, in the "
            "version of the installed ROCm."
        ) from error
    return hip


def xcds(arch: str, compute_units: int) -> int:
    """How many XCDs a device with so many compute units has; 1 if it is none that is known."""
    for units in UNITS_PER_XCD.get(arch, ()):
        if compute_units % units == 0:
            return compute_units // units
    return 1


class HipDriver(GpuDriver):
    """One AMD GPU. index: torch's number of it, None for torch's current one. bindings: for tests."""

    name = "hip"

    def __init__(self, index: int | None = None, *, bindings: Any = None) -> None:
        self.hip = bindings if bindings is not None else load_bindings()
        try:
            count = self._count()
        except DriverError:
            raise
        except Exception as error:  # the bindings load libamdhip64 at the first call
            raise DriverError(
                f"No AMD GPU can be used: the HIP runtime does not load ({error}). Install ROCm, or set ROCM_PATH."
            ) from error
        if count == 0:
            raise DriverError(
                "No AMD GPU was found: the HIP runtime sees no device. `rocmega doctor` shows what it sees."
            )
        _check_torch()
        chosen = _current() if index is None else index
        if not 0 <= chosen < count:
            raise DriverError(f"There is no GPU number {chosen}: the HIP runtime sees {count}.")
        self.properties = self._call("hipGetDeviceProperties", chosen)[0]
        arch = _text(self.properties.gcnArchName).partition(":")[0]
        if arch not in AMD_TARGETS:
            raise DriverError(f"GPU {chosen} is a {arch}; kernels exist for {' and '.join(AMD_TARGETS)}.")
        super().__init__(chosen, arch)
        if not self._attribute("CooperativeLaunch"):
            raise DriverError(f"GPU {chosen} refuses cooperative launches, which the mega-task needs.")

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Calls the library; what it returns after the error code. Raises DriverError for an error."""
        error, *results = getattr(self.hip, name)(*args)
        if error != self.hip.hipError_t.hipSuccess:
            raise DriverError(f"{name} failed: {self._describe(error)}.")
        return tuple(results)

    def _describe(self, error: Any) -> str:
        try:
            text = _text(self.hip.hipGetErrorString(error)[1])
        except Exception:  # only the wording of a message depends on it
            text = ""
        return f"{getattr(error, 'name', error)}{f' ({text})' if text else ''}"

    def _count(self) -> int:
        error, count = self.hip.hipGetDeviceCount()
        if error == self.hip.hipError_t.hipErrorNoDevice:
            return 0
        if error != self.hip.hipError_t.hipSuccess:
            raise DriverError(f"No AMD GPU can be used: hipGetDeviceCount failed: {self._describe(error)}.")
        return int(count)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.hip.hipDeviceAttribute_t, f"hipDeviceAttribute{name}")
        return int(self._call("hipDeviceGetAttribute", attribute, self.index)[0])

    def _activate(self) -> None:
        self._call("hipSetDevice", self.index)

    def _read_facts(self) -> DeviceFacts:
        units = self._attribute("MultiprocessorCount")
        try:
            count = self._attribute("NumberOfXccs")
        except (AttributeError, DriverError):  # older runtimes do not know it
            count = 0
        return DeviceFacts(
            name=_text(self.properties.name),
            arch=self.arch,
            compute_units=units,
            memory_bytes=int(self.properties.totalGlobalMem),
            lds_bytes=self._attribute("MaxSharedMemoryPerBlock"),
            xcds=count if count > 0 else xcds(self.arch, units),
        )

    def _allocate(self, nbytes: int, peers: bool) -> int:
        call = ("hipExtMallocWithFlags", nbytes, UNCACHED) if peers else ("hipMalloc", nbytes)
        return int(self._call(*call)[0])

    def _allocate_mapped(self, nbytes: int) -> tuple[int, int]:
        memory = self._call("hipHostMalloc", nbytes, MAPPED | COHERENT)[0]
        try:
            return int(memory), int(self._call("hipHostGetDevicePointer", memory, 0)[0])
        except BaseException:
            self._free_mapped(int(memory))
            raise

    def _free_mapped(self, host: int) -> None:
        self._call("hipHostFree", host)

    def _zero(self, address: int, nbytes: int) -> None:
        self._call("hipMemset", address, 0, nbytes)
        self._call("hipDeviceSynchronize")

    def _free(self, address: int) -> None:
        self._call("hipFree", address)

    def _load(self, image: bytes, path: Path) -> Any:
        try:
            return self._call("hipModuleLoadData", image)[0]
        except DriverError as error:
            raise DriverError(f"The compiled kernel {path} cannot be loaded: {error}") from error

    def _unload(self, module: Any) -> None:
        self._call("hipModuleUnload", module)

    def _function(self, module: Any, name: str) -> Any:
        error, function = self.hip.hipModuleGetFunction(module, name.encode())
        if error == self.hip.hipError_t.hipErrorNotFound:
            return None
        if error != self.hip.hipError_t.hipSuccess:
            raise DriverError(f"hipModuleGetFunction failed for {name}: {self._describe(error)}.")
        return function

    def _allow_dynamic_lds(self, function: Function, nbytes: int) -> None:
        # HIP needs no opt-in, and runtimes differ in whether they take a module's function here: a refusal says
        # nothing. Too much LDS shows as no resident block.
        attribute = self.hip.hipFuncAttribute.hipFuncAttributeMaxDynamicSharedMemorySize
        self.hip.hipFuncSetAttribute(function.handle, attribute, nbytes)

    def _blocks_per_unit(self, function: Function, threads: int, dynamic_lds: int) -> int:
        call = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._call(call, function.handle, threads, dynamic_lds)[0])

    def _launch(
        self, function: Function, argument: PointerArgument, blocks: int, threads: int, dynamic_lds: int, stream: int
    ) -> None:
        # The bindings make the array themselves, of the addresses of the arguments.
        sizes = (blocks, 1, 1, threads, 1, 1, dynamic_lds)
        self._call("hipModuleLaunchCooperativeKernel", function.handle, *sizes, stream, [argument.word_address])

    def _wait(self) -> None:
        self._call("hipDeviceSynchronize")

    def _export(self, address: int) -> bytes:
        handle = self._call("hipIpcGetMemHandle", address)[0]
        return ctypes.string_at(int(handle), IPC_HANDLE_BYTES)

    def _open(self, handle: bytes) -> int:
        raw = ctypes.create_string_buffer(handle, IPC_HANDLE_BYTES)
        return int(self._call("hipIpcOpenMemHandle", raw, PEER_ACCESS)[0])

    def _close_peer(self, address: int) -> None:
        self._call("hipIpcCloseMemHandle", address)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _check_torch() -> None:
    import torch

    if torch.version.hip is None:
        raise DriverError(
            f"PyTorch {torch.__version__} is not a ROCm build, and it owns the tensors and streams. Install it from "
            "the ROCm index of pytorch.org."
        )
    if not torch.cuda.is_available():
        raise DriverError("PyTorch sees no AMD GPU. Check that /dev/kfd can be read, and HIP_VISIBLE_DEVICES.")


def _current() -> int:
    import torch

    return torch.cuda.current_device()
