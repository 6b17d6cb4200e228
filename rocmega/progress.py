"""How long work tells whoever waits for it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with a line of text before long work, and with how much of it is done where that is known."""

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None: ...


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """Tells nobody."""
