"""Rows that are successive tokens of one request: as one step each, to the last bit."""

from __future__ import annotations

import pytest
import torch

from rocmega.step import StepBatch
from tests.models.glm.kit import Bench

# Longer than the selection, over a page's end, shorter than it; each with room for the tokens after.
ENDS = (155, 66, 20)
# (request, first position, tokens): runs of one request, in any company.
STEPS = [[(0, 150, 4)], [(1, 62, 4)], [(2, 17, 3)], [(2, 20, 1), (0, 152, 3), (1, 63, 2)]]


def batch(subject: Bench, rows: list[tuple[int, int]]) -> StepBatch:
    requests, positions = zip(*rows, strict=True)
    tokens = torch.tensor([(131 * request + 17 * at) % subject.config.vocab_size for request, at in rows])
    at = torch.tensor(positions, dtype=torch.int32)
    return StepBatch(tokens.to(torch.int32), at, subject.table[list(requests)])


def run(subject: Bench, steps: list[list[tuple[int, int]]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Steps one after the other, over the same noise: logits of all rows, and the caches."""
    subject.reset()
    logits = [subject.mega.decode(batch(subject, rows)).logits.clone() for rows in steps]
    return torch.cat(logits), [pool.clone() for pool in subject.pools]


def rows_of(step: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(request, first + n) for request, first, count in step for n in range(count)]


@pytest.fixture(scope="module")
def subject(bench) -> Bench:
    return bench("shallow", "f32", ENDS, blocks=5)


@pytest.mark.parametrize("step", STEPS)
def test_successive_tokens_at_once_are_those_tokens_one_by_one(step, subject):
    rows = rows_of(step)
    together, pools = run(subject, [rows])
    single, expected = run(subject, [[row] for row in rows])
    assert torch.equal(together.view(torch.int32), single.view(torch.int32))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(pools, expected, strict=True))


def test_nothing_is_found_by_the_checks(bench):
    """With many blocks: of few, each has taken part in something that attention waits for anyway, and a row that does
    not wait for the entries of those before it goes unnoticed."""
    subject = bench("shallow", "f32", ENDS, blocks=32)
    rows = rows_of(STEPS[-1])
    expected, _ = run(subject, [rows])
    subject.driver.check = True
    for subject.driver.seed in (1, 2, 3):
        together, _ = run(subject, [rows])
        assert subject.driver.last_report.reports == 0
        assert torch.equal(together.view(torch.int32), expected.view(torch.int32))


def test_who_is_successive(subject):
    def first(rows):
        return batch(subject, rows).first_written().tolist()

    assert first([(0, 63), (0, 64), (0, 65), (1, 66)]) == [63, 63, 63, 66]
    assert first([(0, 10), (1, 11), (0, 12)]) == [10, 11, 12]  # another request's, and a gap
    assert first([(0, 11), (0, 10)]) == [11, 10]
