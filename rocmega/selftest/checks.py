"""The checks, in the order in which a fault in one explains those in the next. Each says what it saw, or raises."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rocmega.errors import RocmegaError
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.compare.subject import Subject
    from rocmega.drivers.base import Driver
    from rocmega.selftest.handoff import Handoffs

Seen = tuple[str, dict[str, Any]]
Check = Callable[["Bench"], Seen]


class Skipped(Exception):
    """The check means nothing here; says why."""


class Unfit(RocmegaError):
    """The device cannot do what the mega-task needs, or says something else of itself than what is seen."""


@dataclass
class Bench:
    """What the checks share. soak: steps of the long run; 0: none."""

    driver: Driver
    soak: int = 0
    progress: Progress = silent
    _tiny: Subject | None = field(default=None, repr=False)

    @property
    def on_cpu(self) -> bool:
        return self.driver.arch == "host"

    @functools.cached_property
    def handoffs(self) -> Handoffs:
        from rocmega.selftest.handoff import Handoffs

        return Handoffs(self.driver)

    @property
    def tiny(self) -> Subject:
        """A tiny model, kept for the checks that follow."""
        if self._tiny is None:
            self._tiny = self.open("glm-5.2-tiny", "f32")
        return self._tiny

    def open(self, model: str, format: str) -> Subject:
        """A model with random weights."""
        from rocmega.selftest.models import open_subject

        return open_subject(model, format, self.driver.name, quick=self.on_cpu, progress=self.progress)

    def close(self) -> None:
        if self._tiny is not None:
            self._tiny.close()


def residency(bench: Bench) -> Seen:
    """Every compute unit can hold a block, and the blocks are on as many XCDs as the device is said to have."""
    facts, handoffs = bench.driver.facts(), bench.handoffs
    if bench.on_cpu:
        return "the CPU target holds any number of blocks", {}
    if handoffs.blocks < facts.compute_units:
        raise Unfit(
            f"{facts.name} says that it has {facts.compute_units} compute units and holds {handoffs.blocks} blocks of "
            "256 threads: another process is using it, or it is partitioned. Blocks wait for each other, so every "
            "compute unit has to be free."
        )
    xcds = Counter(handoffs.stress("tagged", 2).xcds)
    seen = {str(xcd): count for xcd, count in sorted(xcds.items())}
    if len(xcds) != facts.xcds:
        raise Unfit(
            f"{facts.name} is said to have {facts.xcds} XCDs, and blocks ran on {len(xcds)} (XCD: blocks {seen}): it "
            "is partitioned in a way that the driver does not know (amd-smi, compute partition), or the XCD's register "
            "is read wrongly."
        )
    return f"{handoffs.blocks} blocks resident on {len(xcds)} XCDs", {"blocks_of_xcd": seen}


def primitives(bench: Bench) -> Seen:
    """Waves, LDS, tile products and number formats."""
    from rocmega.selftest import primitives

    primitives.check(bench.driver, primitives.load(bench.driver))
    return "waves, LDS, tile products in f32, bf16 and fp8, all codes of FP8, E8M0 and E2M1", {}


def handoff(kind: str, bench: Bench) -> Seen:
    """Every block to every other one, every word looked at, while memory streams."""
    from rocmega.selftest.handoff import KINDS

    blocks, rounds = (4, 8) if bench.on_cpu else (bench.handoffs.blocks, 20 * bench.handoffs.blocks)
    run = bench.handoffs.stress(kind, rounds, blocks=blocks)
    across = sum(1 for writer, reader in run.pairs if writer != reader)
    message = f"{KINDS[kind]}: {blocks * rounds} hand-offs of 1,024 words, every word right"
    return message, {"blocks": blocks, "rounds": rounds, "pairs_of_xcds": len(run.pairs), "across_xcds": across}


def latency(bench: Bench) -> Seen:
    """What a hand-off among all blocks takes, and a barrier of the grid, which is the least that one can."""
    blocks, rounds = (4, 4) if bench.on_cpu else (bench.handoffs.blocks, 2000)
    sizes = {"barrier_us": blocks, "handoff_2048_us": 2048, "handoff_6144_us": 6144}
    took = {name: bench.handoffs.exchange(values, rounds, blocks=blocks) for name, values in sizes.items()}
    if bench.on_cpu:
        return "ran; a CPU's times say nothing about a GPU", {}
    rounded = {name: round(us, 3) for name, us in took.items() if us is not None}
    barrier, small, large = rounded.values()
    message = f"grid barrier {barrier:.2f} us; hand-off of 2,048 values {small:.2f} us, of 6,144 {large:.2f} us"
    return f"{message}, among {blocks} blocks", rounded


def bandwidth(bench: Bench) -> Seen:
    """How fast memory is read, by our kernel and by PyTorch."""
    from rocmega.compare import bandwidth as reading

    if bench.on_cpu:
        raise Skipped("a CPU's bandwidth says nothing about a GPU's")
    found = reading.measure(bench.driver)
    assert found is not None
    if found.failed:
        raise Unfit(f"the kernel that reads memory did not run: {found.failed}.")
    return f"{found.bytes_per_second / 1e12:.2f} TB/s ({found.how})", found.to_json()


def tiny(format: str, bench: Bench) -> Seen:
    """A tiny model's steps against float32."""
    from rocmega.selftest.models import judge

    if format == "f32":
        return _judged(judge(bench.tiny))
    if bench.on_cpu:
        raise Skipped("one format is enough on the CPU target, where the tests run all")
    subject = bench.open("glm-5.2-tiny", format)
    try:
        return _judged(judge(subject))
    finally:
        subject.close()


