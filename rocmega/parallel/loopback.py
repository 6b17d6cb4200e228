"""One rank that plays all of them: the same kernel and the same hand-offs, with its own memory for everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rocmega.errors import RequestError
from rocmega.parallel.symmetric import SymmetricBuffer

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import Driver


T = TypeVar("T")


class Loopback:
    """Rank `rank` of `tp`, alone: what it pushes to another rank comes back as that rank's share.

    For the time that one rank's part of a model takes, without the links between ranks. The tokens mean nothing.
    """

    def __init__(self, tp: int, rank: int = 0) -> None:
        if not 0 <= rank < tp:
            raise RequestError(f"rank {rank} of {tp}: ranks are 0 to {tp - 1}.")
        self.tp, self.rank = tp, rank

    def symmetric(self, driver: Driver, name: str, nbytes: int, stride: int) -> SymmetricBuffer:
        """A buffer of this rank's. Another rank's address is moved so that this rank's place in it is that rank's."""
        own = driver.shared(name, nbytes, peers=True)
        addresses = [own.address + (other - self.rank) * stride for other in range(self.tp)]
        return SymmetricBuffer(None, own, [], addresses)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor as everybody's."""
        return [tensor] * self.tp

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of as many times the tensor, in the order of the ranks."""
        return sum([tensor] * (self.tp - 1), tensor)

    def failure(self, account: str) -> str:
        """There is nobody to tell."""
        return ""

    def poll_limit(self, driver: Driver) -> int | None:
        """As for one rank: nobody else can be late."""
        return None

    def gather(self, value: Any) -> list[Any]:
        """The value as everybody's."""
        return [value] * self.tp

    def agree(self, what: str, work: Callable[[], T]) -> T:
        """There is nobody to agree with."""
        return work()

    def barrier(self) -> None:
        """Nobody to wait for."""
