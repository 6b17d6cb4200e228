"""What this machine has for rocmega, and what each missing piece costs.

`collect` never raises, whatever is broken, and imports torch only if it is a build for GPUs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from rocmega.drivers.gpu import GpuDriver

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    group: system, compilers, torch, devices, ranks or packages. detail: what was found, or why nothing was. cost: what
    the user cannot do without it, and what to do; empty if nothing is missing. facts: the same for machines.
    """

    group: str
    name: str
    state: State
    detail: str
    cost: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


COMPILER_COST = {
    "host": "the CPU target cannot be built: without a GPU the mega-task does not run, only the standard path",
    "gfx942": "kernels for MI300X and MI325X cannot be built or inspected: decoding there falls back to PyTorch",
    "gfx950": "kernels for MI350X and MI355X cannot be built or inspected: decoding there falls back to PyTorch",
    "sm_90": "kernels for NVIDIA H100 and H200 cannot be built: decoding there falls back to PyTorch",
}
PACKAGES = {
    "safetensors": ("checkpoints cannot be read", "pip install safetensors"),
    "transformers": ("`rocmega demo` has nothing to compare with", "pip install 'rocmega[demo]'"),
    "tokenizers": ("prompts and results are token ids only, no text", "pip install 'rocmega[demo]'"),
    "triton": ("torch.compile cannot speed up the standard path on GPUs", "pip install triton"),
    "hip-python": ("the mega-task does not run on AMD GPUs", "pip install 'rocmega[amd]'"),
    "cuda-bindings": ("the mega-task does not run on NVIDIA GPUs", "pip install 'rocmega[cuda]'"),
}
KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def collect() -> list[Finding]:
    """Everything that `rocmega doctor` shows, in its order."""
    probes: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("system", _system),
        ("compilers", _compilers),
        ("torch", _torch),
        ("devices", _devices),
        ("ranks", _ranks),
        ("packages", _packages),
    )
    found = []
    for group, probe in probes:
        try:
            for finding in probe():
                found.append(finding)
        except Exception as error:  # a diagnosis must not need one itself
            found.append(Finding(group, group, "broken", _reason(error), "this part of the diagnosis is missing"))
    return found


def table(findings: Sequence[Finding]) -> Table:
    """The findings for people; print it with rich."""
    from rich.markup import escape
    from rich.table import Table

    made = Table("", "found", "without it", title="rocmega doctor", title_justify="left")
    colors = {"ok": "green", "missing": "yellow", "broken": "red"}
    group = ""
    for finding in findings:
        if finding.group != group:
            made.add_section()
            group = finding.group
        name = f"[{colors[finding.state]}]{escape(finding.name)}[/]"
        made.add_row(name, escape(finding.detail), escape(finding.cost))
    return made


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if text else type(error).__name__


