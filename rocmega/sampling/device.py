"""Choices as kernels read them: the descriptor's Choice and Adjustment, in device memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rocmega.sampling.choose import Choice, top_p_units
from rocmega.sampling.params import MAX_BIASES

if TYPE_CHECKING:
    import torch


class ChoiceTable:
    """The rows' choices of a step.

    structs: of the descriptor. longest: tokens that a request may have, each of which may be adjusted. `choices` and
    `adjustments` are uint8 tensors that kernels are given; `stride` is how many adjustments a row has room for.
    """

    def __init__(
        self, structs: Mapping[str, Any], rows: int, vocab: int, longest: int, device: torch.device | str
    ) -> None:
        import torch

        self.rows, self.vocab, self.stride = rows, vocab, min(vocab, longest + MAX_BIASES)
        self._table: Any = (structs["Choice"] * rows)()
        self.choices = torch.zeros(ctypes.sizeof(self._table), dtype=torch.uint8, device=device)
        size = ctypes.sizeof(structs["Adjustment"])
        self.adjustments = torch.zeros(rows, self.stride * size, dtype=torch.uint8, device=device)

    def place(self, choices: Sequence[Choice | None]) -> None:
        """One choice a row; None is the largest logit."""
        import torch

        for row, choice in enumerate(choices):
            count = 0
            if choice is not None and (changed := adjustments(choice)):
                words = torch.tensor(changed, dtype=torch.float64)
                # token, bias, times, seen: the bias is the one float32 among the words.
                packed = words.to(torch.int32)
                packed[:, 1] = words[:, 1].to(torch.float32).view(torch.int32)
                count = len(changed)
                data = packed.view(torch.uint8).flatten()
                self.adjustments[row, : len(data)] = data.to(self.adjustments.device)
            self._fill(self._table[row], choice, count)
        self.choices.copy_(torch.frombuffer(bytearray(self._table), dtype=torch.uint8))

    def _fill(self, entry: Any, choice: Choice | None, count: int) -> None:
        entry.adjustments, entry.greedy, entry.temperature = count, 1, 1.0
        if choice is None:
            return
        params, seed = choice.params, choice.seed & (1 << 64) - 1
        entry.repetition, entry.frequency = params.repetition_penalty, params.frequency_penalty
        entry.presence = params.presence_penalty
        if params.greedy:
            return
        entry.greedy, entry.temperature = 0, params.temperature
        entry.gap = -math.log(params.min_p) if params.min_p else math.inf
        entry.top_k = params.top_k if 0 < params.top_k < self.vocab else 0
        entry.top_p = top_p_units(params.top_p) if params.top_p < 1 else 0
        entry.seed_low, entry.seed_high, entry.number = seed & 0xFFFFFFFF, seed >> 32, choice.number


def adjustments(choice: Choice) -> list[tuple[int, float, int, int]]:
    """Tokens whose logits change: token, bias, how often it is in the answer, whether it is in prompt or answer."""
    params, uses = choice.params, choice.uses
    biases = params.logit_bias
    if not params.penalized or uses is None:
        return [(token, bias, 0, 0) for token, bias in biases.items()]
    tokens = uses.prompt | uses.answer.keys() | biases.keys()
    return [(t, biases.get(t, 0.0), uses.answer[t], int(t in uses.prompt or t in uses.answer)) for t in tokens]
