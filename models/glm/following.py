"""The standard path on choices that somebody else made: what a comparison of two paths begins with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocmega.models.common.formulas import Normed, weigh
from rocmega.models.glm.picks import Picks, Positions
from rocmega.models.glm.stages import LayerStages
from rocmega.models.glm.standard import StandardPath
from rocmega.step import StepBatch


@dataclass(frozen=True)
class Scores:
    """What the choices of a step are made from.

    Fields: experts: of each mixture layer, router score plus bias, float32 [rows, experts]; positions: of each layer
    whose indexer leaves something out, float32 [rows, length], as standard deviations from their mean,
    -inf behind a row's own position.
    """

    experts: list[torch.Tensor]
    positions: list[torch.Tensor]

    def apart(self, other: Scores) -> tuple[float, float]:
        """The largest difference between scores of experts, and between those of positions."""
        return _apart(self.experts, other.experts), _apart(self.positions, other.positions)

    def lost(self, picks: Picks) -> tuple[float, float]:
        """By how much the best left out beats the worst chosen, of experts and of positions: 0 for the best choice.

        Infinite for what is no choice: numbers that are not ascending or do not exist, or fewer than there are.
        """
        chosen = [each for each in picks.positions if each is not None]
        experts = [(each, torch.ones_like(each, dtype=torch.bool)) for each in picks.experts]
        return _lost(self.experts, experts), _lost(self.positions, chosen)


class FollowingPath(StandardPath):
    """Decode steps that take experts and positions from `Picks`, and say what scores they would have chosen by."""

    def follow(self, batch: StepBatch, picks: Picks | None = None) -> tuple[torch.Tensor, Scores, Picks]:
        """One token of each row by `picks`, by its own if there are none.

        Returns logits float32 [rows, vocab], the scores and what was chosen. Raises RequestError as `decode` does.
        """
        self._scores, made = Scores([], []), Picks()
        self._experts: Iterator[torch.Tensor] = iter(picks.experts if picks else ())
        self._positions: Iterator[Positions] = iter(
            [each for each in picks.positions if each is not None] if picks else ()
        )
        logits = self.run(*self.place(batch), made)
        return logits, self._scores, made

    def _route(self, layer: LayerStages, y: Normed) -> tuple[torch.Tensor, torch.Tensor]:
        logits = layer.router_logits(y.rows())
        scores = logits.sigmoid()
        self._scores.experts.append(scores + layer.vector("router_bias"))
        experts = next(self._experts, None)
        if experts is None:
            return layer.route(logits)
        return experts, weigh(scores, experts, self.config.routed_scaling_factor)

    def _take(self, scores: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.arange(scores.shape[-1], device=scores.device) <= positions[..., None]
        counts = seen.sum(-1, keepdim=True)
        mean = scores.where(seen, 0.0).sum(-1, keepdim=True) / counts
        spread = ((scores - mean).where(seen, 0.0).square().sum(-1, keepdim=True) / counts).sqrt()
        scaled = (scores - mean) / spread.clamp_min(torch.finfo(spread.dtype).tiny)
        self._scores.positions.append(scaled.where(seen, float("-inf"))[:, 0])
        chosen = next(self._positions, None)
        if chosen is None:
            return super()._take(scores, positions)
        return chosen[0][:, None], chosen[1][:, None]


def _apart(mine: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    pairs = zip(mine, others, strict=True)
    return max((float((a - b).nan_to_num(0.0).abs().max()) for a, b in pairs), default=0.0)  # inf - inf is nan


def _lost(scores: list[torch.Tensor], chosen: list[Positions]) -> float:
    return max((_lost_in(*each) for each in zip(scores, chosen, strict=True)), default=0.0)


def _lost_in(scores: torch.Tensor, chosen: Positions) -> float:
    """Scores [rows, N]; chosen: numbers [rows, K], ascending, those that count first, and which count."""
    numbers, valid = chosen
    possible = scores.isfinite().sum(-1).clamp_max(numbers.shape[1])
    ascending = (numbers[:, 1:] > numbers[:, :-1]) | ~valid[:, 1:]
    if not (ascending.all() and (valid.sum(-1) == possible).all() and int(numbers.max()) < scores.shape[1]):
        return float("inf")
    taken = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(1, numbers, valid.to(torch.int32)) > 0
    worst = scores.masked_fill(~taken, float("inf")).amin(-1)
    best_left = scores.masked_fill(taken, float("-inf")).amax(-1)
    return float((best_left - worst).clamp_min(0.0).max())
