"""Stand-ins for the packages' modules: they record calls, refuse wrong argument counts, and fail on request."""

from __future__ import annotations

import ast
import ctypes
import enum
import functools
import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocmega.drivers import cuda as cuda_module
from rocmega.drivers import hip as hip_module
from rocmega.drivers.gpu import GpuDriver


class Result(enum.IntEnum):
    SUCCESS = 0
    INVALID = 1
    NO_DEVICE = 100
    NOT_FOUND = 500
    ILLEGAL_ADDRESS = 700


class FakeLibrary:
    """Subclasses define what calls return; `fail` maps a call to the error it then gives."""

    success = Result.SUCCESS

    def __init__(self, arity: dict[str, int]) -> None:
        self.arity = arity
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Result] = {}
        self.memory: dict[int, Any] = {}
        self.devices = 2
        self.blocks_per_unit = 2
        self.launched: list[tuple[int, ...]] = []

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.arity:
            raise AttributeError(f"the package has no {name}")

        def call(*args: Any) -> tuple[Any, ...]:
            assert len(args) == self.arity[name], f"{name} takes {self.arity[name]} arguments, got {len(args)}"
            self.calls.append((name, *args))
            if name in self.fail:
                return (self.fail[name], *([None] if self.returns(name, args, dry=True) else []))
            return (self.success, *self.returns(name, args))

        return call

    def returns(self, name: str, args: tuple[Any, ...], dry: bool = False) -> list[Any]:
        raise NotImplementedError

    def allocate(self, nbytes: int) -> int:
        block = ctypes.create_string_buffer(b"\xa5" * nbytes, nbytes)
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.memory[address]


class FakeHip(FakeLibrary):
    hipError_t = SimpleNamespace(
        hipSuccess=Result.SUCCESS, hipErrorNoDevice=Result.NO_DEVICE, hipErrorNotFound=Result.NOT_FOUND
    )
    hipFuncAttribute = SimpleNamespace(hipFuncAttributeMaxDynamicSharedMemorySize=8)
    hipDeviceAttribute_t = SimpleNamespace(
        hipDeviceAttributeMultiprocessorCount="units",
        hipDeviceAttributeMaxSharedMemoryPerBlock="lds",
        hipDeviceAttributeCooperativeLaunch="cooperative",
        hipDeviceAttributeNumberOfXccs="xccs",
    )

    def __init__(self, arity: dict[str, int]) -> None:
        super().__init__(arity)
        self.arch = "gfx942:sramecc+:xnack-"
        self.attributes = {"units": 304, "lds": 65536, "cooperative": 1, "xccs": 8}

    def returns(self, name: str, args: tuple[Any, ...], dry: bool = False) -> list[Any]:
        if dry:
            return [] if name in ("hipFuncSetAttribute", "hipModuleLaunchCooperativeKernel", "hipSetDevice") else [None]
        if name == "hipModuleLaunchCooperativeKernel":
            # What the library does at once: read the 8 bytes behind each address.
            self.launched.append(tuple(ctypes.c_uint64.from_address(a).value for a in args[9]))
        if name in ("hipMalloc", "hipExtMallocWithFlags"):
            return [self.allocate(args[0])]
        if name in ("hipMemset",):
            ctypes.memset(args[0], args[1], args[2])
        if name in ("hipFree", "hipHostFree"):
            self.free(args[0])
        if name == "hipHostMalloc":
            return [self.allocate(args[0])]
        if name == "hipHostGetDevicePointer":
            return [args[0]]
        if name == "hipIpcGetMemHandle":
            self.handle = ctypes.create_string_buffer(args[0].to_bytes(8, "little"), 64)
            return [ctypes.addressof(self.handle)]
        if name == "hipIpcOpenMemHandle":
            return [int.from_bytes(args[0].raw[:8], "little")]
        return {
            "hipGetDeviceCount": [self.devices],
            "hipGetDeviceProperties": [
                SimpleNamespace(name="AMD Instinct MI300X", gcnArchName=self.arch, totalGlobalMem=192 << 30)
            ],
            "hipDeviceGetAttribute": [self.attributes.get(args[0]) if args else None],
            "hipModuleLoadData": [77],
            "hipModuleGetFunction": [4711],
            "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": [self.blocks_per_unit],
            "hipGetErrorString": [b"what the library says"],
        }.get(name, [])


class CUipcMemHandle:
    def __init__(self) -> None:
        self.raw = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.raw)


