"""When each block of a mega-task did what: a trace for Perfetto or chrome://tracing, and a table of stages.

Kernels built with TIMELINE=1 stamp when a block begins a task, has its input and is done (hip/handoff/timeline.h).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch

CAPACITY = 16384  # stamps of a block
BEGIN, INPUT, END = range(3)  # Moment in timeline.h
# Ticks of clock_ticks() in a microsecond; the CPU target counts turns of its scheduler, which are no time.
TICKS_PER_US = {"sm_90": 1000, "gfx942": 100, "gfx950": 100}

# Stage -> those that make its input, and in which layer: 0 its own, -1 the one before.
Producers = Mapping[str, Sequence[tuple[str, int]]]


@dataclass(frozen=True)
class Task:
    """One task of a block. Times in the timeline's unit, from its first stamp.

    Fields:
        layer: -1 before the first, `layers` after the last.
        begin: when the block turned to it, weights already on their way. input: when its input was there. end.
    """

    block: int
    stage: str
    layer: int
    number: int
    begin: float
    input: float
    end: float

    @property
    def waiting(self) -> float:
        return self.input - self.begin

    @property
    def working(self) -> float:
        return self.end - self.input


@dataclass(frozen=True)
class StageRow:
    """A stage, over the whole step.

    Fields:
        tasks: how many. waiting, working: of a task, on average. share: of all blocks' time, waiting and working.
        bytes: that it reads of memory, None if unknown.
        bandwidth: what part of the device's it uses while it works, if all blocks did nothing else; None if unknown.
    """

    stage: str
    tasks: int
    waiting: float
    working: float
    share: tuple[float, float]
    bytes: float | None
    bandwidth: float | None


# Of `cells`: waiting and working of a task in the timeline's unit, then of all blocks' time.
HEADER = ("stage", "tasks/layer", "waiting", "working", "waiting", "working", "MB", "bandwidth")


def cells(rows: Sequence[StageRow], layers: int) -> list[tuple[str, ...]]:
    """The table as text, below HEADER."""
    return [
        (
            row.stage,
            f"{row.tasks / layers:.3g}",
            f"{row.waiting:.1f}",
            f"{row.working:.1f}",
            f"{row.share[0]:.1%}",
            f"{row.share[1]:.1%}",
            "-" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
            "-" if row.bandwidth is None else f"{row.bandwidth:.1%}",
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Timeline:
    """One step.

    Fields:
        names: of the stages, in the program's order. unit: "us" or "turns".
        truncated: blocks that ran out of room for stamps.
    """

    tasks: list[Task]
    names: tuple[str, ...]
    blocks: int
    layers: int
    unit: str
    truncated: int = 0

    @property
    def length(self) -> float:
        """From the first stamp to the last."""
        return max((task.end for task in self.tasks), default=0.0)

    def layer_lengths(self) -> list[float]:
        """Of each layer, from the last end of the layer before it (or of what comes before the first) to its own."""
        ends = [0.0] * (self.layers + 2)  # from the layer before the first to the one after the last
        for task in self.tasks:
            ends[task.layer + 1] = max(ends[task.layer + 1], task.end)
        return [end - before for before, end in itertools.pairwise(ends[:-1])]

    def stages(self, reads: Mapping[str, float] | None = None, bytes_per_second: float | None = None) -> list[StageRow]:
        """The table. reads: stage -> bytes; bytes_per_second: what the device can read."""
        groups: dict[str, list[Task]] = defaultdict(list)
        for task in self.tasks:
            groups[task.stage].append(task)
        rows, all_time = [], self.length * self.blocks
        for stage in sorted(groups, key=self.names.index):
            tasks = groups[stage]
            waiting, working = (sum(getattr(task, part) for task in tasks) for part in ("waiting", "working"))
            size, used = (reads or {}).get(stage), None
            if size is not None and bytes_per_second and working and self.unit == "us":
                used = size / (working / self.blocks * 1e-6) / bytes_per_second
            share = (waiting / all_time, working / all_time) if all_time else (0.0, 0.0)
            count = len(tasks)
            rows.append(StageRow(stage, count, waiting / count, working / count, share, size, used))
        return rows

    def diagnosis(self, producers: Producers) -> str:
        """The stage that costs most waiting, and for whom it waits: one sentence."""
        waits: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            waits[task.stage] += task.waiting
        if not self.length:
            return "Nothing was stamped."
        stage, total = max(waits.items(), key=lambda item: item[1])
        last = self._last_ends()
        late, blame = 0.0, Counter[str]()
        mine = [task for task in self.tasks if task.stage == stage]
        for task in mine:
            ends = [
                (last[key], key[0]) for name, by in producers.get(stage, ()) if (key := (name, task.layer + by)) in last
            ]
            if ends:
                ready, who = max(ends)
                late += min(max(ready - task.begin, 0.0), task.waiting)
                blame[who] += 1
        share, each = total / (self.length * self.blocks), total / len(mine)
        sentence = f"{stage} waits longest: {share:.0%} of all blocks' time, {each:.1f} {self.unit} a task"
        if not blame:
            return f"{sentence}."
        whom, after = blame.most_common(1)[0][0], (total - late) / len(mine)
        return (
            f"{sentence}. {late / len(mine):.1f} of it pass until the last task of {whom} has ended, and {after:.1f} "
            "more until the input is there."
        )

    def _last_ends(self) -> dict[tuple[str, int], float]:
        last: dict[tuple[str, int], float] = {}
        for task in self.tasks:
            key = (task.stage, task.layer)
            last[key] = max(last.get(key, task.end), task.end)
        return last

    def trace(self, title: str) -> dict[str, Any]:
        """Chrome's trace format, one track for each block; what waits is a slice within its task's."""
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}]
        for block in range(self.blocks):
            named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": block, "args": {"name": f"block {block}"}}
            events += [named, {**named, "name": "thread_sort_index", "args": {"sort_index": block}}]
        for task in self.tasks:
            slice = {"ph": "X", "pid": 0, "tid": task.block, "ts": task.begin}
            about = {"layer": task.layer, "task": task.number}
            events.append({**slice, "name": task.stage, "dur": task.end - task.begin, "args": about})
            if task.waiting > 0:
                events.append({**slice, "name": "waiting", "dur": task.waiting})
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": self.unit}}

    def write(self, file: Path, title: str) -> None:
        """Writes the trace. Raises RequestError if it cannot."""
        try:
            file.write_text(json.dumps(self.trace(title)), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--timeline {file} could not be written: {error}.") from None


def read(
    records: torch.Tensor, made: torch.Tensor, *, stages: Sequence[str], epoch: int, layers: int, arch: str
) -> Timeline:
    """The stamps of one launch.

    records: int32 [blocks, capacity, 4]; made: int32 [blocks], stamps that each block wanted to make. stages: names by
    number. epoch: of the step; tags epoch + 1 + 2 * layer and the next are a layer's.
    """
    blocks, capacity, _ = records.shape
    counts = made.tolist()
    ticks = TICKS_PER_US.get(arch)
    kept = [records[block, : min(count, capacity)].tolist() for block, count in enumerate(counts)]
    origin = next((stamps[0][0] for stamps in kept if stamps), 0)
    tasks: list[Task] = []
    for block, stamps in enumerate(kept):
        clocked = [(_since(origin, time) / (ticks or 1), tag, stage, word) for time, tag, stage, word in stamps]
        tasks += _tasks(block, clocked, stages, epoch, layers)
    start = min((task.begin for task in tasks), default=0.0)
    shifted = [_shift(task, start) for task in tasks]
    return Timeline(
        shifted, tuple(stages), blocks, layers, "us" if ticks else "turns", sum(count > capacity for count in counts)
    )


def _since(origin: int, time: int) -> int:
    """The signed difference of two clock words that may have come round between."""
    return (time - origin + (1 << 31)) % (1 << 32) - (1 << 31)


def _shift(task: Task, start: float) -> Task:
    return Task(
        task.block, task.stage, task.layer, task.number, task.begin - start, task.input - start, task.end - start
    )


@dataclass
class _Open:
    number: int
    begin: float
    input: float | None = None


def _tasks(
    block: int, stamps: Iterable[tuple[float, int, int, int]], names: Sequence[str], epoch: int, layers: int
) -> Iterator[Task]:
    """A block's tasks in order. Within a stage a task may begin before the one before it has ended: an end is that of
    the oldest. A task that says no end ends with the last stamp before another stage's first.
    """
    waiting: list[_Open] = []
    place, now = (-1, -1), 0.0

    def close(task: _Open, end: float, free: float) -> Task:
        begin = min(max(task.begin, free), end)
        given = begin if task.input is None else min(max(task.input, begin), end)
        stage, tag = place
        return Task(block, names[stage], _layer(tag - epoch, layers), task.number, begin, given, end)

    free = float("-inf")  # when the block was done with the task before
    for time, tag, stage, word in stamps:
        number, moment = word >> 2, word & 3
        if (stage, tag) != place:
            for task in waiting:
                yield close(task, now, free)
            waiting, place, free = [], (stage, tag), float("-inf")
        now = time
        if moment == BEGIN:
            waiting.append(_Open(number, time))
        elif moment == INPUT and waiting and waiting[-1].input is None:
            waiting[-1].input = time
        elif moment == END and waiting:
            yield close(waiting.pop(0), time, free)
            free = time
    for task in waiting:
        yield close(task, now, free)


def _layer(version: int, layers: int) -> int:
    return -1 if version <= 0 else min((version - 1) // 2, layers)
