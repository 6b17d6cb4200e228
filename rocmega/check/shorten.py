"""From a run that fails to the shortest one that fails for the same reason."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rocmega.check.subject import Case, Failure, Subject, reference, run, smaller
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.drivers.host import Order

SEEDS = 3  # tried for each smaller case


def shorten(subject: Subject, failure: Failure, *, seconds: float = 60.0, progress: Progress = silent) -> Failure:
    """Fewer blocks and rows, then fewer switches between waves, as far as the failure stays what it is.

    seconds: about how long to try. What comes back fails again when it is run with its `case` and `order`.
    """
    return _Shortener(subject, failure, time.monotonic() + seconds, progress).best()


class _Shortener:
    def __init__(self, subject: Subject, failure: Failure, deadline: float, progress: Progress) -> None:
        self.subject, self.failure, self.deadline, self.progress = subject, failure, deadline, progress
        self.tries = 0
        self.expected: dict[int, bytes] = {}

    def best(self) -> Failure:
        self._fewer_blocks()
        self._fewer_switches()
        return self.failure

    def _fails(self, case: Case, order: Order | None = None) -> bool:
        """Whether the case fails for the same reason; then it is the failure from now on."""
        if time.monotonic() > self.deadline:
            return False
        self.tries += 1
        self.progress("looking for a shorter run that fails", self.tries, 0)
        if case.rows not in self.expected:
            self.expected[case.rows] = reference(self.subject, case.rows)
        got = run(self.subject, case, self.expected[case.rows], order, record=order is None)
        if not isinstance(got, Failure) or got.kind != self.failure.kind:
            return False
        self.failure = replace(got, choices=order.choices if order else got.choices)
        return True

    def _fewer_blocks(self) -> None:
        for case in smaller(self.failure.case, self.subject):
            for seed in range(SEEDS):
                if self._fails(replace(case, seed=case.seed + seed)):
                    return

    def _fewer_switches(self) -> None:
        """First none at all; else whatever part of those that the run made is enough (ddmin)."""
        from rocmega.drivers.host import Order

        case = self.failure.case
        for order in (Order(kind_memory=True), Order()):
            if self._fails(case, order):
                return
        if not self._fails(case):  # recorded
            return
        kept = list(self.failure.choices)
        if not kept or not self._fails(case, Order(tuple(kept))):
            return
        parts = 2
        while len(kept) > 1 and time.monotonic() < self.deadline:
            size = -(-len(kept) // parts)
            for at in range(0, len(kept), size):
                rest = kept[:at] + kept[at + size :]
                if self._fails(case, Order(tuple(rest))):
                    kept, parts = rest, max(2, parts - 1)
                    break
            else:
                if size == 1:
                    return
                parts = min(len(kept), 2 * parts)
