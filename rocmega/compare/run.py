"""The comparison: for each number of rows and each context, judge the arms, count launches, time those that pass."""

from __future__ import annotations

import gc
import statistics
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rocmega import launches
from rocmega.compare import bandwidth
from rocmega.compare.accuracy import Expected, Judge
from rocmega.compare.arms import ARMS, Step, default_arms
from rocmega.compare.environment import cache_bytes, environment
from rocmega.compare.options import Options
from rocmega.compare.report import Apart, Report, Row
from rocmega.compare.subject import Subject
from rocmega.compare.timing import WARM_UP, alternate
from rocmega.errors import RequestError
from rocmega.progress import Progress, silent
from rocmega.step import StepBatch

if TYPE_CHECKING:
    from rocmega.timeline import Timeline

COLD = 4  # a step has to read this many times what the largest cache holds
STEPS = {"host": 3, "gpu": 50}


def compare(options: Options, progress: Progress = silent) -> Report:
    """See `rocmega.compare.measure`."""
    subject = Subject.open(options, progress)
    try:
        _refuse_warm(subject)
        progress("measuring the read bandwidth")
        read = bandwidth.measure(subject.driver)
        judge = Judge(subject)
        rows = []
        pairs = [(count, context) for context in subject.contexts for count in options.rows]
        for done, (count, context) in enumerate(pairs):
            progress(f"{count} rows, context {context}", done, len(pairs))
            rows += _pair(subject, judge, count, context)
        apart = _take_apart(subject, read) if options.timeline else None
        return Report(options, environment(subject.driver), _about(subject), subject.layers, read, rows, apart)
    finally:
        subject.close()


def _refuse_warm(subject: Subject) -> None:
    """A step that finds its weights in a cache says nothing about one that does not."""
    held = cache_bytes(subject.driver)
    read = subject.step_bytes(min(subject.options.rows), min(subject.contexts))
    if read < COLD * held:
        raise RequestError(
            f"A step of {subject.options.model} reads {read / 1e6:.0f} MB and this device's cache holds "
            f"{held / 1e6:.0f} MB: its weights would not be read from memory, and the times would say nothing. Compare "
            "a larger model, such as glm-5.2-mid, or glm-5.2 with --tp 8 --loopback."
        )


def _about(subject: Subject) -> dict[str, Any]:
    options, weights = subject.options, subject.model.weights
    return {
        "model": options.model,
        "weights": subject.model.about,
        "cache": "noise",
        "formats": weights.formats.to_json(),
        "label": weights.formats.label,
        "activations": subject.activations,
        "weight_bytes": weights.bytes(),
        "layers": subject.layers,
        "tp": options.tp,
        "rank": options.rank,
        "loopback": options.loopback,
    }


def _take_apart(subject: Subject, read: bandwidth.Bandwidth | None) -> Apart:
    """One step of a mega-task that stamps what it does, after others that warmed it up."""
    rows, context = subject.options.rows[0], subject.contexts[0]
    mega = subject.mega_with_timeline()
    try:
        mega.place(subject.batch(rows, context), logits=False)
        for _ in range(WARM_UP if subject.device.type != "cpu" else 1):
            mega.enqueue()
            mega.result()
        timeline = mega.timeline()
    finally:
        mega.close()
    stages = timeline.stages(subject.stage_reads(rows, context), read and read.bytes_per_second)
    diagnosis = timeline.diagnosis(subject.module("flow").PRODUCERS)
    indexed = subject.module("flow").indexed_mixtures(subject.model.config)
    return Apart(rows, context, timeline, stages, diagnosis, _mixtures(timeline, indexed))


def _mixtures(timeline: Timeline, indexed: list[bool | None]) -> tuple[float, float] | None:
    """Of mixture layers without and with an indexer, how long the median one takes; None where there are not both."""
    kinds: dict[bool, list[float]] = {False: [], True: []}
    for length, own in zip(timeline.layer_lengths(), indexed, strict=True):
        if own is not None:
            kinds[own].append(length)
    if not all(kinds.values()) or timeline.unit != "us":
        return None
    return statistics.median(kinds[False]), statistics.median(kinds[True])


@dataclass
class _Entry:
    """An arm on its way to a row: its step is gone once there is a reason."""

    row: Row
    step: Step | None = None
    tokens: list[int] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        """Whatever an arm raises is its row's content."""
        self.step, self.row.reason = None, _reason(error)
        self.row.details = "".join(traceback.format_exception(error))


def _pair(subject: Subject, judge: Judge, count: int, context: int) -> list[Row]:
    on_cpu = subject.device.type == "cpu"
    names = subject.options.arms or default_arms(on_cpu, subject.options.tp)
    size = subject.step_bytes(count, context)
    entries = [_Entry(Row(name, count, context, size, subject.why_not(count, context))) for name in names]
    if entries[0].row.reason is None:
        batch = subject.batch(count, context)
        expected = judge.expect(batch)
        for entry in entries:
            try:
                _prepare(entry, subject, judge, batch, expected)
            except Exception as error:
                entry.fail(error)
        _time(entries, subject)
    rows = [entry.row for entry in entries]
    entries.clear()
    gc.collect()  # graphs hold what their steps allocated
    if not on_cpu:
        torch.cuda.empty_cache()
    return rows


def _prepare(entry: _Entry, subject: Subject, judge: Judge, batch: StepBatch, expected: Expected) -> None:
    """Makes an arm ready, judges it and counts its launches."""
    row, step = entry.row, ARMS[entry.row.arm].prepare(subject, batch)
    row.verdict = judge.judge(step, expected)
    row.reason = row.verdict.reason
    if row.reason is None:
        row.launches = launches.count(step.enqueue, subject.device)
        entry.tokens = step.tokens()
        entry.step = step


def _time(entries: list[_Entry], subject: Subject) -> None:
    """Times the arms that passed, and checks that they did the same work all the time."""
    running = {entry.row.arm: entry.step for entry in entries if entry.step is not None}
    steps = subject.options.steps or STEPS["host" if subject.driver.arch == "host" else "gpu"]
    times = alternate(running, subject.device, steps, subject.options.rounds)
    for entry in entries:
        if entry.step is None:
            continue
        timed = times[entry.row.arm]
        entry.row.rounds = timed.rounds
        try:
            if timed.failure is not None:
                raise timed.failure
            if entry.step.tokens() != entry.tokens:
                entry.row.reason = "its tokens changed while it was timed"
        except Exception as error:
            entry.fail(error)


def _reason(error: Exception) -> str:
    """The first paragraph of what it says: compilers write pages."""
    text = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}"
