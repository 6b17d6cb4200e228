"""A stack that is divided among nodes: each runs contiguous layers and hands the residual stream to the next one.

Kernels cannot write the memory of another machine, so torch.distributed carries what crosses a border: gloo between
CPUs, NCCL (RCCL on AMD) between GPUs. Every rank of a node has the same residual stream, to the bit, so each sends it
to the rank of its own number on the next node: no rank waits for another one's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rocmega.errors import PeerError

if TYPE_CHECKING:
    import torch


class Pipeline(Protocol):
    """What a path wants of the other nodes. `node`, `nodes`: this one's number, and how many there are."""

    node: int
    nodes: int

    def receive(self, into: torch.Tensor) -> None:
        """Fills a contiguous tensor with what the node before sends."""
        ...

    def send(self, tensor: torch.Tensor) -> None:
        """To the next node."""
        ...

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last node's tensor, on every node; elsewhere this one is overwritten. Contiguous, of one shape."""
        ...


class TorchPipeline:
    """Nodes found through torch.distributed.

    column: of each node, the number in the world of the rank that this one talks to; its own among them. group: gloo's
    group of the column.
    """

    def __init__(self, node: int, column: Sequence[int], group: Any) -> None:
        self.node, self.nodes, self._column = node, len(column), list(column)
        self._group = group
        self._device_group: Any = None

    def receive(self, into: torch.Tensor) -> None:
        """Fills a contiguous tensor with what the node before sends."""
        import torch.distributed as dist

        before = self.node - 1
        self._do(before, lambda: dist.recv(into, self._column[before], group=self._group_for(into)))

    def send(self, tensor: torch.Tensor) -> None:
        """To the next node."""
        import torch.distributed as dist

        after, tensor = self.node + 1, tensor.contiguous()
        self._do(after, lambda: dist.send(tensor, self._column[after], group=self._group_for(tensor)))

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last node's tensor."""
        import torch.distributed as dist

        last, tensor = self.nodes - 1, tensor.contiguous()
        self._do(last, lambda: dist.broadcast(tensor, self._column[last], group=self._group_for(tensor)))
        return tensor

    def _group_for(self, tensor: torch.Tensor) -> Any:
        import torch.distributed as dist

        if tensor.device.type == "cpu":
            return self._group
        if self._device_group is None:  # every rank of the column comes here with its first border
            self._device_group = dist.new_group(self._column, backend="nccl", use_local_synchronization=True)
        return self._device_group

    def _do(self, node: int, work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:
            rank = self._column[node]
            said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise PeerError(rank, f"of node {node} cannot be reached any more: {said}") from error
