"""One report per kernel of a compiled artifact."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rocmega.errors import ToolchainError
from rocmega.inspect.assembly import count, functions, reachable
from rocmega.inspect.elf import Elf
from rocmega.toolchain import Artifact, Unit, compile
from rocmega.toolchain.compilers import family

LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024, "sm_90": 227 * 1024}
INSTRUCTION_CACHE = 64 * 1024  # shared by two compute units
VECTOR_REGISTERS, MOST_WAVES, SIMDS = 512, 8, 4


@dataclass
class KernelReport:
    """A kernel's resources and instructions.

    vgpr and agpr are architectural and accumulation registers; on CDNA they share 512 per lane and SIMD, so
    waves_per_simd follows from their sum. sgpr_spills count scalar registers parked in lanes of vector registers.
    load_widths, lds_widths, mfma and scoped map an instruction (with its cache bits in scoped) to how often it stands
    in the code. wbl2_waited counts the write-backs of L2 that a wait follows at once; it must equal wbl2.
    The counts include the functions the kernel calls. On sm_90, vgpr is registers a thread, and vgpr_spills bytes.
    """

    name: str
    arch: str
    vgpr: int = 0
    agpr: int = 0
    sgpr: int = 0
    lds_bytes: int = 0
    scratch_bytes: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    waves_per_simd: int = 0
    blocks_per_cu: int = 0
    threads: int = 0
    dynamic_stack: bool = False
    mfma: dict[str, int] = field(default_factory=dict)
    load_widths: dict[str, int] = field(default_factory=dict)
    lds_widths: dict[str, int] = field(default_factory=dict)
    scoped: dict[str, int] = field(default_factory=dict)
    flat_accesses: int = 0
    scratch_accesses: int = 0
    wbl2: int = 0
    wbl2_waited: int = 0
    unwaited_lines: list[int] = field(default_factory=list)
    instructions: int = 0
    code_bytes: int = 0
    functions: list[str] = field(default_factory=list)

    @property
    def lds_limit(self) -> int:
        """The LDS of one compute unit."""
        return LDS_BYTES[self.arch]

    @property
    def icache_share(self) -> float:
        """Code size against the instruction cache: above 1 it does not fit."""
        return self.code_bytes / INSTRUCTION_CACHE

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {**asdict(self), "lds_limit": self.lds_limit, "icache_share": round(self.icache_share, 4)}


def report(unit: Unit, target: str, *, progress: Callable[[str], None] | None = None) -> list[KernelReport]:
    """Compiles a unit for a GPU target and reports on its kernels. Raises ToolchainError if it does not compile."""
    artifact = compile(unit, target, progress=progress)
    text = artifact.assembly_path.read_text() if artifact.assembly_path else None
    return inspect_code_object(artifact, text)


def inspect_code_object(artifact: Artifact, assembly: str | None = None) -> list[KernelReport]:
    """Reports on the kernels of a compiled artifact, in the order they have in it.

    assembly: the text it was assembled from (AMD; default: the file beside the artifact). Without it the instruction
    counts are empty.
    """
    kind = family(artifact.target)
    if kind == "host":
        raise ToolchainError("The host target has no kernels to inspect: choose gfx942, gfx950 or sm_90.")
    if kind == "nvidia":
        return _nvidia(artifact)
    if assembly is None and artifact.assembly_path is not None:
        assembly = artifact.assembly_path.read_text()
    return _amd(artifact, assembly or "")


def _amd(artifact: Artifact, assembly: str) -> list[KernelReport]:
    elf = Elf(artifact.path)
    metadata = elf.amd_metadata()
    symbols, bodies = elf.symbols(), functions(assembly)
    target = str(metadata.get("amdhsa.target", "")).partition("--")[2].partition(":")[0] or artifact.target
    reports = []
    for facts in metadata.get("amdhsa.kernels", []):
        name = facts[".name"]
        called = reachable(name, bodies) or [name]
        counts = count([bodies[f] for f in called if f in bodies])
        total, agpr = facts[".vgpr_count"], facts.get(".agpr_count", 0)
        reports.append(
            KernelReport(
                name=name,
                arch=target,
                vgpr=_architectural(assembly, name, total, agpr),
                agpr=agpr,
                sgpr=facts[".sgpr_count"],
                lds_bytes=facts[".group_segment_fixed_size"],
                scratch_bytes=facts[".private_segment_fixed_size"],
                vgpr_spills=facts.get(".vgpr_spill_count", 0),
                sgpr_spills=facts.get(".sgpr_spill_count", 0),
                waves_per_simd=waves_per_simd(total, facts[".sgpr_count"]),
                blocks_per_cu=_blocks_per_cu(target, facts),
                threads=facts[".max_flat_workgroup_size"],
                dynamic_stack=facts.get(".uses_dynamic_stack", False),
                code_bytes=sum(symbols[f][1] for f in called if f in symbols),
                functions=called,
                **vars(counts),
            )
        )
    return reports


def _architectural(assembly: str, name: str, total: int, agpr: int) -> int:
    """Architectural registers: the total counts from the accumulation registers' start, which is rounded up to 4."""
    exact = re.search(rf"^\s*\.set {re.escape(name)}\.num_vgpr, (\d+)", assembly, re.MULTILINE)
    return int(exact[1]) if exact else total - agpr


