"""Whatever comes, goes and is thrown out when: no page is lost or wrongly shared, answers are those of solo runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.cache import PAGE
from rocmega.engine import Engine, Request
from rocmega.sampling import SamplingParams
from tests.engine.fakes import VOCAB, FakeRunner, solo

SCHEDULES = 10_000
LONGEST = 4 * PAGE


def check_pages(engine: Engine) -> None:
    """Every page is free, or held by exactly those who have it in their tables or in the prefix tree."""
    cache, holders = engine.runner.cache, {}
    for request in engine._running:
        pages = cache.pages_of(request.sequence.number)
        assert len(pages) * PAGE >= request.sequence.length
        for page in pages:
            holders[page] = holders.get(page, 0) + 1
    for node in engine._prefixes._nodes.values():
        for page in node.pages:
            holders[page] = holders.get(page, 0) + 1
    assert all(cache.allocator.holders(page) == holders.get(page, 0) for page in range(cache.pages))
    assert len(holders) + cache.allocator.available == cache.pages


class Schedule:
    """One engine and its requests, driven by choices in 0 ... 2^32."""

    def __init__(self, max_rows: int, pages: int, drafts: bool = False, launches: bool = False) -> None:
        self.variety = 3 if drafts else VOCAB  # few different tokens: some guesses are right
        self.runner = FakeRunner(max_rows, LONGEST, pages, self.variety)
        self.engine = Engine(
            self.runner,
            prefill_chunk=PAGE,
            seed=1,
            draft_tokens=max_rows - 1 if drafts else 0,
            tokens_per_launch="auto" if launches else 1,
        )
        self.requests: list[Request] = []

    def act(self, choice: int) -> None:
        kind, choice = choice % 8, choice // 8
        if kind < 4:
            self.add(choice)
        elif kind == 4 and self.requests:
            self.engine.abort(self.requests[choice % len(self.requests)])
        else:
            self.engine.step()
        check_pages(self.engine)

    def add(self, choice: int) -> None:
        """Prompts of a few stems, so that beginnings are shared, with tails of their own; some grow by many pages."""
        stem = choice % 3
        grows = choice // 3 % 4 == 0
        length = 20 + choice // 12 % (40 if grows else 200)
        prompt = [(stem * 5 + at * at) % VOCAB for at in range(length)]
        prompt[-1] = choice % VOCAB
        request = Request(prompt, SamplingParams(max_tokens=1 + choice // 1000 % (140 if grows else 12)))
        self.requests.append(request)
        self.engine.add(request)

    def finish(self) -> None:
        for _ in range(4000):
            if not self.engine.running and not self.engine.waiting:
                break
            self.engine.step()
        check_pages(self.engine)
        assert not self.engine.running
        assert not self.engine.waiting
        for request in self.requests:
            expected = solo(request.prompt_token_ids, request.sampling.max_tokens, self.variety)
            if request.finish_reason == "abort":
                assert request.token_ids == expected[: len(request.token_ids)]
            else:
                assert request.finish_reason == "length"
                assert request.token_ids == expected
        self.engine.forget_prefixes()
        assert self.runner.cache.allocator.available == self.runner.cache.pages


def test_ten_thousand_random_schedules():
    generator = random.Random(1)
    preempted = reused = aborted = accepted = wrong = launches = 0
    for number in range(SCHEDULES):
        rows, pages = generator.randint(1, 4), generator.randint(4, 6)
        schedule = Schedule(rows, pages, drafts=number % 4 == 0, launches=number % 4 == 1)
        for _ in range(generator.randint(1, 7)):
            schedule.act(generator.getrandbits(32))
        schedule.finish()
        preempted += schedule.engine.counts.preemptions
        reused += schedule.engine.counts.reused_tokens
        aborted += schedule.engine.counts.finished["abort"]
        accepted += schedule.engine.counts.accepted
        launches += schedule.engine.counts.launches
        wrong += schedule.engine.counts.drafted - schedule.engine.counts.accepted
    assert preempted > 100
    assert reused > 100_000
    assert aborted > 500
    assert accepted > 1000
    assert wrong > 1000
    assert launches > 1000


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(4, 9), st.integers(0, 2), st.lists(st.integers(0, 2**32 - 1), max_size=15))
def test_schedules_that_can_be_shrunk(max_rows, pages, mode, choices):
    schedule = Schedule(max_rows, pages, drafts=mode == 1, launches=mode == 2)
    for choice in choices:
        schedule.act(choice)
    schedule.finish()


@pytest.fixture
def engine():
    return Engine(FakeRunner(max_rows=2, pages=8), prefill_chunk=PAGE, seed=1)


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    while engine.running or engine.waiting:
        engine.step()


def test_decode_goes_on_while_a_long_prompt_comes_in(engine):
    short = Request([1], SamplingParams(max_tokens=20))
    engine.add(short)
    engine.step()
    engine.add(Request(list(range(90)) * 2, SamplingParams(max_tokens=2)))
    for expected in (2, 3, 4):
        engine.step()
        assert len(short.token_ids) == expected
    assert engine.runner.prefilled == [64, 64, 51]


def test_several_short_prompts_come_in_at_once(engine):
    run(engine, Request([1, 2, 3], SamplingParams(max_tokens=4)), Request([4, 5], SamplingParams(max_tokens=4)))
    assert engine.runner.steps == 4


def test_a_shared_beginning_is_prefilled_once(engine):
    prompt = [at % VOCAB for at in range(3 * PAGE)]
    first, second = (Request([*prompt[:150], last, 7], SamplingParams(max_tokens=3)) for last in (1, 2))
    run(engine, first)
    engine.runner.prefilled.clear()
    run(engine, second)
    assert engine.runner.prefilled == [23]
    assert (first.reused_tokens, second.reused_tokens) == (0, 128)
    assert second.token_ids == solo(second.prompt_token_ids, 3)
    assert engine.pages().kept == 2


def test_the_oldest_unused_beginning_goes_first(engine):
    stems = [[stem] * (PAGE + 1) for stem in range(4)]
    for stem in (*stems, stems[1]):
        run(engine, Request(stem, SamplingParams(max_tokens=1)))
    assert engine.pages().kept == 4
    kept = []
    while engine.pages().kept:
        engine._prefixes.evict()
        kept.append([key[1][0] for key in engine._prefixes._nodes])
    assert kept == [[2, 3, 1], [3, 1], [1], []]


def test_a_beginning_goes_before_what_it_continues(engine):
    run(engine, Request([1] * (3 * PAGE + 1), SamplingParams(max_tokens=1)))
    while engine.pages().kept:
        assert (
            engine._prefixes.match([1] * (3 * PAGE))[1] == engine._prefixes.match([1] * (engine.pages().kept * PAGE))[1]
        )
        engine._prefixes.evict()


def test_who_came_last_is_thrown_out_and_answers_the_same(engine):
    engine = Engine(FakeRunner(max_rows=2, pages=4), prefill_chunk=PAGE, seed=1)
    first, second = (Request([n] * 60, SamplingParams(max_tokens=120)) for n in (1, 2))
    run(engine, first, second)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.token_ids == solo([2] * 60, 120)


def test_prefill_now_or_not_at_all(engine):
    requests = [Request([n] * 100, SamplingParams(max_tokens=3)) for n in range(3)]
    engine.prefill(requests[0])
    engine.prefill(requests[1])
    assert engine.runner.prefilled == [64, 35, 64, 35]
    from rocmega.errors import RequestError

    with pytest.raises(RequestError, match="2 of 2 rows"):
        engine.prefill(requests[2])
    assert engine.step() == requests[:2]
    engine.abort(requests[0])
    engine.prefill(requests[2])
    check_pages(engine)


def test_too_many_wait(engine):
    from rocmega.errors import RequestError

    engine.max_waiting = 3
    for _ in range(3):
        engine.add(Request([1]))
    with pytest.raises(RequestError, match="3 requests wait already"):
        engine.add(Request([1]))
    while engine.waiting or engine.running:
        engine.step()
    assert engine.counts.finished == {"length": 3}


def test_pages_are_accounted_for(engine):
    engine.prefill(Request([1] * 130, SamplingParams(max_tokens=5)))
    use = engine.pages()
    assert (use.total, use.free, use.held, use.kept) == (8, 5, 3, 2)


def test_a_step_that_fails_loses_nothing(engine):
    requests = [Request([1] * 70, SamplingParams(max_tokens=3)), Request([2], SamplingParams(max_tokens=3))]
    for request in requests:
        engine.add(request)
    step, engine.runner.step = engine.runner.step, lambda *args, **options: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.step = step
    check_pages(engine)
    run(engine)
    assert [request.token_ids for request in requests] == [solo([1] * 70, 3), solo([2], 3)]
