"""Requests whose tokens come from one launch, while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocmega.engine.request import Request

if TYPE_CHECKING:
    from rocmega.engine.accept import Acceptor
    from rocmega.ring import TokenLaunch


@dataclass
class Flight:
    """A launch and the requests of its rows, none of which may give pages back before the launch is over."""

    launch: TokenLaunch
    requests: list[Request]

    def take(self, acceptor: Acceptor) -> list[int]:
        """Waits for the next step's tokens and gives them to the requests: how many there were; none at the end.

        A request that has ended takes no more. Raises what went wrong in the launch.
        """
        tokens = self.launch.next()
        if tokens is None:
            return []
        taken = 0
        for request, token in zip(self.requests, tokens, strict=True):
            if not request.finished:
                assert request.sequence is not None
                request.sequence.length += 1  # of its input: the token itself is cached by the next step
                acceptor.accept(request, token, None)
                request.by_path["mega"] += 1
                taken += 1
        return [taken]

    def land(self, acceptor: Acceptor) -> list[int]:
        """Ends the launch; the tokens of the steps that were still to come."""
        self.launch.cancel()
        taken = []
        while step := self.take(acceptor):
            taken += step
        return taken
