"""Finds the compilers: ROCm's clang, nvcc, the system's C++ compiler, and the clang inside the PyPI package ziglang."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rocmega.errors import ToolchainError

TARGETS = ("host", "gfx942", "gfx950", "sm_90")
AMD_TARGETS = ("gfx942", "gfx950")

INSTALL = {
    "host": "Install a C++ compiler (g++ or clang++), or `pip install ziglang`, or set ROCMEGA_HOSTCXX to a compiler.",
    "amd": "Install ROCm (hipcc), or `pip install ziglang` (its clang is enough), or set ROCMEGA_AMDCLANG to a clang++ "
    "18 or newer that knows amdgcn and has ld.lld beside it.",
    "nvidia": "Install the CUDA toolkit (nvcc 12 or newer), or set ROCMEGA_NVCC to its nvcc.",
}


@dataclass(frozen=True)
class Compiler:
    """A compiler and how to call it.

    style: `clang`, `gcc`, `zig` or `nvcc`. linker: for AMD targets, and for the host with zig.
    """

    style: str
    command: tuple[str, ...]
    linker: tuple[str, ...]
    version: str
    origin: str

    def __str__(self) -> str:
        return f"{self.version} ({self.origin})"


@dataclass(frozen=True)
class Search:
    """What a search for a compiler found, and everything it looked at."""

    target: str
    found: Compiler | None
    tried: tuple[str, ...]
    install: str


def family(target: str) -> str:
    """`host`, `amd` or `nvidia`; a ToolchainError for anything that is not a target."""
    if target not in TARGETS:
        raise ToolchainError(f"There is no target {target!r}; the targets are {', '.join(TARGETS)}.")
    return "host" if target == "host" else "amd" if target in AMD_TARGETS else "nvidia"


@functools.lru_cache(maxsize=64)
def _first_line(command: tuple[str, ...], marker: str, stamp: float) -> str | None:
    """The line of its output that has the marker; None if the program does not work. stamp: its age, for the cache."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if marker in line]
    return lines[0] if done.returncode == 0 and lines else None


def _version(command: tuple[str, ...], marker: str = "") -> str | None:
    path = shutil.which(command[0])
    if path is None:
        return None
    return _first_line((path, *command[1:]), marker, Path(path).stat().st_mtime)


