"""What every driver offers: shared memory, modules, cooperative launches and facts about the device.

`rocmega.drivers.host` implements it for the CPU, the HIP and CUDA drivers for GPUs. Nothing above this package asks
which of them it has, except through `Driver.name` and `Driver.facts()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rocmega.toolchain import Artifact


@dataclass(frozen=True)
class DeviceFacts:
    """The device a driver runs on. `lds_bytes` is the limit of one block, `xcds` the number of its L2 caches."""

    name: str
    arch: str
    compute_units: int
    memory_bytes: int
    lds_bytes: int
    xcds: int


class SharedBuffer:
    """Memory that kernels and Python both read and write.

    `address` is what kernels are given; `tensor` (uint8 [nbytes], zeroed) is what Python uses. On GPUs both are
    the same memory; on the host they are two mappings of it, and kernels may touch theirs through accessors only.
    """

    def __init__(
        self,
        name: str,
        address: int,
        tensor: torch.Tensor | Callable[[], torch.Tensor],
        release: Callable[[], None],
        nbytes: int | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.nbytes: int = tensor.numel() if nbytes is None else nbytes  # type: ignore[union-attr]
        self._tensor = tensor
        self._release: Callable[[], None] | None = release

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as bytes. Of another GPU's it is made when it is asked for: torch would begin to use that GPU."""
        import torch

        if not isinstance(self._tensor, torch.Tensor):
            self._tensor = self._tensor()
        return self._tensor

    def close(self) -> None:
        """Gives the memory back; the address is invalid afterwards. Closing twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Function:
    """A kernel of a loaded module. `stages` names its stages 0, 1, ... as they stand in error words and marks."""

    name: str
    handle: Any
    stages: tuple[str, ...] = ()

    def stage(self, number: int) -> str:
        """The name of a stage, or its number if it has none."""
        return self.stages[number] if 0 <= number < len(self.stages) else str(number)


@runtime_checkable
class Module(Protocol):
    """A loaded artifact."""

    def function(self, name: str, stages: Sequence[str] = ()) -> Function:
        """The kernel called `name`. Raises DriverError, naming the artifact, if it has none."""
        ...


class Running(Protocol):
    """A launch that has been started."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self) -> None:
        """Waits for its end; raises what went wrong in it."""
        ...


@runtime_checkable
class Driver(Protocol):
    """One device. All methods raise DriverError with a message for a person."""

    name: str  # "host", "hip" or "cuda"
    arch: str  # what to compile for: an entry of rocmega.toolchain.TARGETS
    device: torch.device  # where tensors for this driver live

    @property
    def polls_per_second(self) -> int:
        """At most, of a thread that waits for another rank."""
        ...

    def facts(self) -> DeviceFacts:
        """What is known about the device."""
        ...

    def shared(self, name: str, nbytes: int, *, peers: bool = False) -> SharedBuffer:
        """Zeroed memory that kernels write; `name` appears in reports. peers: other ranks' kernels write it, too."""
        ...

    def mapped(self, name: str, nbytes: int) -> SharedBuffer:
        """Zeroed memory of the host, a CPU tensor, that kernels reach with system scope, also while they run."""
        ...

    def export(self, buffer: SharedBuffer) -> bytes:
        """A handle by which another process of this machine opens a buffer that was made for peers."""
        ...

    def open(self, name: str, handle: bytes, nbytes: int) -> SharedBuffer:
        """The buffer that another process exported, as memory of this one. Close it before its owner does."""
        ...

    def constant(self, tensor: torch.Tensor) -> int:
        """The address kernels are given for a contiguous tensor on `device` that nobody writes during a launch.

        The caller keeps the tensor alive.
        """
        ...

    def load(self, artifact: Artifact) -> Module:
        """Loads what the toolchain built for `arch`."""
        ...

    def max_blocks(self, function: Function, threads: int, dynamic_lds: int) -> int:
        """How many blocks can be resident at once; a cooperative launch of more is refused."""
        ...

    def launch(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> None:
        """Launches cooperatively, with one pointer argument.

        Refuses with DriverError if the blocks cannot all be resident. `stream` is a torch stream of the device, None
        the current one.
        """
        ...

    def start(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> Running:
        """As `launch`, and never waits for the kernel: what it leaves in mapped memory can be read while it runs."""
        ...

    def synchronize(self) -> None:
        """Waits until everything launched has ended; raises what went wrong in it."""
        ...
