"""What was found once is found again, and with less."""

from __future__ import annotations

import itertools

from rocmega.check import Case, Failure, Kernel, explore, run, shorten
from rocmega.check.search import cases
from rocmega.check.subject import reference
from rocmega.drivers.host import Order
from tests.check.kernels import subject


def first_failure(checked: Kernel, skip: str = "nothing") -> Failure:
    for case in itertools.islice(cases(checked), 40):
        got = run(checked, case, None, record=True)
        if isinstance(got, Failure) and skip not in got.text:
            return got
    raise AssertionError("nothing was found")


def test_a_case_is_the_same_run_again() -> None:
    checked = subject("double_buffer", blocks=(3, 5))
    for case in itertools.islice(cases(checked), 12):
        assert run(checked, case, None, record=True) == run(checked, case, None)
        first = checked.driver.last_report
        run(checked, case, None, record=True)
        again = checked.driver.last_report
        assert first is not None
        assert again is not None
        assert (first.turns, first.switches) == (again.turns, again.switches)


def test_the_order_of_a_launch_can_be_given() -> None:
    checked = subject("ll_lines", blocks=(3,))
    checked.launches = 1
    for case in itertools.islice(cases(checked), 12):
        run(checked, case, None, record=True)
        made = checked.driver.last_report
        assert made is not None
        run(checked, case, None, Order(made.choices), record=True)
        again = checked.driver.last_report
        assert again is not None
        assert (made.turns, made.switches, made.choices) == (again.turns, again.switches, again.choices)


def test_a_failure_is_made_short() -> None:
    """As few blocks as show it, and no switches where a missing step shows in any order."""
    found = first_failure(subject("released", 4))
    short = shorten(subject("released", 4), found)
    assert (short.case.blocks, short.choices) == (2, ())
    assert short.order is not None
    assert short.kind == found.kind

    checked = subject("tickets", 1)
    checked.launches = 1
    found = first_failure(checked)
    short = shorten(checked, found)
    assert short.case.blocks <= found.case.blocks
    assert len(short.choices) < len(found.choices)
    again = run(checked, short.case, reference(checked, 1), short.order)
    assert isinstance(again, Failure)
    assert again.kind == found.kind


def test_all_orders_with_one_preemption_are_tried() -> None:
    clean = subject("ping_pong", blocks=(2,))
    clean.launches = 1
    orders, complete, failure = explore(clean, Case(0, 2, 1, 8))
    assert (complete, failure) == (True, None)
    assert orders > 50
    broken = subject("ping_pong", 2, blocks=(2,))
    _, _, failure = explore(broken, Case(0, 2, 1, 8))
    assert failure is not None
    assert failure.stage == "answer"  # which waits for a word that has moved on
