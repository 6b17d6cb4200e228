"""A path on somebody's choices: what it needs of them, and how choices are judged."""

from __future__ import annotations

import pytest
import torch

from rocmega.models.glm.following import FollowingPath
from rocmega.models.glm.picks import Picks
from rocmega.step import StepBatch

POSITIONS = [75, 20, 64]  # two longer than index_topk
OTHER = {"a number twice": lambda n: torch.cat([n[:, :1], n[:, :-1]], 1), "fewer": lambda n: n[:, :-1]}


@pytest.fixture
def subject(model, prompt) -> tuple[FollowingPath, StepBatch, torch.Tensor]:
    """A float32 path that follows, a batch, and the logits of the path that does not."""
    driven = model()
    for name, position in zip("abc", POSITIONS, strict=True):
        driven.prefill(name, prompt[:position])
        driven.cache.grow(name, position + 1)
    table = driven.cache.block_table(list("abc"))
    batch = StepBatch(torch.tensor([3, 5, 7]).int(), torch.tensor(POSITIONS).int(), table)
    path = FollowingPath(driven.config, driven.weights, driven.cache)
    return path, batch, driven.path.decode(batch)


def test_its_own_choices_are_the_standard_paths_and_the_best(subject):
    path, batch, logits = subject
    alone, scores, picks = path.follow(batch)
    assert torch.equal(alone, logits)
    assert scores.lost(picks) == (0.0, 0.0)
    again, same, _ = path.follow(batch, picks)
    assert torch.equal(again, logits)
    assert scores.apart(same) == (0.0, 0.0)


def test_other_choices_are_taken_and_cost_what_they_lose(subject):
    path, batch, logits = subject
    _, scores, picks = path.follow(batch)
    experts = [each.clone() for each in picks.experts]
    left = scores.experts[0][1].scatter(0, experts[0][1], float("-inf")).argmax()
    worst = int(scores.experts[0][1][experts[0][1]].argmin())
    difference = float(scores.experts[0][1][experts[0][1, worst]] - scores.experts[0][1][left])
    experts[0][1, worst] = left
    experts[0] = experts[0].sort(dim=1).values
    other, followed, _ = path.follow(batch, Picks(experts, picks.positions))
    assert ((other - logits).abs().amax(1) > 1e-3).tolist() == [False, True, False]
    assert followed.lost(Picks(experts, picks.positions))[0] > 0.999 * difference > 0


@pytest.mark.parametrize("fault", OTHER)
def test_what_is_no_choice_is_infinitely_wrong(fault, subject):
    path, batch, _ = subject
    _, scores, picks = path.follow(batch)
    experts = [OTHER[fault](each) for each in picks.experts]
    positions = [each and (OTHER[fault](each[0]), OTHER[fault](each[1])) for each in picks.positions]
    if fault == "a number twice":
        assert scores.lost(Picks(experts, picks.positions))[0] == float("inf")
    assert scores.lost(Picks(picks.experts, positions))[1] == float("inf") or fault == "fewer"
