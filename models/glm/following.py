"""The standard path on choices that somebody else made: what a comparison of two paths begins with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocmega.models.common.choices import Numbers, apart, lost, standardized
from rocmega.models.common.formulas import Normed, weigh
from rocmega.models.glm.picks import Picks
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
        return apart(self.experts, other.experts), apart(self.positions, other.positions)

    def lost(self, picks: Picks) -> tuple[float, float]:
        """What `choices.lost` says of experts and of positions."""
        chosen = [each for each in picks.positions if each is not None]
        experts = [(each, torch.ones_like(each, dtype=torch.bool)) for each in picks.experts]
        return lost(self.experts, experts), lost(self.positions, chosen)


class FollowingPath(StandardPath):
    """Decode steps that take experts and positions from `Picks`, and say what scores they would have chosen by."""

    def follow(self, batch: StepBatch, picks: Picks | None = None) -> tuple[torch.Tensor, Scores, Picks]:
        """One token of each row by `picks`, by its own if there are none.

        Returns logits float32 [rows, vocab], the scores and what was chosen. Raises RequestError as `decode` does.
        """
        self._scores, made = Scores([], []), Picks()
        self._experts: Iterator[torch.Tensor] = iter(picks.experts if picks else ())
        self._positions: Iterator[Numbers] = iter(
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
        self._scores.positions.append(standardized(scores.where(seen, float("-inf"))[:, 0]))
        chosen = next(self._positions, None)
        if chosen is None:
            return super()._take(scores, positions)
        return chosen[0][:, None], chosen[1][:, None]
