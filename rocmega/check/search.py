"""Many cases, in several processes, within a budget of seeds and minutes."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rocmega.check.subject import XCDS, Case, Failure, Subject, reference, run
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from concurrent.futures import Future

MOST_JOBS = 8


@dataclass
class Summary:
    """What was run and what was found.

    Fields:
        runs: how many cases were run, by blocks and rows.
        failure: the first that was found, None if nothing was.
        seconds: wall time; launches, turns: how many, and how often the turn went to a wave in all of them.
    """

    name: str
    runs: Counter[tuple[int, int]] = field(default_factory=Counter)
    failure: Failure | None = None
    seconds: float = 0.0
    turns: int = 0
    seeds: tuple[int, int] = (0, 0)

    @property
    def clean(self) -> bool:
        return self.failure is None

    @property
    def total(self) -> int:
        return sum(self.runs.values())


def cases(subject: Subject, first: int = 0) -> Iterator[Case]:
    """A case for each seed. A seed stands for one of five or six kinds of order in turn, and for numbers of blocks."""
    seed = first
    while True:
        dice = random.Random(seed)
        yield Case(seed, dice.choice(subject.blocks), dice.choice(subject.rows), dice.choice(XCDS))
        seed += 1


def check(
    make: Callable[[], Subject],
    *,
    seeds: int,
    first: int = 0,
    minutes: float | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Summary:
    """Runs `seeds` cases, or as many as there is time for, and stops at the first that fails.

    make: the subject; called in each process, so it has to be picklable. jobs: processes, by default one a core.
    """
    start = time.monotonic()
    deadline = start + 60 * minutes if minutes else None
    jobs = min(jobs or len(os.sched_getaffinity(0)), MOST_JOBS, seeds)
    progress("building the kernel", 0, 0)
    subject = make()
    summary = Summary(subject.name, seeds=(first, first))
    todo = cases(subject, first)
    outcomes = _alone(subject, todo, seeds) if jobs == 1 else _together(make, todo, seeds, jobs, deadline)
    for done, (case, failure, turns) in enumerate(outcomes, 1):
        summary.runs[case.blocks, case.rows] += 1
        summary.turns += turns
        progress(f"checking {subject.name}", done, seeds)
        if failure is not None:
            summary.failure = failure
            break
        if deadline and time.monotonic() > deadline:
            break
    outcomes.close()
    summary.seeds = (first, first + summary.total)
    summary.seconds = time.monotonic() - start
    return summary


Outcome = tuple[Case, "Failure | None", int]


class _Checked:
    """A subject and what it should compute, by rows."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.expected: dict[int, bytes] = {}

    def __call__(self, case: Case) -> Outcome:
        if case.rows not in self.expected:
            self.expected[case.rows] = reference(self.subject, case.rows)
        got = run(self.subject, case, self.expected[case.rows])
        report = self.subject.driver.last_report
        return case, got if isinstance(got, Failure) else None, report.turns if report else 0


def _alone(subject: Subject, todo: Iterator[Case], seeds: int) -> Any:
    checked = _Checked(subject)
    for _ in range(seeds):
        yield checked(next(todo))


_checked: _Checked | None = None


def _begin(make: Callable[[], Subject]) -> None:
    import torch

    global _checked
    torch.set_num_threads(1)
    _checked = _Checked(make())


def _one(case: Case) -> Outcome:
    assert _checked is not None
    return _checked(case)


def _together(make: Callable[[], Subject], todo: Iterator[Case], seeds: int, jobs: int, deadline: float | None) -> Any:
    """Outcomes as they come; a few cases more than there are processes are under way."""
    import multiprocessing
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

    context = multiprocessing.get_context("spawn")  # threads and signal handlers do not survive a fork
    with ProcessPoolExecutor(jobs, context, _begin, (make,)) as pool:
        running: set[Future[Outcome]] = set()
        begun = 0
        try:
            while running or begun < seeds:
                while begun < seeds and len(running) < 2 * jobs and not (deadline and time.monotonic() > deadline):
                    running.add(pool.submit(_one, next(todo)))
                    begun += 1
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
