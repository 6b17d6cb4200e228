"""What tests of every family do with a loaded tiny model on the standard path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rocmega.step import StepBatch


class Driven:
    """A model with `cache` and `path`, one request by name after the other or several in a step."""

    cache: Any
    path: Any

    def prefill(self, request: str, tokens: torch.Tensor, position: int = 0, chunk: int = 512) -> torch.Tensor:
        self.cache.grow(request, position + len(tokens))
        return self.path.prefill(tokens, position, self.cache.block_table([request])[0], chunk)

    def decode(self, rows: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """One step of rows (request, token, position)."""
        requests, tokens, positions = zip(*rows, strict=True)
        for request, position in zip(requests, positions, strict=True):
            self.cache.grow(request, position + 1)
        table = self.cache.block_table(requests)
        return self.path.decode(StepBatch(_int32(tokens), _int32(positions), table))

    def greedy(
        self, request: str, prompt: torch.Tensor, steps: int, chunk: int = 512
    ) -> tuple[list[int], torch.Tensor]:
        """Prefill and single decode steps: tokens, and the logits row behind each."""
        rows = [self.prefill(request, prompt, chunk=chunk)]
        for step in range(steps - 1):
            rows.append(self.decode([(request, int(rows[-1].argmax()), len(prompt) + step)])[0])
        return [int(row.argmax()) for row in rows], torch.stack(rows)

    def follow(self, request: str, prompt: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """As `greedy`, with the tokens given: the logits rows."""
        rows = [self.prefill(request, prompt)]
        for step, token in enumerate(tokens[:-1]):
            rows.append(self.decode([(request, token, len(prompt) + step)])[0])
        return torch.stack(rows)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def recorded(function: Callable, calls: list) -> Callable:
    """The function, which also keeps what it returned."""

    def record(*args: Any) -> Any:
        calls.append(function(*args))
        return calls[-1]

    return record


def routing_again(routes: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable:
    """A `route` that takes the experts of recorded calls, one after the other, with weights from its own scores."""

    def chosen(scores: torch.Tensor, bias: Any, topk: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        experts, _ = routes.pop(0)
        weights = scores.gather(1, experts)
        return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor

    return chosen
