"""The HIP and CUDA drivers over stand-ins for their packages, whose argument counts are the real packages'."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocmega.drivers import cuda as cuda_module
from rocmega.drivers import hip as hip_module
from rocmega.drivers.base import Driver
from rocmega.drivers.gpu import DeviceMemory, GpuDriver
from rocmega.drivers.select import kind_for, pick
from rocmega.errors import DriverError
from rocmega.toolchain import Artifact
from tests.drivers.fakes import FakeCuda, FakeHip, FakeLibrary, Result, cuda_arity, hip_arity, open_driver

LAUNCH = {"hip": "hipModuleLaunchCooperativeKernel", "cuda": "cuLaunchCooperativeKernel"}


@pytest.fixture(params=["hip", "cuda"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[GpuDriver, Any]:
    return open_driver(request.param, monkeypatch)


def loaded(driver: GpuDriver, folder: Path) -> Any:
    path = folder / "k.bin"
    path.write_bytes(b"image")
    return driver.load(Artifact(path, driver.arch, "", 0, True, ""))


def test_is_a_driver(opened: tuple[GpuDriver, Any]) -> None:
    driver, _ = opened
    assert isinstance(driver, Driver)
    assert driver.index == 1
    assert driver.device == torch.device("cuda", 1)


def test_facts(opened: tuple[GpuDriver, Any]) -> None:
    facts = opened[0].facts()
    assert facts.name in ("AMD Instinct MI300X", "NVIDIA H200")
    assert (facts.arch, facts.compute_units, facts.lds_bytes, facts.xcds) in [
        ("gfx942", 304, 65536, 8),
        ("sm_90", 132, 232448, 1),
    ]
    assert facts.memory_bytes > 2**37


def test_the_kernel_gets_one_pointer(opened: tuple[GpuDriver, Any], tmp_path: Path) -> None:
    driver, fake = opened
    function = loaded(driver, tmp_path).function("decode", ["embed", "norm"])
    driver.launch(function, 0x7F00_1234_5678, 264, 256, stream=SimpleNamespace(cuda_stream=99))
    assert fake.launched == [(0x7F00_1234_5678,)]
    [call] = fake.named(LAUNCH[driver.name])
    assert call[:9] == (4711, 264, 1, 1, 256, 1, 1, 0, 99)
    assert function.stage(1) == "norm"
    assert function.stage(7) == "7"


def test_dynamic_lds_is_allowed_before_the_occupancy_is_asked(opened: tuple[GpuDriver, Any], tmp_path: Path) -> None:
    driver, fake = opened
    function = loaded(driver, tmp_path).function("decode")
    driver.launch(function, 1, 1, 256, 60_000)
    driver.launch(function, 1, 1, 256, 60_000)
    names = [call[0] for call in fake.calls]
    allow = next(i for i, n in enumerate(names) if "FuncSetAttribute" in n)
    assert fake.calls[allow][1:] == (4711, 8, 60_000)
    ask = next(i for i, n in enumerate(names) if "Occupancy" in n)
    assert fake.calls[ask][1:] == (4711, 256, 60_000)
    assert allow < ask < names.index(LAUNCH[driver.name])
    assert sum("Occupancy" in n for n in names) == 1  # asked once, not every step
    assert fake.named(LAUNCH[driver.name])[0][7] == 60_000


def test_refuses_more_blocks_than_fit(opened: tuple[GpuDriver, Any], tmp_path: Path) -> None:
    driver, fake = opened
    function = loaded(driver, tmp_path).function("decode")
    most = 2 * driver.facts().compute_units
    assert driver.max_blocks(function, 256, 0) == most
    driver.launch(function, 1, most, 256)
    with pytest.raises(DriverError, match=f"{most + 1} blocks of kernel decode .*at most {most}"):
        driver.launch(function, 1, most + 1, 256)
    with pytest.raises(DriverError, match="cannot be launched with 0 blocks"):
        driver.launch(function, 1, 0, 256)
    with pytest.raises(DriverError, match="asks for 300000 bytes of LDS"):
        driver.launch(function, 1, 1, 256, 300_000)
    assert len(fake.launched) == 1


def test_shared_memory(opened: tuple[GpuDriver, Any]) -> None:
    driver, fake = opened
    buffer = driver.shared("x", 1000)
    assert buffer.address in fake.memory
    assert buffer.nbytes == 1000
    assert buffer.tensor.dtype == torch.uint8
    assert not buffer.tensor.any()
    buffer.tensor[3] = 7
    assert fake.memory[buffer.address].raw[3] == 7
    buffer.close()
    buffer.close()
    assert not fake.memory
    with pytest.raises(DriverError, match="cannot have 0 bytes"):
        driver.shared("empty", 0)


def test_memory_is_freed_when_its_setup_fails(opened: tuple[GpuDriver, Any]) -> None:
    driver, fake = opened
    fake.fail["hipMemset" if driver.name == "hip" else "cuMemsetD8"] = Result.ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match=r"failed: ILLEGAL_ADDRESS \(what the library says\)"):
        driver.shared("x", 100)
    assert not fake.memory


def test_memory_for_peers_is_uncached_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, fake = open_driver("hip", monkeypatch)
    driver.shared("flags", 256, peers=True)
    assert fake.named("hipExtMallocWithFlags") == [(2 << 20, 3)]  # a handle is of a whole allocation
    assert not fake.named("hipMalloc")


def test_memory_of_the_host_that_kernels_reach(opened: tuple[GpuDriver, Any]) -> None:
    driver, fake = opened
    buffer = driver.mapped("ring", 1000)
    assert buffer.tensor.device.type == "cpu"
    assert not buffer.tensor.any()
    fake.memory[buffer.address][7] = b"\x05"  # as a kernel would
    assert buffer.tensor[7] == 5
    [call] = fake.named("hipHostMalloc" if driver.name == "hip" else "cuMemHostAlloc")
    assert call == ((1000, 2 | 1 << 30) if driver.name == "hip" else (1000, 2))
    buffer.close()
    buffer.close()
    assert not fake.memory
    with pytest.raises(DriverError, match="cannot have 0 bytes"):
        driver.mapped("empty", 0)
    fake.fail["hipHostGetDevicePointer" if driver.name == "hip" else "cuMemHostGetDevicePointer"] = Result.INVALID
    with pytest.raises(DriverError, match="HostGetDevicePointer failed: INVALID"):
        driver.mapped("ring", 8)
    assert not fake.memory


def test_a_launch_that_is_started_tells_when_it_has_ended(
    opened: tuple[GpuDriver, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, fake = opened
    answers: list[Any] = [False, True]

    def query() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(driver, "_event", lambda stream: SimpleNamespace(query=query))
    function = loaded(driver, tmp_path).function("decode")
    running = driver.start(function, 0x1234, 3, 256)
    assert fake.launched == [(0x1234,)]
    assert [running.done(), running.done()] == [False, True]
    running.wait()
    answers.append(RuntimeError("an illegal address"))
    fake.fail["hipDeviceSynchronize" if driver.name == "hip" else "cuCtxSynchronize"] = Result.ILLEGAL_ADDRESS
    assert running.done()
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        running.wait()


def test_export_and_open(opened: tuple[GpuDriver, Any]) -> None:
    driver, fake = opened
    buffer = driver.shared("x", 64)
    buffer.tensor[5] = 9
    handle = driver.export(buffer)
    assert len(handle) == 64
    other = driver.open("peer", handle, 64)
    assert other.tensor[5] == 9
    other.close()
    assert len(fake.named("hipIpcCloseMemHandle" if driver.name == "hip" else "cuIpcCloseMemHandle")) == 1
    with pytest.raises(DriverError, match="was not allocated here"):
        driver.export(other)
    with pytest.raises(DriverError, match="has 3 bytes instead of 64"):
        driver.open("peer", b"abc", 64)


def test_close_gives_everything_back(opened: tuple[GpuDriver, Any], tmp_path: Path) -> None:
    driver, fake = opened
    loaded(driver, tmp_path)
    driver.shared("x", 64)
    driver.shared("y", 64)
    driver.close()
    assert not fake.memory
    assert len(fake.named("hipModuleUnload" if driver.name == "hip" else "cuModuleUnload")) == 1
    driver.close()


def test_errors_name_what_failed(opened: tuple[GpuDriver, Any], tmp_path: Path) -> None:
    driver, fake = opened
    module = loaded(driver, tmp_path)
    function = module.function("decode")
    launch = LAUNCH[driver.name]
    fake.fail[launch] = Result.INVALID
    with pytest.raises(DriverError, match=rf"{launch} failed: INVALID \(what the library says\)"):
        driver.launch(function, 1, 1, 256)
    fake.fail["hipDeviceSynchronize" if driver.name == "hip" else "cuCtxSynchronize"] = Result.ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match="ynchronize failed: ILLEGAL_ADDRESS"):
        driver.synchronize()
    fake.fail["hipModuleGetFunction" if driver.name == "hip" else "cuModuleGetFunction"] = Result.NOT_FOUND
    with pytest.raises(DriverError, match=r"k\.bin has no kernel 'other'"):
        module.function("other")
    fake.fail["hipModuleLoadData" if driver.name == "hip" else "cuModuleLoadData"] = Result.INVALID
    with pytest.raises(DriverError, match=r"The compiled kernel .*k\.bin cannot be loaded"):
        loaded(driver, tmp_path)


def test_refuses_an_artifact_for_another_device(opened: tuple[GpuDriver, Any], tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="is for gfx950, and the device is"):
        opened[0].load(Artifact(tmp_path / "k", "gfx950", "", 0, True, ""))
    with pytest.raises(DriverError, match="cannot be read"):
        opened[0].load(Artifact(tmp_path / "k", opened[0].arch, "", 0, True, ""))


def test_constants_are_checked(opened: tuple[GpuDriver, Any]) -> None:
    driver, _ = opened
    with pytest.raises(DriverError, match="on cpu was handed to the kernels of cuda:1"):
        driver.constant(torch.zeros(4))
    driver.device = torch.device("cpu")
    tensor = torch.zeros(4, 6)
    assert driver.constant(tensor) == tensor.data_ptr()
    with pytest.raises(DriverError, match="not contiguous"):
        driver.constant(tensor.t())


@pytest.mark.parametrize(
    ("arch", "units", "count"),
    [
        ("gfx942", 304, 8),
        ("gfx942", 228, 6),
        ("gfx942", 80, 4),
        ("gfx942", 38, 1),
        ("gfx950", 256, 8),
        ("gfx950", 128, 4),
        ("gfx950", 3, 1),
    ],
)
def test_xcds_where_the_runtime_does_not_tell(
    arch: str, units: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = open_driver("hip", monkeypatch, arch=arch, units=units, xccs=0)
    assert driver.facts().xcds == count
    assert driver.arch == arch


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("hip", {"devices": 0}, "sees no device"),
        ("hip", {"fail": {"hipGetDeviceCount": Result.NO_DEVICE}}, "No AMD GPU was found"),
        ("hip", {"fail": {"hipGetDeviceCount": Result.INVALID}}, "hipGetDeviceCount failed: INVALID"),
        ("hip", {"devices": 1}, "There is no GPU number 1"),
        ("hip", {"arch": "gfx90a:xnack-"}, "GPU 1 is a gfx90a; kernels exist for gfx942 and gfx950"),
        ("hip", {"cooperative": 0}, "refuses cooperative launches"),
        ("cuda", {"devices": 0}, "sees no device"),
        ("cuda", {"fail": {"cuInit": Result.INVALID}}, "cuInit failed: INVALID"),
        ("cuda", {"devices": 1}, "There is no GPU number 1"),
        ("cuda", {"major": 8, "minor": 6}, "has compute capability 8.6; kernels exist for 9.0"),
        ("cuda", {"cooperative": 0}, "refuses cooperative launches"),
    ],
)
def test_devices_that_cannot_be_used(
    kind: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DriverError, match=message):
        open_driver(kind, monkeypatch, **changes)


@pytest.mark.parametrize(("kind", "call"), [("hip", "hipGetDeviceCount"), ("cuda", "cuInit")])
def test_a_library_that_does_not_load(kind: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("failed to dlopen 'libsomething.so'")

    with pytest.raises(DriverError, match=r"No (AMD|NVIDIA) GPU can be used.*failed to dlopen"):
        open_driver(kind, monkeypatch, **{call: broken})


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "hip", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DriverError, match="pip install hip-python"):
        hip_module.HipDriver()
    with pytest.raises(DriverError, match="pip install cuda-bindings"):
        cuda_module.CudaDriver()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_device_here() -> None:
    pytest.importorskip("hip")
    with pytest.raises(DriverError, match="GPU"):
        pick("hip")
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(DriverError, match="GPU"):
        pick("cuda")


def test_torch_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DriverError, match="not a ROCm build"):
        hip_module.HipDriver(bindings=FakeHip(hip_arity()))
    with pytest.raises(DriverError, match="not a CUDA build"):
        cuda_module.CudaDriver(bindings=FakeCuda(cuda_arity()))


def test_which_driver_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kind_for("auto") == "host"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert kind_for("auto") == "hip"
    monkeypatch.setattr(torch.version, "hip", None)
    assert kind_for("auto") == "cuda"
    assert kind_for("host") == "host"
    with pytest.raises(DriverError, match="There is no device 'tpu'; choose one of auto, host, hip, cuda"):
        pick("tpu")


@pytest.mark.parametrize(
    ("module", "fake"), [("rocm.bindings.hip", FakeHip), ("cuda.bindings.driver", FakeCuda)], ids=["hip", "cuda"]
)
def test_the_names_are_the_packages(module: str, fake: type[FakeLibrary]) -> None:
    """The constants that the stand-ins define exist in the real packages, under the same enums."""
    real = pytest.importorskip(module)
    for enum_name, names in vars(fake).items():
        if isinstance(names, SimpleNamespace):
            for name in vars(names):
                assert hasattr(getattr(real, enum_name), name), f"{enum_name}.{name}"


def test_device_memory_speaks_the_array_protocol() -> None:
    described = DeviceMemory(4096, 12).__cuda_array_interface__
    assert described == {
        "data": (4096, False), "shape": (12,), "strides": None, "typestr": "|u1", "version": 3,
    }  # fmt: skip
