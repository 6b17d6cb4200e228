"""Guesses of what comes next: whatever followed the last time that the same tokens came (prompt lookup).

A guess costs a row of a step that would have been empty, and is never seen unless the model says the same. The model's
own layer makes others (mtp.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocmega.engine.request import Request

if TYPE_CHECKING:
    import torch

    from rocmega.engine.rows import Run
    from rocmega.runner import Runner

LONGEST, SHORTEST = 4, 2  # tokens that must have come before


class Drafter:
    """Where an engine's guesses come from: here, from nowhere.

    Fields:
        wants_residual: whether `took` needs what the model's layers left.
    """

    wants_residual = False

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def begin(self, request: Request) -> None:
        """Before a request's first step."""

    def prefill(self, request: Request, tokens: Sequence[int]) -> None:
        """Caches the next tokens of a prompt."""
        assert request.sequence is not None
        self.runner.prefill(request.sequence, tokens)

    def guess(self, wanted: Sequence[tuple[Request, int]], share: int) -> None:
        """Sets the guesses of requests that are at their end, at most so many of each.

        share: the rows that each has if none leaves any to the others.
        """

    def took(self, runs: Sequence[Run], begins: Sequence[int], residual: torch.Tensor | None) -> None:
        """After a step. begins: what was cached of each run before it. residual: of all rows, f32 [rows, hidden]."""


class Lookup(Drafter):
    """Prompt lookup."""

    def begin(self, request: Request) -> None:
        request.lookup = PromptLookup()
        request.lookup.extend(request.prompt_token_ids)

    def guess(self, wanted: Sequence[tuple[Request, int]], share: int) -> None:
        for request, count in wanted:
            assert request.lookup is not None
            request.guesses = request.lookup.draft(count)


class PromptLookup:
    """Remembers, of one request, after which tokens each group of tokens last ended."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # the group -> where what followed begins
        self._known = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens of the request."""
        self._tokens += tokens

    def draft(self, count: int) -> list[int]:
        """`count` tokens that may come next, or none: what followed the longest group that came before."""
        self._index()
        for size in range(min(LONGEST, len(self._tokens)), SHORTEST - 1, -1):
            begin = self._ends.get(tuple(self._tokens[-size:]))
            if begin is not None:
                period = len(self._tokens) - begin  # what follows may follow again
                return [self._tokens[begin + at % period] for at in range(count)]
        return []

    def _index(self) -> None:
        """Groups that end before the last token, each by its last place."""
        for end in range(max(self._known, 1), len(self._tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(self._tokens[end - size : end])] = end
        self._known = len(self._tokens)
