"""Choices of a step, judged by the scores they were made from.

Where two experts or positions are nearly equal, rounding decides, and the step of another choice is another step, not a
less exact one. So paths are compared on equal choices, and choices by how much better the best is that they left out.

Scores are float32 [rows, N], -inf for what cannot be chosen, +inf for what has to be.
"""

from __future__ import annotations

import torch

Numbers = tuple[torch.Tensor, torch.Tensor]  # int64 [rows, K], ascending, those that count first; bool, which count


def standardized(scores: torch.Tensor) -> torch.Tensor:
    """Each row's finite scores as standard deviations from their mean."""
    finite = scores.isfinite()
    counts = finite.sum(-1, keepdim=True)
    mean = scores.where(finite, 0.0).sum(-1, keepdim=True) / counts
    spread = ((scores - mean).where(finite, 0.0).square().sum(-1, keepdim=True) / counts).sqrt()
    return torch.where(finite, (scores - mean) / spread.clamp_min(torch.finfo(spread.dtype).tiny), scores)


def apart(mine: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference between two steps' scores."""
    pairs = zip(mine, others, strict=True)
    return max((float((a - b).nan_to_num(0.0).abs().max()) for a, b in pairs), default=0.0)  # inf - inf is nan


def lost(scores: list[torch.Tensor], chosen: list[Numbers]) -> float:
    """By how much the best that was left out beats the worst that was chosen; 0 for the best choice.

    Infinite for what is no choice: numbers that are not ascending or do not exist, or fewer than there are.
    """
    return max((_lost(*each) for each in zip(scores, chosen, strict=True)), default=0.0)


def _lost(scores: torch.Tensor, chosen: Numbers) -> float:
    numbers, valid = chosen
    possible = (scores > float("-inf")).sum(-1).clamp_max(numbers.shape[1])
    ascending = (numbers[:, 1:] > numbers[:, :-1]) | ~valid[:, 1:]
    if not (ascending.all() and (valid.sum(-1) == possible).all() and int(numbers.max()) < scores.shape[1]):
        return float("inf")
    taken = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(1, numbers, valid.to(torch.int32)) > 0
    worst = scores.masked_fill(~taken, float("inf")).amin(-1)
    best_left = scores.masked_fill(taken, float("-inf")).amax(-1)
    return float((best_left - worst).nan_to_num(float("inf"), float("inf")).clamp_min(0.0).max())