def zig() -> str | None:
    """The zig program inside the ziglang package, if that is installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for name in ("zig", "zig.exe"):
            if (Path(folder) / name).is_file():
                return str(Path(folder) / name)
    return None


def rocm_folders() -> list[Path]:
    """Where ROCm may be installed, most specific first."""
    given = [os.environ[name] for name in ("ROCM_PATH", "HIP_PATH", "ROCM_HOME") if os.environ.get(name)]
    return [Path(p) for p in dict.fromkeys([*given, "/opt/rocm"])]


def _lld_beside(clang: str) -> str | None:
    """The linker that belongs to a clang: beside it, or of the same suffix (ld.lld-18) on the PATH."""
    found = shutil.which(clang)
    if found is None:
        return None
    suffix = Path(found).name.partition("clang++")[2]
    for folder in (Path(found).resolve().parent, Path(found).parent):
        for name in (f"ld.lld{suffix}", "ld.lld", "lld"):
            if (folder / name).is_file():
                return str(folder / name)
    return shutil.which(f"ld.lld{suffix}") or shutil.which("ld.lld")


def _clang_for_amd(clang: str, origin: str) -> Compiler | str:
    version = _version((clang, "--version"), "clang version")
    if version is None:
        return f"{clang} ({origin}): not found, or does not run"
    linker = _lld_beside(clang)
    if linker is None:
        return f"{clang} ({origin}): no ld.lld beside it or on the PATH"
    return Compiler("clang", (clang,), (linker,), version, origin)


def _zig_compiler(for_host: bool) -> Compiler | str:
    path = zig()
    if path is None:
        return "the Python package ziglang: not installed"
    clang = _version((path, "clang", "--version"), "clang version")
    number = _version((path, "version"))
    if clang is None or number is None:
        return f"the Python package ziglang: {path} does not run"
    command = (path, "cc") if for_host else (path, "clang")
    return Compiler("zig", command, (path, "ld.lld"), f"{clang}, ziglang {number}", "ziglang")


def _amd_candidates() -> Iterator[Compiler | str]:
    given = os.environ.get("ROCMEGA_AMDCLANG")
    if given:
        yield _zig_compiler(False) if given == "zig" else _clang_for_amd(given, "ROCMEGA_AMDCLANG")
        return
    for folder in rocm_folders():
        for relative in ("llvm/bin/amdclang++", "lib/llvm/bin/clang++", "llvm/bin/clang++"):
            if (folder / relative).is_file():
                yield _clang_for_amd(str(folder / relative), "ROCm")
                break
        else:
            yield f"{folder}/llvm/bin/amdclang++: not there"
    on_path = shutil.which("amdclang++")
    yield _clang_for_amd(on_path, "PATH") if on_path else "amdclang++ on the PATH: not found"
    yield _from_hipcc()
    yield _zig_compiler(False)


def _from_hipcc() -> Compiler | str:
    """What hipcc wraps: it only calls a clang, and its own folder tells where that is."""
    hipcc = shutil.which("hipcc")
    if hipcc is None:
        return "hipcc on the PATH: not found"
    root = Path(hipcc).resolve().parent.parent
    for relative in ("llvm/bin/clang++", "lib/llvm/bin/clang++", "bin/clang++"):
        if (root / relative).is_file():
            return _clang_for_amd(str(root / relative), "hipcc")
    return f"{hipcc}: no clang++ in {root}/llvm/bin or {root}/lib/llvm/bin"


def _nvidia_candidates() -> Iterator[Compiler | str]:
    given = os.environ.get("ROCMEGA_NVCC")
    folders = [os.environ[n] for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)] + ["/usr/local/cuda"]
    paths = [given] if given else ["nvcc", *(f"{folder}/bin/nvcc" for folder in folders)]
    for path in paths:
        version = _version((path, "--version"), "release")
        if version is None:
            yield f"{path}{' (ROCMEGA_NVCC)' if given else ''}: not found, or does not run"
        else:
            yield Compiler("nvcc", (path,), (), f"nvcc, {version}", "ROCMEGA_NVCC" if given else "CUDA toolkit")


def _host_candidates() -> Iterator[Compiler | str]:
    given = os.environ.get("ROCMEGA_HOSTCXX")
    if given == "zig":
        yield _zig_compiler(True)
        return
    named = [(given, "ROCMEGA_HOSTCXX")] if given else [(os.environ.get("CXX", ""), "CXX")]
    if not given:
        named += [(name, "PATH") for name in ("c++", "g++", "clang++")]
    for text, origin in named:
        command = tuple(shlex.split(text))
        if not command:
            continue
        version = _version((*command, "--version"))
        if version is None:
            yield f"{text} ({origin}): not found, or does not run"
        else:
            yield Compiler("clang" if "clang" in version else "gcc", command, (), version, origin)
    if not given:
        yield _zig_compiler(True)


def search(target: str) -> Search:
    """Looks for a compiler for the target and says where it looked. Never raises but for an unknown target."""
    kind = family(target)
    candidates = {"host": _host_candidates, "amd": _amd_candidates, "nvidia": _nvidia_candidates}[kind]()
    tried: list[str] = []
    for candidate in candidates:
        if isinstance(candidate, Compiler):
            return Search(target, candidate, tuple(tried), INSTALL[kind])
        tried.append(candidate)
    return Search(target, None, tuple(tried), INSTALL[kind])


def find(target: str) -> Compiler:
    """The compiler for the target. Raises ToolchainError that lists what was tried and what to install."""
    result = search(target)
    if result.found is None:
        raise ToolchainError(
            f"No compiler for {target} was found. Tried: {'; '.join(result.tried)}. {result.install} "
            "`rocmega doctor` shows what this machine has."
        )
    return result.found
