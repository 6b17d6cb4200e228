"""The checker against small kernels: no report where there is no bug, and none of the bugs gets past it."""

from __future__ import annotations

import itertools
import re
import time

import pytest

from rocmega.check import Failure, run
from rocmega.check.search import cases
from rocmega.check.subject import reference
from tests.check.kernels import KERNELS, MUTANTS, STAGES, subject

SEEDS = 40  # of each correct kernel; `rocmega check` runs any number
TRIES = 10  # seeds in which a bug has to be found
SECONDS = 30.0  # of the processor, however busy it is with others


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_false_alarm(kernel: str) -> None:
    checked = subject(kernel, blocks=(1, 2, 3, 5, 9))
    expected = reference(checked, 1)
    for case in itertools.islice(cases(checked), SEEDS):
        got = run(checked, case, expected)
        assert not isinstance(got, Failure), f"{case}: {got.text}\n{got.story}"


@pytest.mark.parametrize(("kernel", "mutant"), MUTANTS, ids=[f"{k}: {bug}" for (k, _), (bug, _) in MUTANTS.items()])
def test_bug_is_found_and_named(kernel: str, mutant: int) -> None:
    _, message = MUTANTS[kernel, mutant]
    checked, start, found = subject(kernel, mutant), time.process_time(), []
    for case in itertools.islice(cases(checked), TRIES):
        got = run(checked, case, None)
        if isinstance(got, Failure):
            found.append(got)
            break
    assert found, "not found"
    assert time.process_time() - start < SECONDS
    assert re.search(message, found[0].text), found[0].text
    assert "missing: " in found[0].text
    assert found[0].stage in STAGES
