"""A static estimate of a mega-task on AMD GPUs: what its loops that stream weights can do, and what its stages need.

Nothing here ran on an AMD GPU. Two bounds stand beside each other. Memory: bytes over the data sheet's bandwidth. The
code: `streams` follows one wave through a loop with an assumed latency of memory; four waves a compute unit, all
compute units. Little's law says how many bytes a compute unit has to have in flight for its part of the bandwidth; the
same walk says how many the code has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError
from rocmega.inspect.streams import WAVES, Stream

if TYPE_CHECKING:
    from rich.table import Table

    from rocmega.packing.plan import Field

LATENCY_NS = 800.0  # assumed, of a load from memory while all of it is in use; nothing was measured
# Fields whose products see float32.
EXACT = ("router", "index_weights", "entry_kv", "entry_gate", "key_kv", "key_gate", "key_of_entry")


@dataclass(frozen=True)
class Device:
    """By the makers' data sheets: compute units, memory's bytes per nanosecond, cycles per nanosecond at most."""

    name: str
    units: int
    memory: float
    clock: float

    @property
    def share(self) -> float:
        """A compute unit's part of the bandwidth, bytes per nanosecond."""
        return self.memory / self.units


DEVICES = {"gfx942": Device("MI300X", 304, 5300.0, 2.1), "gfx950": Device("MI355X", 256, 8000.0, 2.4)}


@dataclass(frozen=True)
class LoopEstimate:
    """A loop. Bytes per nanosecond of a compute unit: `issue` if nothing ever waited, `rate` with memory's latency.

    in_flight, wanted: bytes of weights a compute unit has on their way at most, and would have to by Little's law.
    """

    lines: tuple[int, int]
    weights: str
    instructions: int
    bytes: int
    waits: tuple[int, ...]
    in_flight: int
    wanted: int
    issue: float
    rate: float


@dataclass(frozen=True)
class StageEstimate:
    """A stage of all layers together. Microseconds a layer: of memory at full bandwidth, of the slowest loop for its
    kind of weights; None where no such loop was found.
    """

    stage: str
    weights: str
    bytes: float
    memory_us: float
    code_us: float | None


@dataclass(frozen=True)
class Estimate:
    """Of one architecture."""

    device: Device
    latency_ns: float
    layers: int
    loops: list[LoopEstimate]
    stages: list[StageEstimate]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def estimate(
    streams: Sequence[Stream],
    arch: str,
    reads: Mapping[str, float],
    kinds: Mapping[str, str],
    layers: int,
    latency_ns: float = LATENCY_NS,
) -> Estimate:
    """streams: of the assembly; reads: stage -> bytes of a step; kinds: stage -> what its weights are.

    Raises RequestError for an architecture whose data sheet is not here.
    """
    if arch not in DEVICES:
        raise RequestError(f"--estimate is for {' and '.join(DEVICES)}, not for {arch}: it reads their assembly.")
    device = DEVICES[arch]
    loops = [_loop(stream, device, latency_ns) for stream in streams]
    slowest: dict[str, float] = {}
    for loop in loops:
        slowest[loop.weights] = min(loop.rate, slowest.get(loop.weights, loop.rate))
    stages = []
    for stage, size in reads.items():
        each, rate = size / layers * 1e-3, slowest.get(kinds.get(stage, ""))
        code = each / (rate * device.units) if rate else None
        stages.append(StageEstimate(stage, kinds.get(stage, "-"), size, each / device.memory, code))
    return Estimate(device, latency_ns, layers, loops, stages)


def _loop(stream: Stream, device: Device, latency_ns: float) -> LoopEstimate:
    turn, most = stream.turn_cycles(latency_ns * device.clock)
    of_unit = WAVES * stream.bytes * device.clock
    return LoopEstimate(
        stream.lines,
        stream.weights,
        stream.instructions,
        stream.bytes,
        stream.waits,
        WAVES * most,
        round(device.share * latency_ns),
        of_unit / stream.issue_cycles(),
        of_unit / turn,
    )


def kinds_of(fields: Iterable[Field], stage_of: Mapping[str, str]) -> dict[str, str]:
    """Stage -> narrow, bf16 or exact, as most of its bytes are. stage_of: field of LayerWeights -> stage."""
    sizes: dict[str, dict[str, int]] = {}
    for field in fields:
        name = field.name.rsplit(".", 1)[-1]
        if field.count:
            kind = "exact" if name in EXACT or field.format == "f32" else "bf16" if field.format == "bf16" else "narrow"
            of_stage = sizes.setdefault(stage_of[name], {})
            of_stage[kind] = of_stage.get(kind, 0) + field.bytes()
    return {stage: max(of_stage, key=lambda kind: of_stage[kind]) for stage, of_stage in sizes.items()}


def tables(found: Estimate) -> list[Table]:
    """For people; print them with rich."""
    from rich.table import Table

    device = found.device
    title = (
        f"Loops that stream weights: {device.name}, {found.latency_ns:.0f} ns assumed, {device.share:.1f} B/ns a unit"
    )
    loops = Table(
        "lines", "weights", "KB", "vmcnt", "in flight", "wanted", "issue", "rate", "share",
        title=title, title_justify="left",
        caption="KB: of a wave's turn; in flight, wanted: KB of a compute unit; issue, rate: B/ns of one",
    )  # fmt: skip
    for loop in found.loops:
        loops.add_row(
            f"{loop.lines[0]}-{loop.lines[1]}", loop.weights, f"{loop.bytes / 1024:g}", " ".join(map(str, loop.waits)),
            f"{loop.in_flight / 1024:.0f}", f"{loop.wanted / 1024:.0f}", f"{loop.issue:.1f}", f"{loop.rate:.1f}",
            f"{loop.rate / device.share:.0%}",
        )  # fmt: skip
    stages = Table(
        "stage", "weights", "MB a layer", "memory, us", "code, us",
        title="Stages, a layer: memory at full bandwidth, and by the slowest loop of its kind; no hand-offs",
        title_justify="left",
    )  # fmt: skip
    for stage in found.stages:
        code = "-" if stage.code_us is None else f"{stage.code_us:.1f}"
        size = stage.bytes / found.layers / 1e6
        stages.add_row(stage.stage, stage.weights, f"{size:.2f}", f"{stage.memory_us:.1f}", code)
    return [loops, stages]
