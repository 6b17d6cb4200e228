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
    "that knows the target and has ld.lld beside it.",
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
def _output(command: tuple[str, ...], stamp: float) -> str | None:
    """What a program prints; None if it does not work. stamp: the age of the program, for the cache."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def _run(command: tuple[str, ...]) -> str | None:
    return _output(command, Path(command[0]).stat().st_mtime)


def _line(command: tuple[str, ...], marker: str = "") -> str | None:
    """The first line of a program's output that has the marker."""
    lines = [line.strip() for line in (_run(command) or "").splitlines() if line.strip() and marker in line]
    return lines[0] if lines else None


def _which(program: str) -> str | None:
    """The absolute path: compilers run in a folder of their own."""
    found = shutil.which(program)
    return os.path.abspath(found) if found else None  # noqa: PTH100 - a link is not followed: clang finds its files by it


def zig() -> str | None:
    """The zig program inside the ziglang package, if that is installed."""
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("zig", "zig.exe"):
            if (Path(folder) / name).is_file():
                return str(Path(folder) / name)
    return None


def _zig_compiler(target: str) -> Compiler | str:
    path = zig()
    if path is None:
        return "the Python package ziglang: not installed"
    clang, number = _line((path, "clang", "--version"), "clang version"), _line((path, "version"))
    if clang is None or number is None:
        return f"the Python package ziglang: {path} does not run"
    command = (path, "cc") if target == "host" else (path, "clang")
    if target != "host" and not _knows(command, target):
        return f"the Python package ziglang {number}: its clang does not know {target}"
    return Compiler("zig", command, (path, "ld.lld"), f"{clang}, ziglang {number}", "ziglang")


def rocm_folders() -> list[Path]:
    """Where ROCm may be installed, most specific first; ROCm from wheels last."""
    given = [os.environ[name] for name in ("ROCM_PATH", "HIP_PATH", "ROCM_HOME") if os.environ.get(name)]
    folders = [Path(p) for p in dict.fromkeys([*given, "/opt/rocm"])]
    for package in ("_rocm_sdk_core", "_rocm_sdk_devel"):
        spec = importlib.util.find_spec(package)
        folders += [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    return folders


def _lld_beside(clang: str) -> str | None:
    """The linker that belongs to a clang: beside it, or of the same suffix (ld.lld-18) on the PATH."""
    suffix = Path(clang).name.partition("clang++")[2]
    for folder in (Path(clang).resolve().parent, Path(clang).parent):
        for name in (f"ld.lld{suffix}", "ld.lld", "lld"):
            if (folder / name).is_file():
                return str(folder / name)
    return _which(f"ld.lld{suffix}") or _which("ld.lld")


def _knows(command: tuple[str, ...], target: str) -> bool:
    """Whether a clang compiles for an AMD target: old ones lack it, and many come without AMD's back end."""
    names = _run((*command, "--target=amdgcn-amd-amdhsa", "--print-supported-cpus"))
    return names is not None and target in names.split()


def _clang_for_amd(program: str, origin: str, target: str) -> Compiler | str:
    path = _which(program)
    version = _line((path, "--version"), "clang version") if path else None
    if path is None or version is None:
        return f"{program} ({origin}): not found, or does not run"
    if not _knows((path,), target):
        return f"{program} ({origin}): {version} does not know {target}"
    linker = _lld_beside(path)
    if linker is None:
        return f"{program} ({origin}): no ld.lld beside it or on the PATH"
    return Compiler("clang", (path,), (linker,), version, origin)


def _amd_candidates(target: str) -> Iterator[Compiler | str]:
    given = os.environ.get("ROCMEGA_AMDCLANG")
    if given:
        yield _zig_compiler(target) if given == "zig" else _clang_for_amd(given, "ROCMEGA_AMDCLANG", target)
        return
    for folder in rocm_folders():
        yield _clang_in(folder, "ROCm", target)
    yield _clang_for_amd("amdclang++", "PATH", target)
    hipcc = shutil.which("hipcc")  # only calls a clang, and its own folder tells where that is
    yield _clang_in(Path(hipcc).resolve().parent.parent, "hipcc", target) if hipcc else "hipcc (PATH): not found"
    yield _zig_compiler(target)


def _clang_in(folder: Path, origin: str, target: str) -> Compiler | str:
    for relative in ("llvm/bin/amdclang++", "lib/llvm/bin/clang++", "llvm/bin/clang++"):
        if (folder / relative).is_file():
            return _clang_for_amd(str(folder / relative), origin, target)
    return f"{folder}/llvm/bin/amdclang++ ({origin}): not there"


def _nvidia_candidates(target: str) -> Iterator[Compiler | str]:
    given = os.environ.get("ROCMEGA_NVCC")
    folders = [os.environ[n] for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)] + ["/usr/local/cuda"]
    origin = "ROCMEGA_NVCC" if given else "CUDA toolkit"
    for program in [given] if given else ["nvcc", *(f"{folder}/bin/nvcc" for folder in folders)]:
        path = _which(program)
        version = _line((path, "--version"), "release") if path else None
        if path is None or version is None:
            yield f"{program} ({origin}): not found, or does not run"
        elif target not in (_run((path, "--list-gpu-code")) or "").split():
            yield f"{program} ({origin}): {version} does not know {target}"
        else:
            yield Compiler("nvcc", (path,), (), f"nvcc, {version}", origin)


def _host_candidates(target: str) -> Iterator[Compiler | str]:
    given = os.environ.get("ROCMEGA_HOSTCXX")
    if given == "zig":
        yield _zig_compiler(target)
        return
    named = [(given, "ROCMEGA_HOSTCXX")] if given else [(os.environ.get("CXX", ""), "CXX")]
    if not given:
        named += [(name, "PATH") for name in ("c++", "g++", "clang++")]
    for text, origin in named:
        if not text.strip():
            continue
        program, *options = shlex.split(text)
        path = _which(program)
        version = _line((path, *options, "--version")) if path else None
        if path is None or version is None:
            yield f"{text} ({origin}): not found, or does not run"
        else:
            yield Compiler("clang" if "clang" in version else "gcc", (path, *options), (), version, origin)
    if not given:
        yield _zig_compiler(target)


def search(target: str) -> Search:
    """Looks for a compiler for the target and says where it looked. Never raises but for an unknown target."""
    kind = family(target)
    candidates = {"host": _host_candidates, "amd": _amd_candidates, "nvidia": _nvidia_candidates}[kind](target)
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