def _system() -> Iterator[Finding]:
    from rocmega import __version__
    from rocmega.toolchain import store

    python = platform.python_version()
    yield Finding("system", "rocmega", "ok", __version__, facts={"version": __version__})
    yield Finding("system", "Python", "ok", f"{python} ({sys.executable})", facts={"version": python})
    place = store.root()
    existing = next(p for p in (place, *place.parents) if p.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        yield Finding("system", "kernel cache", "ok", str(place), facts={"path": str(place)})
    else:
        cost = "kernels cannot be compiled: set ROCMEGA_CACHE to a folder that can be written"
        yield Finding("system", "kernel cache", "broken", f"{place} cannot be written", cost, {"path": str(place)})


def _compilers() -> Iterator[Finding]:
    from rocmega.toolchain import TARGETS, search

    for target in TARGETS:
        result = search(target)
        name = "CPU (host)" if target == "host" else target
        if result.found is not None:
            facts = {"target": target, "version": result.found.version, "command": " ".join(result.found.command)}
            yield Finding("compilers", name, "ok", str(result.found), facts=facts)
        else:
            cost = f"{COMPILER_COST[target]}. {result.install}"
            yield Finding("compilers", name, "missing", f"tried: {'; '.join(result.tried)}", cost, {"target": target})


@dataclass(frozen=True)
class TorchBuild:
    """From torch's version file: importing it takes seconds."""

    version: str
    cuda: str | None
    hip: str | None

    @property
    def kind(self) -> str:
        """`hip`, `cuda` or `cpu`."""
        return "hip" if self.hip else "cuda" if self.cuda else "cpu"


def torch_build() -> TorchBuild | None:
    """What kind of torch is installed; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()

    def value(name: str) -> str | None:
        match = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return match[1] if match else None

    return TorchBuild(value("__version__") or importlib.metadata.version("torch"), value("cuda"), value("hip"))


def _torch() -> Iterator[Finding]:
    build = torch_build()
    if build is None:
        yield Finding("torch", "PyTorch", "missing", "not installed", "nothing runs: pip install torch")
        return
    facts = {"version": build.version, "build": build.kind, "cuda": build.cuda, "hip": build.hip}
    if build.kind == "cpu":
        gpus = _gpus_in_sight()
        seen = f"; this machine has {', '.join(gpus)}, which it cannot use" if gpus else ""
        cost = "GPUs are not used: install the ROCm or CUDA build from pytorch.org"
        state: State = "missing" if gpus else "ok"
        yield Finding("torch", "PyTorch", state, f"{build.version}, for the CPU{seen}", cost if gpus else "", facts)
    else:
        detail = f"{build.version}, for {'ROCm' if build.hip else 'CUDA'} {build.hip or build.cuda}"
        yield Finding("torch", "PyTorch", "ok", detail, facts=facts)


@dataclass(frozen=True)
class KfdGpu:
    """A GPU as the AMD kernel driver describes it, without any library."""

    arch: str
    compute_units: int


def kfd_gpus(nodes: Path | None = None) -> list[KfdGpu]:
    """AMD GPUs that the kernel driver knows."""
    found = []
    root = KFD if nodes is None else nodes
    for path in sorted(root.glob("*/properties")):
        try:
            words = dict(line.split(None, 1) for line in path.read_text().splitlines() if " " in line)
            version, simds = int(words["gfx_target_version"]), int(words["simd_count"])
            per_unit = int(words.get("simd_per_cu", "4")) or 4
        except (OSError, ValueError, KeyError):
            continue
        if version and simds:
            # 90402 is gfx942: major, two digits of minor, two of stepping, the last two in hexadecimal.
            arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            found.append(KfdGpu(arch, simds // per_unit))
    return found


def _gpus_in_sight() -> list[str]:
    """GPUs by the kernel drivers' files, for people whose libraries do not see them."""
    amd = [f"an AMD GPU ({gpu.arch}, {gpu.compute_units} compute units)" for gpu in kfd_gpus()]
    nvidia = ["an NVIDIA GPU" for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return amd + nvidia


def _devices() -> Iterator[Finding]:
    yield _cpu()
    build = torch_build()
    if build is None or build.kind == "cpu":
        gpus = _gpus_in_sight()
        cost = "the mega-task runs on the CPU target, which checks it but is slow"
        detail = f"{', '.join(gpus)}, without a PyTorch that uses it" if gpus else "none in sight"
        yield Finding("devices", "GPU", "missing", detail, cost, {"kind": "gpu", "in_sight": gpus})
        return
    import torch

    if not torch.cuda.is_available():
        detail = "PyTorch sees none"
        if build.kind == "hip" and Path("/dev/kfd").exists() and not os.access("/dev/kfd", os.R_OK | os.W_OK):
            detail += "; /dev/kfd is there but may not be opened: add the user to the groups render and video"
        yield Finding("devices", "GPU", "missing", detail, "the mega-task runs on the CPU target, which is slow")
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(build.kind, index)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{platform.machine()}, {cores} cores, {memory / 2**30:.0f} GiB"
    facts = {"kind": "cpu", "machine": platform.machine(), "cores": cores, "memory_bytes": memory}
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        return Finding("devices", "CPU", "broken", detail, "the CPU target has no context switch for it", facts)
    return Finding("devices", "CPU", "ok", detail, facts=facts)


def _gpu(kind: str, index: int) -> Finding:
    """A GPU through the driver that would run kernels on it."""
    import torch

    name, driver = f"GPU {index}", None
    try:
        driver = _open(kind, index)
        facts = driver.facts()
        peers = [j for j in range(torch.cuda.device_count()) if j != index and _peers(index, j)]
        ipc = _can_export(driver)
        detail = (
            f"{facts.name} ({facts.arch}), {facts.compute_units} compute units, {facts.memory_bytes / 2**30:.0f} GiB, "
            f"{facts.lds_bytes >> 10} KB LDS, {facts.xcds} XCDs; IPC {'works' if not ipc else 'fails: ' + ipc}; "
            f"peers: {', '.join(map(str, peers)) or 'none'}"
        )
        cost = "several processes cannot share its memory: one GPU only" if ipc else ""
        values = {"kind": kind, "index": index, **asdict(facts), "ipc": not ipc, "peers": peers}
        return Finding("devices", name, "broken" if ipc else "ok", detail, cost, values)
    except Exception as error:  # of the libraries, too
        cost = "the mega-task does not run on it: decoding there falls back to PyTorch"
        return Finding("devices", name, "broken", _reason(error), cost, {"kind": kind, "index": index})
    finally:
        if driver is not None:
            driver.close()


def _ranks() -> Iterator[Finding]:
    """What would keep several processes from sharing a model."""
    from rocmega.parallel import traps

    found = [*traps.of_environment(os.environ, [(gpu.arch, gpu.compute_units) for gpu in kfd_gpus()])]
    found += traps.of_shared_memory()
    build = torch_build()
    if build is not None and build.kind != "cpu":
        import torch

        if torch.cuda.device_count() > 1:
            driver = _open(build.kind, 0)
            try:
                found.append(traps.of_handles(driver, 1))
            finally:
                driver.close()
    for trap in found:
        yield Finding("ranks", trap.name, "broken" if trap.cost else "ok", trap.detail, trap.cost)


def _open(kind: str, index: int) -> GpuDriver:
    if kind == "hip":
        from rocmega.drivers.hip import HipDriver

        return HipDriver(index)
    from rocmega.drivers.cuda import CudaDriver

    return CudaDriver(index)


def _peers(one: int, other: int) -> bool:
    import torch

    return bool(torch.cuda.can_device_access_peer(one, other))


def _can_export(driver: GpuDriver) -> str:
    """Why memory cannot be handed to another process; empty if it can."""
    try:
        with driver.shared("doctor", 4096) as buffer:
            driver.export(buffer)
    except Exception as error:
        return _reason(error)
    return ""


@functools.cache
def _needed(package: str) -> bool:
    """Whether a package for one kind of GPU is of use here."""
    if package == "hip-python":
        return bool(kfd_gpus())
    if package == "cuda-bindings":
        return any("NVIDIA" in gpu for gpu in _gpus_in_sight())
    return True


def _packages() -> Iterator[Finding]:
    for package, (cost, install) in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            remedy = f"{cost}: {install}" if _needed(package) else f"{cost}; none is in sight here"
            yield Finding("packages", package, "missing", "not installed", remedy)
        else:
            yield Finding("packages", package, "ok", version, facts={"version": version})
