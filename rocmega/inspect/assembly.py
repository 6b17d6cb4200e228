"""Reads AMD assembly text: which instructions a kernel has, with the functions that it calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

CACHE_BITS = ("sc0", "sc1", "nt")
LOAD = re.compile(r"(global|buffer|flat|scratch)_load_")
ACCESS = re.compile(r"(global|buffer|flat)_(load|store|atomic)_")
CALLEE = re.compile(r"([A-Za-z_$.][\w$.]*)@(?:rel32|gotpcrel32)@lo")
WAITS_FOR_ALL = re.compile(r"s_waitcnt\s+(0|.*\bvmcnt\(0\).*)$")


@dataclass(frozen=True)
class Instruction:
    """`global_load_dword v1, v0, s[0:1] sc1`: its name, everything after it, and the line it is on."""

    name: str
    operands: str
    line: int

    @property
    def text(self) -> str:
        return f"{self.name} {self.operands}".rstrip()

    @property
    def cache_bits(self) -> tuple[str, ...]:
        words = self.operands.split()
        return tuple(bit for bit in CACHE_BITS if bit in words)


@dataclass
class Counts:
    """What is counted in a kernel; every key is an instruction's name, with its cache bits if it has some."""

    instructions: int = 0
    mfma: dict[str, int] = field(default_factory=dict)
    load_widths: dict[str, int] = field(default_factory=dict)
    lds_widths: dict[str, int] = field(default_factory=dict)
    scoped: dict[str, int] = field(default_factory=dict)
    flat_accesses: int = 0
    scratch_accesses: int = 0
    wbl2: int = 0
    wbl2_waited: int = 0
    unwaited_lines: list[int] = field(default_factory=list)


def functions(assembly: str) -> dict[str, list[Instruction]]:
    """Function name -> its instructions in order. Directives, labels and comments are left out."""
    found: dict[str, list[Instruction]] = {}
    declared: set[str] = set()
    current: list[Instruction] | None = None
    for number, raw in enumerate(assembly.splitlines(), 1):
        line = raw.partition(";")[0].partition("//")[0].strip()
        if not line:
            continue
        if line.startswith(".type") and "@function" in line:
            declared.add(line.split()[1].rstrip(",").partition(",")[0])
        label = re.match(r"([\w$.]+):", line)
        if label:
            if label[1] in declared:
                current = found.setdefault(label[1], [])
            elif label[1].startswith(".Lfunc_end"):
                current = None
        elif line.startswith((".section", ".amdhsa_kernel")):
            # The kernel's descriptor follows its last instruction.
            current = None
        elif current is not None and not line.startswith("."):
            name, _, operands = line.partition(" ") if " " in line else line.partition("\t")
            current.append(Instruction(name.strip(), " ".join(operands.split()), number))
    return found


def reachable(kernel: str, bodies: Mapping[str, list[Instruction]]) -> list[str]:
    """The kernel and every function it may call, itself first."""
    order, pending = [], [kernel]
    while pending:
        name = pending.pop()
        if name in order or name not in bodies:
            continue
        order.append(name)
        pending += [callee for i in bodies[name] for callee in CALLEE.findall(i.operands)]
    return order


def count(bodies: list[list[Instruction]]) -> Counts:
    """Counts over functions. A write-back of L2 is waited for only if the very next instruction is the wait."""
    mfma, loads, lds, scoped = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    result = Counts()
    for body in bodies:
        for here, following in zip(body, [*body[1:], None], strict=True):
            result.instructions += 1
            name, bits = here.name, here.cache_bits
            if name.startswith(("v_mfma_", "v_smfmac_")):
                mfma[name] += 1
            elif name.startswith(("ds_read", "ds_load", "ds_write", "ds_store")):
                lds[name] += 1
            if LOAD.match(name):
                loads[name] += 1
            if (bits and ACCESS.match(name)) or name in ("buffer_wbl2", "buffer_inv"):
                scoped[" ".join([name, *bits])] += 1
            result.flat_accesses += name.startswith("flat_")
            result.scratch_accesses += name.startswith("scratch_")
            if name == "buffer_wbl2":
                waited = following is not None and bool(WAITS_FOR_ALL.match(following.text))
                result.wbl2 += 1
                result.wbl2_waited += waited
                if not waited:
                    result.unwaited_lines.append(here.line)
    result.mfma, result.load_widths, result.lds_widths = dict(mfma), dict(loads), dict(lds)
    result.scoped = dict(sorted(scoped.items()))
    return result
