"""Guesses: where they come from, and that the answer is the same with and without them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocmega.engine import Engine, Request
from rocmega.engine.drafts import LONGEST, SHORTEST, PromptLookup
from rocmega.sampling import SamplingParams
from tests.engine.fakes import FakeRunner, solo


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The same without an index: the longest group that came before, at its last place."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[end - size : end] == tokens[-size:]:
                return (tokens[end:] * count)[:count]
    return []


def test_what_followed_the_last_time():
    lookup = PromptLookup()
    lookup.extend([1, 2, 3, 4, 1, 2, 9, 1, 2])
    assert lookup.draft(3) == [9, 1, 2]
    lookup.extend([3])
    assert lookup.draft(2) == [4, 1]  # 1 2 3 came before, and is longer than 2 3
    lookup.extend([77])
    assert lookup.draft(2) == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8), st.integers(1, 5))
def test_the_index_finds_what_a_search_finds(pieces, count):
    lookup, tokens = PromptLookup(), []
    for piece in pieces:
        lookup.extend(piece)
        tokens += piece
        assert lookup.draft(count) == looked_up(tokens, count)


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    while engine.running or engine.waiting:
        engine.step()


def test_right_guesses_save_steps_and_change_nothing():
    runner = FakeRunner(max_rows=4, variety=1)  # it always says the same
    request = Request([5, 0, 0, 0], SamplingParams(max_tokens=21))
    run(Engine(runner, draft_tokens=3, seed=1), request)
    assert request.token_ids == [0] * 21
    assert runner.steps == 6  # 5 times 4 tokens, and the last
    assert (request.drafted, request.accepted) == (15, 15)
    assert request.output().num_accepted_tokens == 15


def test_no_more_tokens_than_asked_for_and_no_more_rows_than_there_are():
    runner = FakeRunner(max_rows=4, variety=1)
    requests = [Request([n, 0, 0, 0], SamplingParams(max_tokens=n)) for n in (1, 2, 7)]
    run(Engine(runner, draft_tokens=3, seed=1), *requests)
    assert [len(request.token_ids) for request in requests] == [1, 2, 7]


def test_what_is_known_is_repeated_many_tokens_at_a_time():
    runner = FakeRunner(max_rows=4, pages=4)
    engine = Engine(runner, seed=1, prefill_chunk=64)
    first, second = Request([1] * 60, SamplingParams(max_tokens=90)), Request([2] * 60, SamplingParams(max_tokens=90))
    run(engine, first, second)
    assert second.preemptions == 1
    assert second.token_ids == solo([2] * 60, 90)
    alone = FakeRunner(max_rows=1, pages=4)
    run(Engine(alone, seed=1, prefill_chunk=64), Request([2] * 60, SamplingParams(max_tokens=90)))
    again = runner.steps - 2 * alone.steps  # steps beyond those of two requests one after the other
    assert again < 0


def test_a_stop_token_among_guesses_ends_the_answer():
    runner = FakeRunner(max_rows=4, variety=1)
    request = Request([5, 0, 0, 0], SamplingParams(max_tokens=21, stop_token_ids=[0]))
    run(Engine(runner, draft_tokens=3, seed=1), request)
    assert request.token_ids == [0]
    assert request.finish_reason == "stop"
    assert runner.cache.allocator.available == runner.cache.pages
