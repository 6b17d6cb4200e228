"""Many tokens in one launch: the bits of as many launches of one."""

from __future__ import annotations

import pytest
import torch

from rocmega.errors import RequestError
from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice
from rocmega.step import StepBatch
from tests.models.glm.kit import Bench

# Rows that become longer than the selection of 24, cross a page's end, or are longer already; with room for 8 more.
ENDS = (30, 71, 155)
FIRST = (21, 60, 147)
TOKENS = 6
NONE = [()] * 3


@pytest.fixture(scope="module")
def subject(bench) -> Bench:
    return bench("shallow", "f32", ENDS, blocks=5)


def batch(subject: Bench, tokens: list[int], step: int = 0) -> StepBatch:
    return StepBatch(
        torch.tensor(tokens, dtype=torch.int32), torch.tensor(FIRST, dtype=torch.int32) + step, subject.table
    )


def choices(step: int) -> list[Choice | None]:
    sampling = SamplingParams(temperature=1.3, top_p=0.9)
    return [None, Choice(sampling, 5, 10 + step), Choice(sampling, 6, step)]


def one_by_one(subject: Bench, drawn: bool) -> tuple[list[list[int]], list[torch.Tensor]]:
    subject.reset()
    tokens, out = [7, 8, 9], []
    for step in range(TOKENS):
        result = subject.mega.decode(
            batch(subject, tokens, step), logits=False, choices=choices(step) if drawn else None
        )
        tokens = result.tokens.tolist()
        out.append(tokens)
    return out, [pool.clone() for pool in subject.pools]


def at_once(subject: Bench, drawn: bool, stops=NONE, tokens=TOKENS) -> tuple[list[list[int]], list[torch.Tensor]]:
    subject.reset()
    chosen = list(subject.mega.launch_many(batch(subject, [7, 8, 9]), tokens, stops, choices(0) if drawn else None))
    return chosen, [pool.clone() for pool in subject.pools]


@pytest.mark.parametrize("drawn", [False, True])
def test_the_same_tokens_and_caches(drawn, subject):
    tokens, pools = one_by_one(subject, drawn)
    many, cached = at_once(subject, drawn)
    assert many == tokens
    assert len({tuple(row) for row in tokens}) > 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(cached, pools, strict=True))


def test_the_launch_ends_where_a_row_stops(subject):
    tokens, _ = one_by_one(subject, drawn=True)
    for row in range(3):
        end = next(step for step in (2, 1, 3, 4) if tokens[step][row] not in [tokens[at][row] for at in range(step)])
        stops = [[tokens[end][row], 3] if at == row else [511] for at in range(3)]
        assert at_once(subject, True, stops)[0] == tokens[: end + 1]


def test_steps_of_one_go_on_after_it(subject):
    tokens, _ = one_by_one(subject, drawn=False)
    subject.reset()
    done = list(subject.mega.launch_many(batch(subject, [7, 8, 9]), TOKENS - 1, NONE))
    after = subject.mega.decode(batch(subject, done[-1], TOKENS - 1), logits=False).tokens.tolist()
    assert [*done, after] == tokens


@pytest.mark.parametrize("blocks", [3, 32])
def test_nothing_is_found_by_the_checks(blocks, bench):
    subject = bench("shallow", "f32", ENDS, blocks=blocks)
    expected = at_once(subject, drawn=True, tokens=3)
    subject.driver.check, subject.driver.seed = True, blocks
    tokens, pools = at_once(subject, drawn=True, tokens=3)
    assert subject.driver.last_report.reports == 0
    assert tokens == expected[0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(pools, expected[1], strict=True))


def test_what_one_launch_cannot_do(subject):
    with pytest.raises(RequestError, match="257 tokens in a launch"):
        subject.mega.launch_many(batch(subject, [7, 8, 9]), 257, NONE)
    with pytest.raises(RequestError, match="at most 16 tokens at which it stops"):
        subject.mega.launch_many(batch(subject, [7, 8, 9]), 2, [range(17), (), ()])
    with pytest.raises(RequestError, match="past the configured context"):
        subject.mega.launch_many(batch(subject, [7, 8, 9]), 50, NONE)
