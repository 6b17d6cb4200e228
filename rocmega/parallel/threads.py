"""Group as threads of one process, on the CPU target: one scheduler runs the kernels of all of them in one launch.

So the checker sees every store and every load of every rank, in an order that one seed decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rocmega.drivers.host import HostDriver
from rocmega.errors import PeerError
from rocmega.parallel.agreement import Agreement
from rocmega.parallel.symmetric import SymmetricBuffer, open_symmetric

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import Driver, Function

T = TypeVar("T")


class _Meeting:
    """Values of all threads, exchanged."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()  # nobody's next value before everybody has these
        return values


class ThreadRank(Agreement):
    """One of several ranks in this process."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.rank, self.size, self.tp = rank, ranks.size, ranks.size
        self.ranks = ranks

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        try:
            return self.ranks.meeting.exchange(self.rank, value)
        except threading.BrokenBarrierError:
            raise PeerError(None, "ended before the others") from None

    def symmetric(self, driver: Driver, name: str, nbytes: int, stride: int) -> SymmetricBuffer:
        """A zeroed buffer on every rank."""
        return open_symmetric(self, driver, name, nbytes)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor."""
        return [value.clone() for value in self.gather(tensor)]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in their order."""
        first, *others = self.all_gather(tensor)
        return sum(others, first)

    def poll_limit(self, driver: Driver) -> int | None:
        """As for one rank: one scheduler runs all of them."""
        return None


class RankDriver(HostDriver):
    """The CPU target for one rank of several in this process: the last one that launches launches for all."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(xcds=2)
        self._ranks, self._rank = ranks, rank

    def launch(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> None:
        """Runs the kernels of all ranks; on all of them raises what was found."""
        arguments = self._ranks.launches.exchange(self._rank, args_address)
        error: Exception | None = None
        if self._rank == 0:
            try:
                leader = self._ranks.driver
                leader.launch_ranks(function, arguments, blocks, threads)
            except Exception as failed:  # for every rank
                error = failed
        error = self._ranks.launches.exchange(self._rank, error)[0]
        if error is not None:
            raise error


class ThreadRanks:
    """`size` ranks. driver: seed and checks of their launches; change them between steps as you like."""

    def __init__(self, size: int, driver: HostDriver | None = None) -> None:
        self.size = size
        self.driver = driver if driver is not None else HostDriver(xcds=2)
        self.meeting, self.launches = _Meeting(size), _Meeting(size)
        self.members = [ThreadRank(self, rank) for rank in range(size)]
        self.drivers = [RankDriver(self, rank) for rank in range(size)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` on every rank, in threads. Raises the first error, if any is no mere consequence."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:  # raised again below
                errors.append(error)
                for meeting in (self.meeting, self.launches):
                    meeting.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for meeting in (self.meeting, self.launches):
            meeting.barrier.reset()
        if errors:
            causes = [e for e in errors if not isinstance(e, (PeerError, threading.BrokenBarrierError))]
            raise (causes or errors)[0]
        return results
