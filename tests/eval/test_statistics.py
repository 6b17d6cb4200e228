import random

import pytest
import torch

from rocmega.eval.statistics import Answer, mcnemar, pair, wilson


def answer(tokens: list[int], right: bool, shift: float = 0.0) -> Answer:
    logits = torch.zeros(len(tokens), 8)
    for at, token in enumerate(tokens):
        logits[at, token] = 1 + shift
    return Answer("", tokens, right, logits)


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 1, 1.0),
        (0, 5, 2 / 32),
        (6, 0, 2 / 64),
        (1, 9, 2 * (1 + 10) / 1024),
        (2, 8, 0.109375),
    ],
)
def test_mcnemar_is_a_binomial_test_of_the_discordant_pairs(lost, won, p):
    assert mcnemar(lost, won) == pytest.approx(p)
    assert mcnemar(won, lost) == mcnemar(lost, won)


def test_a_true_hypothesis_is_rejected_at_most_as_often_as_it_says():
    draw = random.Random(1)
    rejected = 0
    for _ in range(2000):
        won = sum(draw.random() < 0.5 for _ in range(20))
        rejected += mcnemar(20 - won, won) < 0.05
    assert 30 < rejected < 110  # 4.1 % in theory: 82 of 2000, give or take 9


def test_wilsons_interval():
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == pytest.approx(1)
    assert wilson(0, 10)[1] == pytest.approx(1 - wilson(10, 10)[0])


def test_pairs_count_what_only_one_got_right_and_compare_logits_up_to_the_first_other_token():
    first = [answer([1, 2], True), answer([3, 4, 5], True), answer([6], False)]
    second = [answer([1, 2], True, 0.5), answer([3, 5, 1, 2], False), answer([6], False)]
    found = pair("a", first, "b", second)
    assert (found.asked, found.base_right, found.other_right, found.lost, found.won) == (3, 2, 1, 1, 0)
    assert found.same == 2
    assert found.tokens == 2 + 2 + 1
    assert found.max_difference == 1.0
    assert found.mean_difference == pytest.approx((0.5 + 0.5 + 1 + 1) / (5 * 8))
    assert found.gap == 1.0
    assert found.p_value == 1
    assert found.to_json()["agreement"] == pytest.approx(2 / 3)
    assert not found.distinguishable


def test_the_same_answers_have_no_gap():
    found = pair("a", [answer([1], True)], "b", [answer([1], True)])
    assert found.gap is None
    assert found.max_difference == 0