def mid(bench: Bench) -> Seen:
    """The published widths with few layers."""
    from rocmega.selftest.models import judge

    if bench.on_cpu:
        raise Skipped("takes a GPU")
    subject = bench.open("glm-5.2-mid", "fp8")
    try:
        return _judged(judge(subject))
    finally:
        subject.close()


def _judged(values: dict[str, Any]) -> Seen:
    return f"logits at most {values['worst_error']:.1e} from float32 on the same choices", values


def bits(bench: Bench) -> Seen:
    """The same bits for any number of blocks and launches, and again."""
    from rocmega.selftest.models import same_bits

    values = same_bits(bench.tiny)
    return f"the same bits with {', '.join(values['ways'])}", values


def recovery(bench: Bench) -> Seen:
    """A step whose blocks never finish is an error that names them, and the next step is right."""
    from rocmega.selftest.models import lost_layer

    values = lost_layer(bench.tiny)
    return f"a lost layer was an error after {values['seconds']} s, and the next step was right", values


def long_run(bench: Bench) -> Seen:
    """Steps of changing rows and contexts."""
    from rocmega.selftest.soak import soak

    if not bench.soak:
        raise Skipped("ask for it by --soak 10000")
    found = soak(bench.tiny, bench.soak, progress=bench.progress)
    message = f"{found.steps} steps of {found.cases} kinds, of {found.rows} rows: every output as the first time"
    return message, {"steps": found.steps, "cases": found.cases}


CHECKS: dict[str, Check] = {
    "residency": residency,
    "primitives": primitives,
    "hand-off, tagged": functools.partial(handoff, "tagged"),
    "hand-off, through": functools.partial(handoff, "through"),
    "hand-off, released": functools.partial(handoff, "released"),
    "latency": latency,
    "bandwidth": bandwidth,
    "tiny model, f32": functools.partial(tiny, "f32"),
    "tiny model, bf16": functools.partial(tiny, "bf16"),
    "tiny model, fp8": functools.partial(tiny, "fp8"),
    "tiny model, mxfp4": functools.partial(tiny, "mxfp4"),
    "mid model, fp8": mid,
    "same bits": bits,
    "lost layer": recovery,
    "long run": long_run,
}
