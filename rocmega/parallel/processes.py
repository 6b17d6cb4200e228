"""Ranks as processes, found through torch.distributed: what torchrun, Slurm or anything that sets its variables starts.

gloo carries set-up, the CPU's tensors and failures; a GPU's tensors of the standard path go by NCCL (RCCL on AMD). The
sums of the mega-task use neither: kernels write each other's memory.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rocmega.errors import PeerError, RequestError
from rocmega.parallel.agreement import Agreement
from rocmega.parallel.pipeline import TorchPipeline
from rocmega.parallel.symmetric import SymmetricBuffer, open_symmetric

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import Driver

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LISTEN_SECONDS = 1.0  # after a failure, for the others' accounts of it


def wants_ranks() -> bool:
    """Whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(name in os.environ for name in VARIABLES)


def local_rank() -> int:
    """The number of this rank among those of its machine, which is the number of its GPU.

    0 where the launcher lets each rank see one GPU only.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() == 1:
        return 0
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


_joined: dict[tuple[int, int], TorchGroup] = {}


def join(size: int, nodes: int = 1) -> TorchGroup:
    """The ranks that this process shares a model with, made when it is first needed. Raises as TorchGroup does."""
    if (size, nodes) not in _joined:
        _joined[size, nodes] = TorchGroup(size, nodes=nodes)
    return _joined[size, nodes]


class TorchGroup(Agreement):
    """All ranks that were started together, or with several nodes those of this process's node.

    size: how many the caller wants, of each of `nodes`. wait_seconds: how long a kernel waits for another rank; a rank
    that is later than this has failed. setup_seconds: how long set-up waits, and a node for what the one before sends.
    Raises RequestError if this process is not one of so many ranks, PeerError if the others do not come.

    Fields:
        pipeline: the way to the other nodes, None where there is one.
    """

    def __init__(self, size: int, *, nodes: int = 1, wait_seconds: float = 4.0, setup_seconds: float = 120.0) -> None:
        import torch.distributed as dist

        world = size * nodes
        if not wants_ranks() or int(os.environ["WORLD_SIZE"]) != world:
            here = f"one of {os.environ['WORLD_SIZE']}" if wants_ranks() else "alone"
            raise RequestError(
                f"{world} ranks are wanted and this process is {here}: start the program with `torchrun "
                f"{f'--nnodes {nodes} ' if nodes > 1 else ''}--nproc-per-node {size} ...`."
            )
        number = int(os.environ["RANK"])
        self.nodes = nodes
        self.node, self.rank = divmod(number, size)
        self.size = self.tp = size
        self.pipeline: TorchPipeline | None = None
        self.wait_seconds = wait_seconds
        self.failed = False
        self._device_group: Any = None
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=setup_seconds)))
            self._store = dist.PrefixStore(f"rocmega/{self.node}", store)
            self._owns = not dist.is_initialized()
            if self._owns:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore("gloo", store),
                    rank=number,
                    world_size=world,
                    timeout=timedelta(seconds=setup_seconds),
                )
            self._members = range(self.node * size, (self.node + 1) * size)
            column = range(self.rank, world, size)
            # All ranks make all groups, in one order; each keeps those that it is in.
            made = {
                ranks: dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=setup_seconds))
                for ranks in (
                    *(range(node * size, (node + 1) * size) for node in range(nodes)),
                    *(range(rank, world, size) for rank in range(size)),
                    range(world),
                )
            }
            self._group, self._world = made[self._members], made[range(world)]
            if nodes > 1:
                self.pipeline = TorchPipeline(self.node, column, made[column])
        except RuntimeError as error:
            raise PeerError(None, f"did not come: {_first_line(error)}") from error

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which must be picklable."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        self._do(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def gather_world(self, value: Any) -> list[Any]:
        """The value of every rank of every node, in their order; it must be picklable."""
        import torch.distributed as dist

        values: list[Any] = [None] * (self.size * self.nodes)
        self._do(lambda: dist.all_gather_object(values, value, group=self._world))
        return values

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, all of one shape, on this rank's device."""
        import torch
        import torch.distributed as dist

        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._do(lambda: dist.all_gather(parts, tensor, group=self._group_for(tensor)))
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, the same bits on all: on a CPU in the order of the ranks, as kernels add."""
        import torch.distributed as dist

        if tensor.device.type == "cpu":
            first, *others = self.all_gather(tensor)
            for other in others:
                first += other
            return first
        self._do(lambda: dist.all_reduce(tensor, group=self._group_for(tensor)))
        return tensor

    def symmetric(self, driver: Driver, name: str, nbytes: int, stride: int) -> SymmetricBuffer:
        """A zeroed buffer on every rank."""
        return open_symmetric(self, driver, name, nbytes)

    def poll_limit(self, driver: Driver) -> int | None:
        """Polls of `wait_seconds`."""
        return int(self.wait_seconds * driver.polls_per_second)

    def failure(self, account: str) -> str:
        """Tells the others what went wrong here; what they say, within a second. From now on nobody is waited for."""
        self.failed = True
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(f"failed/{self.rank}", account)
            deadline, heard = time.monotonic() + LISTEN_SECONDS, set[int]()
            while time.monotonic() < deadline and len(heard) < len(others):
                heard = {rank for rank in others if self._store.check([f"failed/{rank}"])}
                time.sleep(0.05)
            said = [f"Rank {rank} says: {self._store.get(f'failed/{rank}').decode()}" for rank in sorted(heard)]
        except RuntimeError as error:  # the store is gone with the rank, or the launcher, that kept it
            return f"The other ranks cannot be asked: {_first_line(error)}."
        silent = [str(rank) for rank in others if rank not in heard]
        return " ".join([*said, *([f"Nothing was heard of rank {', '.join(silent)}."] if silent else [])])

    def close(self) -> None:
        """Leaves the group."""
        import torch.distributed as dist

        _joined.pop((self.size, self.nodes), None)
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()

    def _group_for(self, tensor: torch.Tensor) -> Any:
        import torch.distributed as dist

        if tensor.device.type == "cpu":
            return self._group
        if self._device_group is None:  # every rank comes here with its first tensor
            self._device_group = dist.new_group(list(self._members), backend="nccl", use_local_synchronization=True)
        return self._device_group

    def _do(self, work: Any) -> None:
        try:
            work()
        except RuntimeError as error:
            self.failed = True
            raise PeerError(None, f"cannot be reached any more: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
