"""The standard path on choices that somebody else made: what a comparison of two paths begins with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocmega.models.common.choices import Numbers, apart, lost, standardized
from rocmega.models.common.formulas import Normed, weigh
from rocmega.models.deepseek.picks import Picks
from rocmega.models.deepseek.stages import LayerStages
from rocmega.models.deepseek.standard import StandardPath
from rocmega.step import StepBatch


@dataclass(frozen=True)
class Scores:
    """What the choices of a step are made from, for each choice of `Picks` that leaves something out.

    Fields:
        experts: the router's scores plus biases, float32 [rows, experts].
        entries: index scores, float32 [rows, length], as standard deviations from their mean; -inf for what a row does
            not see, or what is no candidate.
        candidates: the best index score of each block, likewise; infinite for the newest.
    """

    experts: list[torch.Tensor]
    entries: list[torch.Tensor]
    candidates: list[torch.Tensor]

    def apart(self, other: Scores) -> tuple[float, float, float]:
        """The largest difference between scores of experts, of entries, and of candidates."""
        return (
            apart(self.experts, other.experts),
            apart(self.entries, other.entries),
            apart(self.candidates, other.candidates),
        )

    def lost(self, picks: Picks) -> tuple[float, float, float]:
        """What `choices.lost` says of experts, entries and candidates."""
        experts = [(each, torch.ones_like(each, dtype=torch.bool)) for each in picks.experts]
        entries, candidates = (_made(of) for of in (picks.entries, picks.candidates))
        return lost(self.experts, experts), lost(self.entries, entries), lost(self.candidates, candidates)


class FollowingPath(StandardPath):
    """Decode steps that take their choices from `Picks`, and say what scores they would have chosen by."""

    def follow(self, batch: StepBatch, picks: Picks | None = None) -> tuple[torch.Tensor, Scores, Picks]:
        """One token of each row by `picks`, by its own if there are none.

        Returns logits float32 [rows, vocab], the scores and what was chosen. Raises RequestError as `place` does.
        """
        given = picks or Picks()
        self._scores, made = Scores([], [], []), Picks()
        self._given_experts = iter(given.experts)
        self._given_entries, self._given_candidates = (iter(_made(of)) for of in (given.entries, given.candidates))
        logits = self.run(*self.place(batch), made)
        return logits, self._scores, made

    def _route(self, layer: LayerStages, y: Normed, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = layer.expert_scores(y)
        if layer.hashed:
            return layer.route(scores, tokens)
        self._scores.experts.append(scores + layer.vector("router_bias"))
        experts = next(self._given_experts, None)
        if experts is None:
            return layer.route(scores, tokens)
        return experts, weigh(scores, experts, self.config.routed_scaling_factor)

    def _candidates(self, best: torch.Tensor, counts: torch.Tensor) -> Numbers:
        self._scores.candidates.append(standardized(best[:, 0]))
        return _with_tokens(self._given_candidates) or super()._candidates(best, counts)

    def _take(self, scores: torch.Tensor, counts: torch.Tensor) -> Numbers:
        seen = torch.arange(scores.shape[-1], device=scores.device) < counts[..., None]
        self._scores.entries.append(standardized(scores.where(seen, float("-inf"))[:, 0]))
        return _with_tokens(self._given_entries) or super()._take(scores, counts)


def _made(choices: list[Numbers | None]) -> list[Numbers]:
    """Those that left something out."""
    return [each for each in choices if each is not None]


def _with_tokens(given: Iterator[Numbers]) -> Numbers | None:
    """The next choice, [rows, 1, K]: of each row's one token."""
    chosen = next(given, None)
    return None if chosen is None else (chosen[0][:, None], chosen[1][:, None])