def waves_per_simd(vector_registers: int, scalar_registers: int) -> int:
    """How many waves of a kernel fit on a SIMD of gfx942 or gfx950, by registers alone."""
    by_vector = VECTOR_REGISTERS // max(8, (vector_registers + 7) // 8 * 8)
    by_scalar = MOST_WAVES if scalar_registers <= 100 else 7
    return min(MOST_WAVES, by_vector, by_scalar)


def _blocks_per_cu(target: str, facts: dict[str, Any]) -> int:
    """Blocks that fit on a compute unit by registers, waves and LDS. 0: not one fits."""
    waves = -(-facts[".max_flat_workgroup_size"] // facts.get(".wavefront_size", 64))
    per_simd = -(-waves // SIMDS)
    by_waves = waves_per_simd(facts[".vgpr_count"], facts[".sgpr_count"]) // per_simd
    lds = facts[".group_segment_fixed_size"]
    return min(by_waves, LDS_BYTES[target] // lds) if lds else by_waves


def _nvidia(artifact: Artifact) -> list[KernelReport]:
    """From what ptxas said while it compiled (-v), with the instructions of nvdisasm where that is installed."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<spill>\d+) bytes spill stores.*?"
        r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    sizes = {s.name.removeprefix(".text."): s.size for s in Elf(artifact.path).sections if s.name.startswith(".text.")}
    reports = []
    for match in pattern.finditer(artifact.log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        names = _sass(artifact.path, match["name"])
        reports.append(
            KernelReport(
                name=match["name"],
                arch=match["arch"].rstrip("a"),
                vgpr=int(match["registers"]),
                lds_bytes=int(shared[1]) if shared else 0,
                scratch_bytes=int(match["stack"]),
                vgpr_spills=int(match["spill"]),
                mfma={n: c for n, c in names.items() if re.match(r"[HIQ]MMA|HGMMA|QGMMA|DMMA", n)},
                load_widths={n: c for n, c in names.items() if n.startswith(("LDG", "LD."))},
                instructions=sum(names.values()),
                code_bytes=sizes.get(match["name"], 0),
                functions=[match["name"]],
            )
        )
    if not reports:
        raise ToolchainError(f"{artifact.path} came without ptxas' report; compile it here to inspect it.")
    return reports


def _sass(path: Path, kernel: str) -> Counter[str]:
    """Instruction names of a kernel in a cubin; empty without nvdisasm."""
    tool = shutil.which("nvdisasm")
    if tool is None:
        return Counter()
    done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, errors="replace")
    return sass_names(done.stdout, kernel)


def sass_names(text: str, kernel: str) -> Counter[str]:
    """Counts the instructions of a kernel in nvdisasm's text, by name with its modifiers."""
    found, inside = Counter[str](), False
    for line in text.splitlines():
        label = re.match(r"\.text\.([\w$]+):", line)
        if label:
            inside = label[1] == kernel
        match = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
        if inside and match:
            found[match[1]] += 1
    return found
