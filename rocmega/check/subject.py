"""What is checked, in which cases, and what a run of one case says."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rocmega.errors import DriverError, RequestError, StepError

if TYPE_CHECKING:
    from rocmega.drivers.host import HostDriver, Order

XCDS = (8, 4, 2)


@dataclass(frozen=True)
class Case:
    """One run. The same case of the same subject is the same run, thread for thread.

    Fields:
        seed: of the order of threads and of what caches and stores do.
        blocks, rows, xcds: blocks of the launch (of each rank), rows of the step, XCDs that blocks are dealt out to.
    """

    seed: int
    blocks: int
    rows: int
    xcds: int

    def __str__(self) -> str:
        return f"{self.seed},{self.blocks},{self.rows},{self.xcds}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """From what `str` gives. Raises RequestError."""
        try:
            return cls(*map(int, text.split(",")))
        except (TypeError, ValueError):
            raise RequestError(f"{text!r} is not a case: seed,blocks,rows,xcds, four numbers.") from None


class Subject(Protocol):
    """A kernel, or several in turn, with everything that they need. Used by one thread, in several processes.

    Fields:
        name: for people.
        blocks, rows: what to try.
        driver: runs it; `run` sets its seed and checks before each run.
    """

    name: str
    blocks: Sequence[int]
    rows: Sequence[int]
    driver: HostDriver

    def run(self, case: Case) -> bytes:
        """Runs the case from the very beginning: what it computed, to be the same for every seed, blocks and XCDs.

        Raises whatever the driver raises, and is ready for the next run afterwards.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """What was found in a case.

    Fields:
        text: the first report; story: what the waves that it names did around it.
        stage: of the report, "" if there is none in it.
        choices: the order of waves, where it was not the calm one and was recorded: (turn, wave).
        order: the order that was followed instead of the seed's.
    """

    case: Case
    text: str
    story: str = ""
    choices: tuple[tuple[int, int], ...] = ()
    order: Order | None = field(default=None)

    @property
    def stage(self) -> str:
        found = re.search(r"stage (\w+)", self.text)
        return found[1] if found else ""

    @property
    def kind(self) -> str:
        """The report without its numbers: what two runs have in common that fail for one reason."""
        return re.sub(r"\d+", "N", self.text)


def run(
    subject: Subject, case: Case, expected: bytes | None, order: Order | None = None, *, record: bool = False
) -> Failure | bytes:
    """Runs a case with all checks: what is wrong, or what it computed.

    expected: what it should compute, None if nobody knows yet. order: the order of waves to follow.
    record: keep the order of a run that fails.
    """
    driver = subject.driver
    driver.seed, driver.check, driver.xcds, driver.order, driver.record = case.seed, True, case.xcds, order, record
    driver.last_report = None
    try:
        made = subject.run(case)
    except (DriverError, StepError) as error:
        report = driver.last_report
        text, story, choices = (report.text, report.story, report.choices) if report else (str(error), "", ())
        return Failure(case, text or str(error), story, choices, order)
    if expected is not None and made != expected:
        return Failure(case, "the result differs from that of one block in a calm order, and no access was reported")
    return made


def reference(subject: Subject, rows: int) -> bytes:
    """What one block computes without checks, in a calm order."""
    driver = subject.driver
    driver.seed, driver.check, driver.order, driver.record = 0, False, None, False
    return subject.run(Case(0, 1, rows, driver.xcds))


def smaller(case: Case, subject: Subject) -> list[Case]:
    """Cases with fewer blocks or rows, the smallest first."""
    sizes = {(b, r) for b in subject.blocks for r in subject.rows if b * r < case.blocks * case.rows}
    return [replace(case, blocks=b, rows=r) for b, r in sorted(sizes, key=lambda size: (size[0] * size[1], size))]


def load(path: str | Path) -> Subject:
    """The subject that a Python file calls `subject`. Raises RequestError if there is none."""
    import importlib.util

    file = Path(path).resolve()
    if not file.is_file():
        raise RequestError(f"{path} does not exist: give a Python file that defines `subject`.")
    spec = importlib.util.spec_from_file_location(f"rocmega_checked_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "subject"):
        raise RequestError(f"{path} defines no `subject`: see docs/protocol.md, 'Checking a stage of your own'.")
    return module.subject
