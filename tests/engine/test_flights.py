"""Launches of several tokens: what comes when, and who may end them."""

from __future__ import annotations

import threading

import pytest

from rocmega.cache import PAGE
from rocmega.engine import Engine, Request
from rocmega.errors import RequestError, StepError
from rocmega.sampling import SamplingParams
from tests.engine.fakes import FakeRunner, solo
from tests.engine.test_schedules import check_pages


@pytest.fixture
def engine():
    return Engine(FakeRunner(max_rows=3, pages=12), prefill_chunk=PAGE, seed=1, tokens_per_launch="auto")


def request(first=5, tokens=40, **fields):
    return Request([first, 1, 2], SamplingParams(max_tokens=tokens, **fields))


def finish(engine):
    while engine.running or engine.waiting:
        engine.step()
    check_pages(engine)


def test_every_step_gives_a_token_of_one_launch(engine):
    one = request()
    told = []
    one.changed = lambda request: told.append(len(request.token_ids))
    engine.add(one)
    for count in range(1, 41):
        assert engine.step() == [one]
        assert len(one.token_ids) == count
    assert told == list(range(1, 41))
    assert engine.counts.launches == 1
    assert one.token_ids == solo(one.prompt_token_ids, 40)
    assert (engine.running, engine.counts.tokens["mega"], engine.counts.steps["mega"]) == (0, 40, 40)


def test_who_comes_in_waits_for_few_tokens(engine):
    first, second = request(), request(7)
    engine.add(first)
    for _ in range(3):
        engine.step()
    ahead = len(engine.runner.flying.made)
    engine.add(second)
    while not second.token_ids:
        engine.step()
    assert len(first.token_ids) <= ahead + 2  # what had been made, the one that was being made, and the step of both
    finish(engine)
    assert [each.token_ids for each in (first, second)] == [solo(each.prompt_token_ids, 40) for each in (first, second)]


def test_who_finds_no_row_disturbs_nobody(engine):
    for first in range(3):
        engine.add(request(first))
    engine.step()
    engine.add(request(9))
    assert not engine.runner.flying.cancelled
    finish(engine)


def test_who_is_aborted_gives_his_pages_back_when_the_launch_is_over(engine):
    first, second = request(), request(7)
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.abort(first)
    assert engine.runner.flying.over
    assert (first.finish_reason, engine.running) == ("abort", 1)
    check_pages(engine)
    finish(engine)
    assert second.token_ids == solo(second.prompt_token_ids, 40)
    assert first.token_ids == solo(first.prompt_token_ids, len(first.token_ids))


def test_an_abort_of_somebody_else_lets_it_run(engine):
    first, second, third, fourth = (request(first) for first in range(4))
    for each in (first, second, third, fourth):
        engine.add(each)
    engine.step()
    engine.abort(fourth)  # still waiting
    assert not engine.runner.flying.cancelled
    finish(engine)


def test_a_stop_token_ends_it(engine):
    [*_, stop] = solo([5, 1, 2], 6)
    one, other = request(stop_token_ids=[stop]), request(7)
    engine.add(one)
    engine.add(other)
    finish(engine)
    assert one.token_ids == solo([5, 1, 2], 6)
    assert other.token_ids == solo([7, 1, 2], 40)
    assert engine.counts.launches == 2


def test_a_prompt_that_is_to_be_cached_now_ends_it(engine):
    first, second = request(), request(7)
    engine.add(first)
    engine.step()
    engine.prefill(second)  # the stand-in refuses it while a launch runs
    finish(engine)
    assert second.token_ids == solo(second.prompt_token_ids, 40)


def test_what_fails_in_it_ends_nothing_twice(engine):
    one = request()
    engine.add(one)
    engine.step()
    error = StepError(0, 1, "down", 2, 3, 4)
    engine.runner.flying.next = lambda: (_ for _ in ()).throw(error)
    with pytest.raises(StepError):
        engine.step()
    assert engine.fail(error) == [one]
    check_pages(engine)
    assert one.error is error


def test_failing_while_it_runs_waits_for_its_end(engine):
    one = request()
    engine.add(one)
    engine.step()
    engine.fail(RequestError("closed"))
    assert engine.runner.flying.over
    check_pages(engine)


def test_numbers_of_tokens():
    for tokens in (0, 257, "some"):
        with pytest.raises(RequestError, match=f"tokens_per_launch={tokens}"):
            Engine(FakeRunner(), tokens_per_launch=tokens)


def test_a_launch_that_fails_while_somebody_leaves_is_an_error_for_all(engine):
    """In the thread: whoever leaves ends the launch, and what goes wrong in that reaches those who stay."""
    from rocmega.engine.thread import EngineThread

    thread = EngineThread(engine)
    one, other = request(tokens=4 * PAGE - 10), request(7, tokens=4 * PAGE - 10)
    told = threading.Event()

    def changed(request):
        if request is one and len(one.token_ids) == 2:  # in the middle of a launch, before its next token
            engine.runner.flying.next = lambda: (_ for _ in ()).throw(StepError(0, 1, "down", 2, 3, 4))
            thread.abort(other)
        if request.error is not None:
            told.set()

    one.changed = other.changed = changed
    thread.submit(one)
    thread.submit(other)
    assert told.wait(30)
    thread.close()
    assert isinstance(one.error, StepError)
    assert engine.running == 0
    check_pages(engine)
