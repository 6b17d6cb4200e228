"""Memory that every rank has and all ranks write: one buffer each, opened by all others.

On AMD GPUs it is uncached device memory, opened by IPC handles; on NVIDIA GPUs device memory, likewise; on the CPU
target memory of a file without a name. It is set up and taken down by all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rocmega.parallel.agreement import Agreement

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import Driver, SharedBuffer


T = TypeVar("T")


class SymmetricBuffer:
    """One rank's view of a buffer that every rank has.

    Fields:
        own: this rank's buffer.
        addresses: of every rank's, in order, as kernels of this rank's device are given them.
    """

    def __init__(
        self, group: Agreement | None, own: SharedBuffer, peers: list[SharedBuffer], addresses: list[int]
    ) -> None:
        self.own, self.addresses = own, addresses
        self._group, self._peers = group, peers

    def close(self) -> None:
        """Gives the memory back, in the reverse order: what was opened first, and the own when no rank has it open.

        Collective. If the others cannot be reached any more, this rank's part is given back all the same.
        """
        for peer in self._peers:
            peer.close()
        try:
            if self._group is not None and not self._group.failed:
                self._group.barrier()
        finally:
            self._peers, self._group = [], None
            self.own.close()


class Group(Protocol):
    """What a mega-task wants of its ranks. `tp`, `rank`: how many share the model, and which one this is."""

    tp: int
    rank: int

    def symmetric(self, driver: Driver, name: str, nbytes: int, stride: int) -> SymmetricBuffer:
        """A zeroed buffer on every rank; rank r writes at r * stride bytes, or everywhere if that is 0. Collective."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, all of one shape."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, the same bits on all; the tensor may be overwritten."""
        ...

    def failure(self, account: str) -> str:
        """After a failed step: tells the others, and gives what they tell."""
        ...

    def poll_limit(self, driver: Driver) -> int | None:
        """How many polls a kernel's wait may take; None: as many as with one rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which must be picklable."""
        ...

    def agree(self, what: str, work: Callable[[], T]) -> T:
        """Does the work on every rank, or fails on every rank; see `Agreement`."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...


def open_symmetric(ranks: Agreement, driver: Driver, name: str, nbytes: int) -> SymmetricBuffer:
    """Allocates, exchanges handles, opens the others' buffers; afterwards all is mapped on all ranks, or nothing is."""
    opened: list[SharedBuffer] = []
    own: list[SharedBuffer] = []

    def allocate() -> bytes:
        own.append(driver.shared(name, nbytes, peers=True))
        return driver.export(own[0])

    def open_all(handles: list[bytes]) -> list[int]:
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == ranks.rank:
                addresses.append(own[0].address)
                continue
            opened.append(driver.open(f"{name} of rank {rank}", handle, nbytes))
            addresses.append(opened[-1].address)
        return addresses

    try:
        handles = ranks.gather(ranks.agree(f"allocate the shared buffer {name!r}", allocate))
        addresses = ranks.agree(f"open the other ranks' {name!r}", lambda: open_all(handles))
    except BaseException:
        for buffer in (*opened, *own):
            buffer.close()
        raise
    return SymmetricBuffer(ranks, own[0], opened, addresses)
