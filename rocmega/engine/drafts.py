"""Guesses of what comes next: whatever followed the last time that the same tokens came (prompt lookup).

A guess costs a row of a step that would have been empty, and is never seen unless the model says the same.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must have come before


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
