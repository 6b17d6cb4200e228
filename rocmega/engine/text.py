"""An answer's text as its tokens come, and the stop texts in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocmega.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a tokenizer gives for bytes that are not yet a character


class AnswerText:
    """Text of tokens pushed one by one.

    `text` is what they say so far, cut where a stop text ended it. `settled` is what no later token can take back:
    without the last characters if they may turn out to be the beginning of a stop text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer, self._stop, self._include = tokenizer, stop, include_stop
        self._tokens: list[int] = []
        # Tokens from _context on are decoded together, because neighbours decide over spaces; those before _read have
        # given their text.
        self._context = self._read = 0
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def settled(self) -> str:
        """The part of the text that stays."""
        if self.stopped_by is not None:
            return self.text
        held = max((_overlap(self.text, stop) for stop in self._stop), default=0)
        return self.text[: len(self.text) - held]

    def push(self, token: int) -> None:
        """One more token."""
        self._tokens.append(token)
        before, whole = self._decoded()
        if not whole.endswith(INCOMPLETE):
            self._append(whole[len(before) :])

    def end(self) -> None:
        """No token follows: bytes that are no character come as they are."""
        before, whole = self._decoded()
        self._append(whole[len(before) :])

    def _decoded(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._tokens[self._context : self._read]), decode(self._tokens[self._context :])

    def _append(self, new: str) -> None:
        if self.stopped_by is not None:
            return
        self._context, self._read = self._read, len(self._tokens)
        old = len(self.text)
        self.text += new
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[: at + len(self.stopped_by) * self._include]


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that is a beginning of the stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
