"""The diagnosis: complete, quick, and never an exception."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console

from rocmega import doctor
from rocmega.doctor import Finding, KfdGpu, TorchBuild, collect, kfd_gpus, table, torch_build
from rocmega.drivers.base import DeviceFacts
from rocmega.errors import DriverError
from rocmega.parallel import traps
from rocmega.toolchain import Search, compilers


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_says_what_is_here() -> None:
    found = by_name(collect())
    assert {"rocmega", "Python", "CPU (host)", "gfx942", "gfx950", "sm_90", "PyTorch", "CPU", "hip-python"} <= set(
        found
    )
    assert found["PyTorch"].facts["version"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["PyTorch"].facts["hip"] == torch.version.hip
    assert found["PyTorch"].facts["cuda"] == torch.version.cuda
    assert found["CPU"].facts["cores"] >= 1
    for finding in found.values():
        assert finding.detail, finding
        assert bool(finding.cost) == (finding.state != "ok"), finding
    json.dumps([finding.to_json() for finding in found.values()])


def test_is_quick() -> None:
    """Also the first time in a process; torch is not imported where it is a build for the CPU."""
    code = "import sys, rocmega.doctor as d; d.collect(); print('torch' in sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert time.perf_counter() - start < 10  # 3 seconds on a machine that does nothing else
    if torch.version.hip is None and torch.version.cuda is None:
        assert done.stdout.strip() == "False"


def test_a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    nothing = lambda target: Search(target, None, ("this", "that"), "Install something.")  # noqa: E731
    monkeypatch.setattr("rocmega.toolchain.search", nothing)
    monkeypatch.setattr(doctor, "torch_build", lambda: None)
    monkeypatch.setattr(doctor.importlib.metadata, "version", no_package)
    found = collect()
    names = by_name(found)
    for target in ("CPU (host)", "gfx942", "gfx950", "sm_90"):
        assert names[target].state == "missing"
        assert names[target].detail == "tried: this; that"
        assert names[target].cost.endswith("Install something.")
    assert names["PyTorch"].cost == "nothing runs: pip install torch"
    assert names["tokenizers"].state == "missing"
    assert "token ids only" in names["tokenizers"].cost
    assert all(f.cost for f in found if f.state != "ok")


def test_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> NoReturn:
        raise OSError("a very\nodd machine")

    monkeypatch.setattr(compilers, "zig", broken)
    monkeypatch.setattr(doctor, "torch_build", broken)
    monkeypatch.setattr(doctor, "kfd_gpus", broken)
    monkeypatch.setattr(doctor.importlib.metadata, "version", broken)
    monkeypatch.setattr("rocmega.toolchain.store.root", broken)
    found = collect()
    broken_groups = {f.group for f in found if f.state == "broken"}
    assert {"system", "torch", "devices", "packages"} <= broken_groups
    assert "a very odd machine" in {f.detail for f in found}


def gpu_build(monkeypatch: pytest.MonkeyPatch, kind: str, driver: Any) -> dict[str, Finding]:
    build = TorchBuild("2.99", "13.0" if kind == "cuda" else None, "7.1" if kind == "hip" else None)
    monkeypatch.setattr(doctor, "torch_build", lambda: build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(doctor, "_open", driver)
    monkeypatch.setattr(
        traps, "of_handles", lambda driver, other: traps.Trap("memory between processes", f"on {other}")
    )
    return by_name(collect())


class FakeDriver:
    closed = 0

    def __init__(self, ipc: bool) -> None:
        self.ipc = ipc

    def facts(self) -> DeviceFacts:
        return DeviceFacts("AMD Instinct MI355X", "gfx950", 256, 288 << 30, 160 << 10, 8)

    def shared(self, name: str, nbytes: int) -> Any:
        return io.BytesIO()

    def export(self, buffer: Any) -> bytes:
        if not self.ipc:
            raise DriverError("hipIpcGetMemHandle failed")
        return bytes(64)

    def close(self) -> None:
        FakeDriver.closed += 1


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver.closed = 0
    found = gpu_build(monkeypatch, "hip", lambda kind, index: FakeDriver(ipc=index == 0))
    assert found["PyTorch"].detail == "2.99, for ROCm 7.1"
    assert found["GPU 0"].state == "ok"
    assert "256 compute units, 288 GiB, 160 KB LDS, 8 XCDs; IPC works; peers: 1" in found["GPU 0"].detail
    assert found["GPU 0"].facts["compute_units"] == 256
    assert found["GPU 1"].state == "broken"
    assert "IPC fails: hipIpcGetMemHandle failed" in found["GPU 1"].detail
    assert found["GPU 1"].cost
    assert found["memory between processes"].detail == "on 1"
    assert FakeDriver.closed == 3


def test_a_gpu_that_no_kernel_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str, index: int) -> NoReturn:
        raise DriverError("GPU 0 is a gfx90a")

    found = gpu_build(monkeypatch, "hip", refuse)
    assert found["GPU 0"].detail == "GPU 0 is a gfx90a"
    assert "falls back to PyTorch" in found["GPU 0"].cost


def test_a_gpu_beside_a_torch_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "torch_build", lambda: TorchBuild("2.99+cpu", None, None))
    monkeypatch.setattr(doctor, "kfd_gpus", lambda: [KfdGpu("gfx942", 304)])
    found = by_name(collect())
    assert found["PyTorch"].state == "missing"
    assert "an AMD GPU (gfx942, 304 compute units), which it cannot use" in found["PyTorch"].detail
    assert "ROCm" in found["PyTorch"].cost


def test_amd_gpus_by_the_kernel_driver(tmp_path: Path) -> None:
    nodes = {
        "0": "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n",
        "1": "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n",
        "2": "simd_count 1024\nsimd_per_cu 4\ngfx_target_version 90500\n",
        "3": "simd_count 440\nsimd_per_cu 4\ngfx_target_version 90010\n",
        "4": "garbage\n",
    }
    for name, text in nodes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "properties").write_text(text)
    assert kfd_gpus(tmp_path) == [KfdGpu("gfx942", 304), KfdGpu("gfx950", 256), KfdGpu("gfx90a", 110)]
    assert kfd_gpus(tmp_path / "missing") == []


def test_torch_builds_by_their_version_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text(
        "__version__ = '2.9.0+rocm7.0'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.5'\n"
    )
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    assert torch_build() == TorchBuild("2.9.0+rocm7.0", None, "7.0.5")
    assert torch_build().kind == "hip"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert torch_build() is None


def test_the_table() -> None:
    console = Console(width=140, file=io.StringIO())
    console.print(table([Finding("a", "x", "ok", "[1] here"), Finding("b", "y", "missing", "no", "cannot do")]))
    text = console.file.getvalue()
    assert "[1] here" in text
    assert "cannot do" in text
