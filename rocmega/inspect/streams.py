"""How fast the loops that stream weights can run, by the assembly alone: issue cycles, and bytes in flight.

A wave is followed through a loop as it is written, none of its branches taken: an instruction issues every ISSUE_CYCLES
cycles (one wave on each SIMD, as a block of 256 threads has it), a matrix instruction keeps its successors for as long
as the matrix unit works, loads of weights come back after the latency of memory, those of LDS and of the scalar cache
after theirs, and s_waitcnt waits for as many as it says. What is left out makes the real loop slower: other waves'
requests in the way, barriers, misses of the instruction cache; what is in the code but is skipped when it runs makes it
faster.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rocmega.inspect.assembly import Instruction

ISSUE_CYCLES = 4
LDS_CYCLES, SCALAR_CYCLES = 128, 200  # of ds_read and s_load, from issue to data
WAVES = 4  # of a block, one on each SIMD
LANE_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
WAVE_LANES = 64
# Cycles that a matrix instruction keeps a SIMD's matrix unit, from the makers' peak rates per compute unit and cycle.
# gfx942: 2,048 operations of bf16, 4,096 of FP8, 256 of f32; gfx950: 4,096, 8,192, 256.
MATRIX_CYCLES = {
    "v_mfma_f32_16x16x16_bf16": 16,
    "v_mfma_f32_16x16x16_bf16_1k": 16,
    "v_mfma_f32_16x16x32_bf16": 16,
    "v_mfma_f32_16x16x32_fp8_fp8": 16,
    "v_mfma_f32_16x16x4_f32": 32,
    "v_mfma_scale_f32_16x16x128_f8f6f4": 32,
}
WARM_UP, TURNS = 16, 48  # turns that are followed, before those that count and with them


@dataclass(frozen=True)
class Line:
    """An instruction with the label before it."""

    instruction: Instruction
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Stream:
    """A loop that loads weights.

    Fields:
        lines: of the assembly, first and last. instructions: of a turn. bytes: of weights that a wave loads in a turn.
        matrix: matrix instructions of a turn, and which; conversions: of FP8 or MXFP4, of a turn.
        waits: numbers of loads that its waits leave in flight, ascending.
    """

    lines: tuple[int, int]
    instructions: int
    bytes: int
    matrix: int
    kind: str
    conversions: int
    waits: tuple[int, ...]
    body: tuple[Instruction, ...]

    @property
    def weights(self) -> str:
        """What kind of matrix it multiplies: narrow (FP8 or MXFP4), bf16 or exact (float32 inputs)."""
        if self.kind.endswith("_f32") and "x4_" in self.kind:
            return "exact"
        return "narrow" if self.conversions or "fp8" in self.kind or "f8f6f4" in self.kind else "bf16"

    def issue_cycles(self) -> int:
        """Of a turn, if nothing ever waited but for the matrix unit."""
        return self._follow(0.0)[0]

    def turn_cycles(self, latency: float) -> tuple[int, int]:
        """Cycles of a turn where memory takes so many, and the most bytes that a wave has in flight."""
        return self._follow(latency)

    def _follow(self, latency: float) -> tuple[int, int]:
        now, most, marks = 0.0, 0, []
        memory: deque[tuple[float, int]] = deque()
        quick: deque[float] = deque()
        matrix_free = 0.0
        quick_latency = 1.0 if latency else 0.0
        for _ in range(TURNS):
            for each in self.body:
                name = each.name
                if name.startswith("s_waitcnt"):
                    now = _wait(each, now, memory, quick)
                elif name in MATRIX_CYCLES:
                    now = max(now, matrix_free)
                    matrix_free = now + MATRIX_CYCLES[name]
                elif name.startswith("global_load"):
                    memory.append((now + latency, _load_bytes(each)))
                    most = max(most, sum(size for _, size in memory))
                elif name.startswith("ds_read"):
                    quick.append(now + quick_latency * LDS_CYCLES)
                elif name.startswith("s_load"):
                    quick.append(now + quick_latency * SCALAR_CYCLES)
                now += ISSUE_CYCLES
            marks.append(now)
        return round((marks[-1] - marks[WARM_UP - 1]) / (TURNS - WARM_UP)), most


def _wait(wait: Instruction, now: float, memory: deque[tuple[float, int]], quick: deque[float]) -> float:
    vmcnt = re.search(r"vmcnt\((\d+)\)", wait.operands)
    while vmcnt and len(memory) > int(vmcnt[1]):
        now = max(now, memory.popleft()[0])
    lgkm = re.search(r"lgkmcnt\((\d+)\)", wait.operands)
    while lgkm and len(quick) > int(lgkm[1]):
        now = max(now, quick.popleft())
    return now


def streams(assembly: str) -> list[Stream]:
    """The innermost loops that load weights (16 bytes a lane, streamed) and multiply matrices, in their order."""
    lines = _lines(assembly)
    at = {label: number for number, line in enumerate(lines) for label in line.labels}
    loops: dict[int, int] = {}
    for number, line in enumerate(lines):
        target = line.instruction.operands.split(" ")[0] if "branch" in line.instruction.name else ""
        if target in at and at[target] <= number:
            loops[at[target]] = max(number, loops.get(at[target], 0))
    found = [(begin, end, _stream(lines[begin : end + 1])) for begin, end in sorted(loops.items())]
    # Without a wait for memory it is no loop of its own, but blocks that several loops share.
    whole = [each for each in found if each[2].bytes and each[2].matrix and each[2].waits]
    inner = [
        stream
        for begin, end, stream in whole
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e, _ in whole)
    ]
    return inner


def _lines(assembly: str) -> list[Line]:
    found: list[Line] = []
    labels: list[str] = []
    for number, raw in enumerate(assembly.splitlines(), 1):
        text = raw.partition(";")[0].partition("//")[0].strip()
        label = re.match(r"([\w$.]+):", text)
        if label:
            labels.append(label[1])
        elif text and not text.startswith("."):
            name, *rest = text.split(None, 1)
            found.append(Line(Instruction(name, " ".join(rest), number), tuple(labels)))
            labels = []
    return found


def _stream(lines: Sequence[Line]) -> Stream:
    body = tuple(line.instruction for line in lines)
    weights = [each for each in body if each.name == "global_load_dwordx4" and "nt" in each.cache_bits]
    matrix = [each.name for each in body if each.name.startswith("v_mfma")]
    waits = {int(n) for each in body for n in re.findall(r"vmcnt\((\d+)\)", each.operands) if each.name == "s_waitcnt"}
    conversions = sum(1 for each in body if re.match(r"v_cvt_.*(fp8|fp4|f8)|v_perm_b32", each.name))
    return Stream(
        (body[0].line, body[-1].line),
        len(body),
        sum(map(_load_bytes, weights)),
        len(matrix),
        max(set(matrix), key=matrix.count, default=""),
        conversions,
        tuple(sorted(waits)),
        body,
    )


def _load_bytes(load: Instruction) -> int:
    return LANE_BYTES.get(load.name.rpartition("_")[2], 4) * WAVE_LANES if "nt" in load.cache_bits else 0
