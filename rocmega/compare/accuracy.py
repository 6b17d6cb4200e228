"""Whether an arm computes the model: its logits against float32, row by row.

The reference is the same step on the same weights and cache with nothing rounded. How far a correct arm is from it
depends on the number formats and on the model: where two experts are nearly equal, rounding decides, and such a row's
logits are some per cent off. So the formats' own error is measured: the standard path's formulas with activations
rounded where the formats say so, and all else in float32. An arm is judged on several tokens a row, by its typical row
and by each row's best token, so that a row with a tie decides nothing; neither may be more than FACTOR times as far off
as the formats' typical row. A forgotten expert, a wrong scale or a stale word is in every token.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rocmega.compare.arms import Step
    from rocmega.compare.subject import Subject
    from rocmega.step import StepBatch

FACTOR = 2.0
SLACK = 1e-4  # float32 sums in another order, and f32 products as three of TF32, through all layers
MOST = 0.3  # an error of the formats alone beyond which no bound would tell right from wrong
ROWS = 8  # that are judged at least, each on DRAWS tokens at least
DRAWS = 3


@dataclass(frozen=True)
class Verdict:
    """Distances are relative L2 norms of a row's logits from float32's.

    Fields:
        error: of the typical row; None if there are logits that are not finite.
        worst: the largest, over rows, of a row's best token.
        bound: what both may be. formats: what the formats' rounding gives the typical row.
        agree: how many of the `judged` greedy tokens are float32's.
    """

    error: float | None
    worst: float | None
    bound: float
    formats: float
    agree: int
    judged: int

    @property
    def reason(self) -> str | None:
        """Why there is no latency to show, None if the arm passed."""
        if self.error is None or self.worst is None:
            return "its logits are not finite"
        if self.formats > MOST:
            return f"the number formats alone are {self.formats:.2g} away from float32 here: nothing can be judged"
        if max(self.error, self.worst) > self.bound:
            far = f"{self.error:.2g} in the typical row, {self.worst:.2g} in the worst"
            return f"wrong: away from float32 by {far}, and the number formats explain {self.bound:.2g}"
        return None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "passed": self.reason is None}


@dataclass(frozen=True)
class Expected:
    """What float32 says of a batch. tokens: int32 [rows] of each draw; logits: theirs; formats: see Verdict."""

    tokens: list[torch.Tensor]
    logits: list[torch.Tensor]
    formats: float


class Judge:
    """Knows what float32 says of a subject's steps."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._exact = subject.standard(activations="f32")
        self._rounded = subject.standard(matrix_units=False)

    def expect(self, batch: StepBatch) -> Expected:
        """Runs the batch, with its own tokens and others, in float32."""
        draws = max(DRAWS, -(-ROWS // batch.rows))
        batches = [batch, *(self.subject.with_other_tokens(batch, seed) for seed in range(1, draws))]
        logits = [self._exact.decode(each) for each in batches]
        errors = [row_errors(self._rounded.decode(b), exact) for b, exact in zip(batches, logits, strict=True)]
        typical = statistics.median(error for draw in errors for error in draw)
        return Expected([each.tokens for each in batches], logits, typical)

    def judge(self, step: Step, expected: Expected) -> Verdict:
        """Runs an arm on the same tokens; afterwards it has the batch's own again."""
        errors, agree = [], 0
        for tokens, reference in zip(expected.tokens, expected.logits, strict=True):
            step.place(tokens)
            logits = step.logits()
            errors.append(row_errors(logits, reference))
            agree += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        step.place(expected.tokens[0])
        every = [error for draw in errors for error in draw]
        bound = FACTOR * expected.formats + SLACK
        if not all(map(math.isfinite, every)):
            return Verdict(None, None, bound, expected.formats, agree, len(every))
        worst = max(map(min, zip(*errors, strict=True)))
        return Verdict(statistics.median(every), worst, bound, expected.formats, agree, len(every))


def row_errors(values: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Relative L2 distance of each row [rows, n] from the reference's."""
    distance = (values.double() - reference.double()).norm(dim=-1)
    return (distance / reference.double().norm(dim=-1)).tolist()