class FakeCuda(FakeLibrary):
    CUresult = SimpleNamespace(CUDA_SUCCESS=Result.SUCCESS, CUDA_ERROR_NOT_FOUND=Result.NOT_FOUND)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH="cooperative",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="units",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="lds",
    )
    CUipcMemHandle = CUipcMemHandle

    def __init__(self, arity: dict[str, int]) -> None:
        super().__init__(arity)
        self.attributes = {"major": 9, "minor": 0, "cooperative": 1, "units": 132, "lds": 232448}

    def returns(self, name: str, args: tuple[Any, ...], dry: bool = False) -> list[Any]:
        if dry:
            return [] if name in ("cuFuncSetAttribute", "cuLaunchCooperativeKernel", "cuInit") else [None]
        if name == "cuLaunchCooperativeKernel":
            word = ctypes.c_void_p.from_address(args[9]).value
            assert word is not None
            self.launched.append((ctypes.c_uint64.from_address(word).value,))
        if name == "cuMemAlloc":
            return [self.allocate(args[0])]
        if name == "cuMemsetD8":
            ctypes.memset(args[0], args[1], args[2])
        if name in ("cuMemFree", "cuMemFreeHost"):
            self.free(args[0])
        if name == "cuMemHostAlloc":
            return [self.allocate(args[0])]
        if name == "cuMemHostGetDevicePointer":
            return [args[0]]
        if name == "cuIpcGetMemHandle":
            handle = CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), args[0].to_bytes(8, "little"), 8)
            return [handle]
        if name == "cuIpcOpenMemHandle":
            return [int.from_bytes(args[0].raw.raw[:8], "little")]
        return {
            "cuDeviceGetCount": [self.devices],
            "cuDeviceGet": [args[0] if args else None],
            "cuDeviceGetName": [b"NVIDIA H200" + b"\0" * 245],
            "cuDeviceTotalMem": [141 << 30],
            "cuDeviceGetAttribute": [self.attributes.get(args[0]) if args else None],
            "cuDevicePrimaryCtxRetain": ["context"],
            "cuModuleLoadData": [77],
            "cuModuleGetFunction": [4711],
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": [self.blocks_per_unit],
            "cuGetErrorString": [b"what the library says"],
        }.get(name, [])


@functools.cache
def hip_arity() -> dict[str, int]:
    """Argument counts of the installed hip-python's functions, from the stubs that come with it."""
    pytest.importorskip("hip", reason="hip-python is not installed")
    import hip

    stubs = Path(getattr(hip.hip, "__file__", "")).parent / "hip.pyi"
    if not stubs.is_file():
        pytest.skip("hip-python came without stubs")
    tree = ast.parse(stubs.read_text())
    return {node.name: len(node.args.args) for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def cuda_arity() -> dict[str, int]:
    """Argument counts of the installed cuda-bindings' functions, from their signatures."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    found = {}
    for name in dir(driver):
        signature = re.match(rf"{name}\(([^)]*)\)", getattr(getattr(driver, name), "__doc__", None) or "")
        if name.startswith("cu") and signature:
            found[name] = len([part for part in signature[1].split(",") if part.strip()])
    if not found:
        pytest.skip(f"cuda-bindings {importlib.metadata.version('cuda-bindings')} came without signatures")
    return found


def host_view(address: int, nbytes: int) -> torch.Tensor:
    """The stand-ins' device memory is the host's."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def open_driver(kind: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[GpuDriver, Any]:
    """A driver over a stand-in, and the stand-in, with these attributes changed."""
    fake: FakeLibrary
    if kind == "hip":
        module, fake = hip_module, FakeHip(hip_arity())
    else:
        module, fake = cuda_module, FakeCuda(cuda_arity())
    for name, value in changes.items():
        if name in getattr(fake, "attributes", {}):
            fake.attributes[name] = value
        elif name == "fail":
            fake.fail.update(value)
        else:
            setattr(fake, name, value)
    monkeypatch.setattr(module, "_check_torch", lambda: None)
    monkeypatch.setattr(module, "_current", lambda: 1)
    make = hip_module.HipDriver if kind == "hip" else cuda_module.CudaDriver
    driver = make(bindings=fake)
    driver.__dict__["polls_per_second"] = 1000  # it would be measured: isinstance(driver, Driver) asks for it
    monkeypatch.setattr(driver, "_view", host_view)
    monkeypatch.setattr(driver, "_stream", lambda stream: 0 if stream is None else stream.cuda_stream)
    return driver, fake
