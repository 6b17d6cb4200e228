"""Collective set-up: everything is done on all ranks or on none, and all know whose fault it was."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from rocmega.errors import PeerError

T = TypeVar("T")


class Agreement(ABC):
    """Group that can tell each other things. Every rank calls the same methods in the same order.

    Fields:
        rank, size: this one's number, and how many there are.
    """

    rank: int
    size: int
    failed = False  # a rank is gone or stuck: nobody waits for the others any more

    def failure(self, account: str) -> str:
        """After a failed step: tells the others, and gives what they tell."""
        return ""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks. Raises PeerError if a rank cannot be reached."""

    def agree(self, what: str, work: Callable[[], T]) -> T:
        """Does the work on every rank; what it gave. `what` completes "rank 1 could not ...".

        If it fails on a rank, that one's error is raised there, and PeerError with its reason on all others. Agreements
        may be nested: a rank that fails outside meets the others, who are inside, at their next agreement.
        """
        failure: Exception | None = None
        try:
            value = work()
        except PeerError:  # this failure has been agreed on already
            raise
        except Exception as error:  # whatever it is, the others wait to hear of it
            failure = error
        outcomes = self.gather(None if failure is None else (what, str(failure) or type(failure).__name__))
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise PeerError(rank, f"could not {outcome[0]}: {outcome[1]}")
        return value

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.gather(None)
