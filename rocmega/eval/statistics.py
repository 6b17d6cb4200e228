"""Paired statistics of two ways to answer the same questions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Answer:
    """text and its token_ids, whether it is right, and the logits behind each token, float32 [tokens, vocab]."""

    text: str
    token_ids: list[int]
    right: bool
    logits: torch.Tensor


@dataclass(frozen=True)
class Pairing:
    """What `base` and `other` did with the same questions.

    Fields:
        base, other: what they are called.
        asked: questions. base_right, other_right: answered right.
        lost, won: those that only base, or only other, answered right.
        p_value: exact McNemar test, two-sided: how likely so uneven a split of lost + won is if both are as good.
        same: questions to which both gave the same tokens.
        tokens: how many tokens have the same ones before them in both; only their logits are compared.
        mean_difference, max_difference: |base's logit - other's|, over those tokens and all words.
        gap: where the two first chose different tokens, the largest lead that base's token had over the next best;
            None if they never did. A lead below twice max_difference may go either way.
    """

    base: str
    other: str
    asked: int
    base_right: int
    other_right: int
    lost: int
    won: int
    p_value: float
    same: int
    tokens: int
    mean_difference: float
    max_difference: float
    gap: float | None

    @property
    def distinguishable(self) -> bool:
        """Whether chance is no good explanation for the difference of accuracies."""
        return self.p_value < SIGNIFICANT

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agreement": self.same / self.asked, "distinguishable": self.distinguishable}


def pair(base: str, first: Sequence[Answer], other: str, second: Sequence[Answer]) -> Pairing:
    """Compares answers to the same questions, in the same order."""
    pairs = list(zip(first, second, strict=True))
    lost = sum(a.right and not b.right for a, b in pairs)
    won = sum(b.right and not a.right for a, b in pairs)
    total, count, most, tokens, gaps = 0.0, 0, 0.0, 0, []
    for a, b in pairs:
        shared = _shared(a.token_ids, b.token_ids)
        difference = (a.logits[:shared].double() - b.logits[:shared].double()).abs()
        total, count, most = (
            total + float(difference.sum()),
            count + difference.numel(),
            max(most, float(difference.max())),
        )
        tokens += shared
        if a.token_ids != b.token_ids:
            best, next_best = a.logits[shared - 1].topk(2).values.tolist()
            gaps.append(best - next_best)
    return Pairing(
        base,
        other,
        asked=len(pairs),
        base_right=sum(a.right for a, _ in pairs),
        other_right=sum(b.right for _, b in pairs),
        lost=lost,
        won=won,
        p_value=mcnemar(lost, won),
        same=sum(a.token_ids == b.token_ids for a, b in pairs),
        tokens=tokens,
        mean_difference=total / count,
        max_difference=most,
        gap=max(gaps, default=None),
    )


def _shared(a: list[int], b: list[int]) -> int:
    """How many tokens have the same ones before them: up to the first that differs, itself counted."""
    at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if at is None else at + 1


def mcnemar(lost: int, won: int) -> float:
    """The exact two-sided p-value of McNemar's test: a binomial test of the discordant pairs against a half."""
    trials, fewer = lost + won, min(lost, won)
    tail = sum(math.comb(trials, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**trials)


def wilson(right: int, asked: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval (1927): where the accuracy lies, with 95 %, of which `right` of `asked` is a draw."""
    share, weight = right / asked, z * z / asked
    middle, half = share + weight / 2, z * math.sqrt(share * (1 - share) / asked + weight / asked / 4)
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))
