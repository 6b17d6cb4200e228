"""Tokens of a launch as the host reads them while it runs, and the word by which the host ends it.

The kernel stores each token with its tag in one word of 8 bytes, past all caches, into memory of the host: the data is
its own flag, as in the kernel's own hand-offs. Tags only grow, so nothing is cleared between launches. A launch begins
at the first place and never has more tokens than there are places, so nobody waits for a reader.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver, Running

# Between looks, each of which costs some 10 us of a CPU where a token takes a millisecond or more. So the first look at
# a token is when it is nearly due.
POLL_SECONDS = 1e-4
DUE = 0.8  # of the time that the token before it took
LONGEST_SLEEP = 0.1


class TokenRing:
    """Memory of the host for the tokens of a launch.

    slots: tokens of a launch, at most. rows: of a step.
    Fields:
        address, cancel_address: what kernels are given.
    """

    def __init__(self, driver: Driver, slots: int, rows: int) -> None:
        self._rows = rows
        self._ring, self._cancel = driver.mapped("ring", slots * rows * 8), driver.mapped("cancel", 4)
        self.address, self.cancel_address = self._ring.address, self._cancel.address
        # Through ctypes each word is one load: a copy of the tensor might be made in smaller pieces.
        self._words = (ctypes.c_uint64 * (slots * rows)).from_address(self._ring.tensor.data_ptr())
        self._wish = ctypes.c_uint32.from_address(self._cancel.tensor.data_ptr())

    def clear(self) -> None:
        """Where tags begin anew, after the last launch."""
        self._ring.tensor.zero_()

    def begin(self) -> None:
        """Before a launch."""
        self._wish.value = 0

    def cancel(self) -> None:
        """The launch that runs ends with the token that is being chosen."""
        self._wish.value = 1

    def read(self, slot: int, rows: int, tag: int) -> list[int] | None:
        """A step's tokens, if all rows' are there."""
        words = self._words[slot * self._rows : slot * self._rows + rows]
        return [word & 0xFFFFFFFF for word in words] if all(word >> 32 == tag for word in words) else None

    def close(self) -> None:
        """Gives the memory back, after the last launch."""
        del self._words, self._wish
        self._ring.close()
        self._cancel.close()


class TokenLaunch:
    """A launch of several tokens: iterating gives each step's tokens, one of each row, as they come.

    rows, tokens: of a step, and steps at most. tag: of the first step's tokens; each later step's is `span` more.
    stops: of each row, tokens with which the launch ends. ended: called once when it has; may raise what went wrong.
    """

    def __init__(
        self,
        ring: TokenRing,
        running: Running,
        rows: int,
        tokens: int,
        tag: int,
        span: int,
        stops: Sequence[Collection[int]],
        ended: Callable[[], None],
    ) -> None:
        self._ring, self._running, self._ended = ring, running, ended
        self._rows, self._tokens, self._tag, self._span, self._stops = rows, tokens, tag, span, stops
        self._read = 0  # steps
        self._pace, self._last = 0.0, time.monotonic()  # of the last token: how long it took, and when it was read
        self.over = False  # the kernel has ended, and all its tokens have been read

    def next(self) -> list[int] | None:
        """Waits for the next step's tokens; None if the launch ended before it.

        Raises StepError if the kernel gave up, DriverError if it failed.
        """
        if self.over:
            return None
        tokens, pause = self._look(), min(DUE * self._pace, LONGEST_SLEEP)
        while tokens is None and not self._running.done():
            time.sleep(max(pause, POLL_SECONDS))
            tokens, pause = self._look(), 0.0
        tokens = tokens or self._look()  # it may have come between the last look and the end
        now = time.monotonic()
        self._pace, self._last = now - self._last, now
        self._read += tokens is not None
        stopped = tokens is not None and any(token in ends for token, ends in zip(tokens, self._stops, strict=True))
        if tokens is None or stopped or self._read == self._tokens:
            self.over = True
            self._running.wait()
            self._ended()
        return tokens

    def cancel(self) -> None:
        """No more tokens than the ones that are being chosen; those that come are still to be read."""
        if not self.over:
            self._ring.cancel()

    def close(self) -> None:
        """Ends it and waits for that, whoever was to read it. Raises what went wrong in it."""
        if not self.over:
            self._ring.cancel()
            self.over = True
            self._running.wait()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.next, None)

    def _look(self) -> list[int] | None:
        return self._ring.read(self._read, self._rows, self._tag + self._read * self._span)
