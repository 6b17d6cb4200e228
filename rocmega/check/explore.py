"""All orders with at most so many preemptions, one after the other: for small kernels."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from rocmega.check.subject import Case, Failure, Subject, reference, run
from rocmega.progress import Progress, silent


def explore(
    subject: Subject,
    case: Case,
    *,
    preemptions: int = 1,
    waves: int = 4,
    seconds: float = 60.0,
    progress: Progress = silent,
) -> tuple[int, bool, Failure | None]:
    """Runs a case in every order in which at most `preemptions` waves lose the turn although they could go on.

    Between them a wave keeps the turn until it has to wait. Lanes take turns at every access, so a preemption may come
    between any two. waves: of a block. seconds: when to stop.
    Returns how many orders were run, whether these were all, and what was found.
    """
    from rocmega.drivers.host import Order

    deadline = time.monotonic() + seconds
    expected = reference(subject, case.rows)
    calm = Order(in_step=True)
    got = run(subject, case, expected, calm)
    if isinstance(got, Failure):
        return 1, True, got
    report = subject.driver.last_report
    assert report is not None
    done = 1
    for choices in _choices(report.turns, case.blocks * waves, preemptions):
        if time.monotonic() > deadline:
            return done, False, None
        got = run(subject, case, expected, Order(choices, in_step=True))
        done += 1
        progress(f"orders of {subject.name} with up to {preemptions} preemptions", done, 0)
        if isinstance(got, Failure):
            return done, True, got
    return done, True, None


def _choices(turns: int, waves: int, most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    single = list(itertools.product(range(1, turns + 1), range(waves)))
    for count in range(1, most + 1):
        for chosen in itertools.combinations(single, count):
            if all(one[0] < other[0] for one, other in itertools.pairwise(chosen)):
                yield chosen
