"""The compiler commands for each target: flags that matter for the result, and the steps that make the file."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from rocmega.toolchain.compilers import Compiler, family
from rocmega.toolchain.unit import Snapshot

EXTENSION = {"host": "so", "amd": "hsaco", "nvidia": "cubin"}
STYLES = {"host": ("gcc", "clang", "zig"), "amd": ("clang",), "nvidia": ("nvcc",)}  # whose flags differ
INCLUDES = ("-Iinclude", "-Isrc/hip", "-Isrc/models")
# Host results must equal the GPU's in every bit, so nothing may fuse a multiply and an add on its own.
COMMON = ("-std=c++17", "-ffp-contract=off")
# Kernels of the CPU target: with -O3, g++ takes half as long again, for the same speed. -O1 would take half as long and
# cost 30 % of the speed.
HOST_KERNEL, HOST_RUNTIME = "-O2", "-O3"  # the later one on a command line counts


@functools.cache
def host_flags(style: str) -> tuple[str, ...]:
    """For the processors of the last ten years: without these each fused multiply-add is a call into the C library."""
    if platform.machine() in ("aarch64", "arm64"):
        # Zig links without the library that holds the out-of-line atomics.
        return ("-mno-outline-atomics",) if style == "zig" else ()
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    if not {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"} <= words:
        return ("-mcpu=x86_64",) if style == "zig" else ()
    if style == "zig":
        return ("-mcpu=x86_64_v3",)
    return ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt", "-mmovbe")  # known before -march=x86-64-v3 was


def flags(target: str, style: str) -> list[str]:
    """Everything but paths: part of the cache key."""
    kind = family(target)
    if kind == "amd":
        return [*COMMON, "-O3", "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output",
                f"--offload-arch={target}", "-nogpulib", "-nogpuinc", "-fuse-cuid=none"]  # fmt: skip
    if kind == "nvidia":
        return ["-std=c++17", f"-arch={target}", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin", "-x", "cu"]
    return [*COMMON, HOST_KERNEL, "-Wall", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
            *host_flags(style), *(["-fno-sanitize=all"] if style == "zig" else [])]  # fmt: skip


def steps(snapshot: Snapshot, target: str, compiler: Compiler) -> list[list[str]]:
    """The commands, run in a folder that holds `src/` and `include/`; they leave `<name>.<extension>`.

    All paths are relative, so that the result does not depend on where it was built.
    """
    kind, unit = family(target), snapshot.unit
    compile_ = [*compiler.command, *flags(target, compiler.style), *INCLUDES, *unit.define_flags()]
    source, out = f"src/{snapshot.source}", f"{unit.name}.{EXTENSION[kind]}"
    if kind == "amd":
        # Through assembly text: it is what the inspection reads, and it is assembled unchanged.
        text, item = f"{unit.name}.s", f"{unit.name}.o"
        assemble = [*compiler.command, "--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-x", "assembler", "-c"]
        link = [*compiler.linker, *(["-flavor", "gnu"] if compiler.linker[-1].endswith("/lld") else [])]
        return [
            [*compile_, "-S", source, "-o", text],
            [*assemble, text, "-o", item],
            [*link, "-shared", item, "-o", out],
        ]
    if kind == "nvidia":
        return [[*compile_, source, "-o", out]]
    objects = [f"{unit.name}.o", *runtime_objects(snapshot.host_runtime())]
    linked = ["-shared", *objects, "-o", out]
    # `zig cc -shared` would first build its runtime library for ten seconds; nothing of it is needed.
    bare = compiler.style == "zig" and platform.system() == "Linux"
    link = [*compiler.linker, "-z", "now"] if bare else [*compiler.command, *flags(target, compiler.style)]
    return [[*compile_, "-x", "c++", "-c", source, "-o", f"{unit.name}.o"], [*link, *linked]]


def runtime_objects(runtime: Snapshot | None) -> list[str]:
    """What becomes of the runtime's sources, beside the unit's own object."""
    found = [] if runtime is None else [name for name in runtime.files if name.endswith(".cpp")]
    return [f"runtime/{Path(name).stem}.o" for name in sorted(found)]


def runtime_steps(runtime: Snapshot, compiler: Compiler) -> list[list[str]]:
    """The commands that make `runtime_objects`."""
    compile_ = [*compiler.command, *flags("host", compiler.style), HOST_RUNTIME, *INCLUDES, "-x", "c++", "-c"]
    sources = sorted(f"src/{name}" for name in runtime.files if name.endswith(".cpp"))
    objects = runtime_objects(runtime)
    return [[*compile_, source, "-o", item] for source, item in zip(sources, objects, strict=True)]
