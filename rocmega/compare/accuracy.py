"""Whether an arm computes the model: its logits against float32, row by row, on the arm's own choices.

The reference is the same step on the same weights and cache with nothing rounded. Where two experts or two positions
are nearly equal, rounding decides, and a step of another choice is another step: its logits are some per cent or half
their size off, in one token and not in the next, whichever arm it is. (Judged without regard to choices, the formats'
own rounding failed its own bound now and then.) So two things are asked.

Its choices: an arm says what it chose. The best expert or position that it left out may beat the worst that it took by
no more than rounding explains: both scores may be FACTOR times as far off as the formats' are.

Its arithmetic: float32 follows the arm's choices, and no row of any token may be more than FACTOR times as far off as
the formats' farthest, nor the typical row than FACTOR times their typical one. How far off the formats are is measured
too: the standard path's formulas with activations rounded where the formats say so and all else in float32, and float32
on their choices.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from rocmega.compare.arms import Step
    from rocmega.compare.subject import Subject
    from rocmega.step import StepBatch

FACTOR = 2.0
SLACK = 1e-4  # float32 sums in another order, and f32 products as three of TF32, through all layers
MOST = 0.3  # an error of the formats alone beyond which no bound would tell right from wrong
ROWS = 8  # that are judged at least, each on DRAWS tokens at least
DRAWS = 3


class Following(Protocol):
    """A path that takes somebody's choices, or makes its own: logits, scores, choices (models/glm/following.py)."""

    def follow(self, batch: StepBatch, picks: Any = None) -> tuple[torch.Tensor, Any, Any]: ...


@dataclass(frozen=True)
class Verdict:
    """Distances are relative L2 norms of a row's logits from float32's.

    Fields:
        error: of the typical row; None if there are logits that are not finite. bound: what it may be.
        worst: of the farthest row. worst_bound: what it may be. formats: what their rounding gives the typical row.
        beaten: by how much the best that was left out beats what was chosen; 1 is what rounding explains.
        agree: how many of the `judged` greedy tokens are float32's.
    """

    error: float | None
    worst: float | None
    bound: float
    worst_bound: float
    formats: float
    beaten: float
    agree: int
    judged: int

    @property
    def reason(self) -> str | None:
        """Why there is no latency to show, None if the arm passed."""
        if self.error is None or self.worst is None:
            return "its logits are not finite"
        if self.formats > MOST:
            return f"the number formats alone are {self.formats:.2g} away from float32 here: nothing can be judged"
        if self.beaten > 1:
            return (
                f"wrong: it chose experts or positions that others beat by {self.beaten:.2g} times what the number "
                "formats explain"
            )
        if self.error > self.bound or self.worst > self.worst_bound:
            return (
                f"wrong: on its own choices of experts and positions, away from float32 by {self.error:.2g} in the "
                f"typical row and {self.worst:.2g} in the worst, and the number formats explain {self.bound:.2g} and "
                f"{self.worst_bound:.2g}"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "passed": self.reason is None}


@dataclass(frozen=True)
class Expected:
    """What the formats explain of a batch.

    Fields:
        batches: its own tokens and others. typical, worst: rows' errors.
        apart: of scores, of each kind of choice that the family has (`Scores.apart`).
    """

    batches: list[StepBatch]
    typical: float
    worst: float
    apart: tuple[float, ...]

    def beaten(self, lost: tuple[float, ...]) -> float:
        """What `Scores.lost` says, as a share of what two scores that are as far off as they may be could lose."""
        return max(lost / (2 * (FACTOR * apart + SLACK)) for lost, apart in zip(lost, self.apart, strict=True))


def expect(exact: Following, rounded: Following, batches: list[StepBatch]) -> Expected:
    """Runs batches with the formats' rounding, and in float32 on the choices that this makes."""
    errors, apart = [], []
    for batch in batches:
        logits, scores, picks = rounded.follow(batch)
        reference, exact_scores, _ = exact.follow(batch, picks)
        errors += row_errors(logits, reference)
        apart.append(scores.apart(exact_scores))
    most = tuple(max(of) for of in zip(*apart, strict=True))
    return Expected(batches, statistics.median(errors), max(errors), most)


def judge(exact: Following, expected: Expected, results: list[tuple[torch.Tensor, Any]]) -> Verdict:
    """What an arm's logits and picks for each of the batches are worth."""
    errors, agree, beaten = [], 0, 0.0
    for batch, (logits, picks) in zip(expected.batches, results, strict=True):
        reference, scores, _ = exact.follow(batch, picks)
        errors += row_errors(logits, reference)
        agree += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        beaten = max(beaten, expected.beaten(scores.lost(picks)))
    finite = all(map(math.isfinite, errors))
    return Verdict(
        error=statistics.median(errors) if finite else None,
        worst=max(errors) if finite else None,
        bound=FACTOR * expected.typical + SLACK,
        worst_bound=FACTOR * expected.worst + SLACK,
        formats=expected.typical,
        beaten=beaten,
        agree=agree,
        judged=len(errors),
    )


class Judge:
    """Knows what float32 says of a subject's steps."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._exact = subject.following(activations="f32")
        self._rounded = subject.following(matrix_units=False)

    def expect(self, batch: StepBatch) -> Expected:
        """Runs the batch, with its own tokens and others."""
        draws = max(DRAWS, -(-ROWS // batch.rows))
        batches = [batch, *(self.subject.with_other_tokens(batch, seed) for seed in range(1, draws))]
        return expect(self._exact, self._rounded, batches)

    def judge(self, step: Step, expected: Expected) -> Verdict:
        """Runs an arm on the same tokens; afterwards it has the batch's own again."""
        results = []
        for batch in expected.batches:
            step.place(batch.tokens)
            results.append((step.logits().clone(), step.picks()))
        step.place(expected.batches[0].tokens)
        return judge(self._exact, expected, results)


def row_errors(values: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Relative L2 distance of each row [rows, n] from the reference's."""
    distance = (values.double() - reference.double()).norm(dim=-1)
    return (distance / reference.double().norm(dim=-1)).tolist()
