"""Which compilers are found, and what the real ones make."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

from rocmega.errors import ToolchainError
from rocmega.toolchain import TARGETS, Unit, assembly, compile, compilers, find, search
from rocmega.toolchain.compilers import zig

DEVICE = """
#include "generated.h"
extern "C" __attribute__((global)) void scale(float* p) { p[__builtin_amdgcn_workitem_id_x()] *= SCALE; }
"""


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PATH", "ROCM_PATH", "HIP_PATH", "ROCM_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers, "zig", lambda: None)
    monkeypatch.setattr(compilers, "rocm_folders", lambda: [Path("/opt/rocm-that-is-not-there")])
    # An absolute path that exists on machines with CUDA.
    which = compilers._which
    monkeypatch.setattr(compilers, "_which", lambda p: None if p.startswith("/usr/local/cuda") else which(p))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "host",
            ["c++ (PATH)", "g++", "clang++", "the Python package ziglang", "pip install ziglang", "ROCMEGA_HOSTCXX"],
        ),
        (
            "gfx942",
            ["/opt/rocm-that-is-not-there/llvm/bin/amdclang++", "amdclang++ (PATH)", "hipcc", "ziglang", "ROCm"],
        ),
        ("gfx950", ["pip install ziglang", "ROCMEGA_AMDCLANG"]),
        ("sm_90", ["nvcc (CUDA toolkit)", "/usr/local/cuda/bin/nvcc", "ROCMEGA_NVCC"]),
    ],
)
def test_no_compiler_lists_what_was_tried(
    target: str, words: list[str], nothing_installed: None, tmp_path: Path, cache: Path
) -> None:
    source = tmp_path / "k.hip"
    source.write_text("")
    with pytest.raises(ToolchainError) as caught:
        compile(Unit("k", source), target)
    message = str(caught.value)
    assert message.startswith(f"No compiler for {target} was found. Tried: ")
    assert [w for w in words if w not in message] == []
    assert not cache.exists()
    assert search(target).found is None


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


FAKE_CLANG = (
    'case "$*" in *--version*) echo "AMD clang version 18.0 (rocm 6.2)";; *supported-cpus*) echo "  gfx942" >&2;; esac'
)


def test_rocm_is_preferred(nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang = script(tmp_path / "rocm/llvm/bin/amdclang++", FAKE_CLANG)
    linker = script(tmp_path / "rocm/llvm/bin/ld.lld", "")
    monkeypatch.setattr(compilers, "rocm_folders", lambda: [tmp_path / "rocm"])
    found = find("gfx942")
    assert (found.command, found.linker, found.origin) == ((str(clang),), (str(linker),), "ROCm")
    assert found.version == "AMD clang version 18.0 (rocm 6.2)"
    # Too old for gfx950: the next candidate is tried, and the reason kept.
    with pytest.raises(ToolchainError, match=r"AMD clang version 18.0 \(rocm 6.2\) does not know gfx950"):
        find("gfx950")
    linker.unlink()
    with pytest.raises(ToolchainError, match=r"no ld\.lld beside it"):
        find("gfx942")


def test_hipcc_leads_to_its_clang(nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "rocm/bin/hipcc", "exit 1")
    clang = script(tmp_path / "rocm/lib/llvm/bin/clang++", FAKE_CLANG)
    script(tmp_path / "rocm/lib/llvm/bin/ld.lld", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/rocm/bin:/bin")
    assert find("gfx942").command == (str(clang),)


def test_settings_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = script(tmp_path / "mine", 'echo "my g++ 9"')
    monkeypatch.setenv("ROCMEGA_HOSTCXX", f"{mine} -static-libgcc")
    found = find("host")
    assert (found.command, found.version, found.origin) == (
        (str(mine), "-static-libgcc"), "my g++ 9", "ROCMEGA_HOSTCXX",
    )  # fmt: skip
    monkeypatch.setenv("ROCMEGA_HOSTCXX", str(tmp_path / "missing"))
    with pytest.raises(ToolchainError, match=r"missing \(ROCMEGA_HOSTCXX\): not found"):
        find("host")
    monkeypatch.delenv("ROCMEGA_HOSTCXX")
    monkeypatch.setenv("CXX", str(mine))
    assert find("host").origin == "CXX"
    monkeypatch.setenv("ROCMEGA_AMDCLANG", str(script(tmp_path / "clang++", FAKE_CLANG)))
    monkeypatch.setattr(compilers, "_lld_beside", lambda path: "/x/lld")
    assert find("gfx942").origin == "ROCMEGA_AMDCLANG"
    monkeypatch.setenv("ROCMEGA_NVCC", str(script(tmp_path / "nvcc", 'echo "release 11.2, sm_80"')))
    with pytest.raises(ToolchainError, match="does not know sm_90"):
        find("sm_90")


def test_a_broken_program_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", "exit 3")))
    result = search("host")
    assert any("broken (CXX): not found, or does not run" in t for t in result.tried)


def real(target: str) -> None:
    if search(target).found is None:
        pytest.skip(f"no compiler for {target}")


@pytest.fixture
def device_unit(tmp_path: Path) -> Unit:
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "k.hip").write_text(DEVICE)
    return Unit("k", tmp_path / "k" / "k.hip", headers={"generated.h": "#define SCALE 3.f\n"})


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_amd(device_unit: Unit, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real(target)
    artifact = compile(device_unit, target)
    assert artifact.path.name == "k.hsaco"
    image = artifact.path.read_bytes()
    assert image[:4] == b"\x7fELF"
    assert int.from_bytes(image[16:18], "little") == 3  # a shared object: what the loaders take
    assert int.from_bytes(image[18:20], "little") == 224  # AMDGPU
    text = assembly(device_unit, target)
    assert f'.amdgcn_target "amdgcn-amd-amdhsa--{target}"' in text
    assert re.search(r"global_load_dword v\d", text)
    # The same bytes wherever it is built: nothing of the place or time is in them.
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path / "another" / "cache"))
    again = compile(device_unit, target)
    assert not again.cached
    assert again.path.read_bytes() == image


def test_nvidia(tmp_path: Path) -> None:
    real("sm_90")
    (tmp_path / "k.hip").write_text('extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 3; }')
    unit = Unit("k", tmp_path / "k.hip")
    artifact = compile(unit, "sm_90")
    assert artifact.path.name == "k.cubin"
    assert int.from_bytes(artifact.path.read_bytes()[18:20], "little") == 190  # CUDA
    assert "registers" in artifact.log
    with pytest.raises(ToolchainError, match="Assembly text"):
        assembly(unit, "sm_90")


def test_host(unit: Unit) -> None:
    real("host")
    library = ctypes.CDLL(str(compile(unit, "host").path))
    assert library.answer() == 42


@pytest.mark.skipif(zig() is None, reason="ziglang is not installed")
def test_host_by_zig(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer's case: no C++ compiler, no C++ library."""
    monkeypatch.setenv("ROCMEGA_HOSTCXX", "zig")
    artifact = compile(unit, "host")
    assert "ziglang" in artifact.compiler
    assert artifact.seconds < 60
    library = ctypes.CDLL(str(artifact.path), os.RTLD_NOW)
    assert library.answer() == 42


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "sm_90"])
def test_errors_in_the_source(target: str, tmp_path: Path, cache: Path) -> None:
    real(target)
    (tmp_path / "broken.hip").write_text('#include "generated.h"\nint f() { return undeclared_name; }\n')
    with pytest.raises(ToolchainError) as caught:
        compile(Unit("broken", tmp_path / "broken.hip", headers={"generated.h": "// made\n"}), target)
    message = str(caught.value)
    assert f"{tmp_path}/broken.hip:2:" in message  # the user's file, not the copy that was compiled
    assert "undeclared_name" in message
    log = Path(re.search(r"The full log is in (.*)\.$", message)[1])
    assert "// made" in log.read_text()
    assert not list(cache.glob(f"{target}/*"))
    assert not list(cache.glob("tmp/*"))
