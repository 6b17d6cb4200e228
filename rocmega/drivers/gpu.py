"""What the HIP and CUDA drivers share: checks, torch views of device memory, the residency rule."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.drivers.base import DeviceFacts, Function, SharedBuffer
from rocmega.errors import DriverError

if TYPE_CHECKING:
    import torch

    from rocmega.toolchain import Artifact

IPC_HANDLE_BYTES = 64
PEER_UNIT = (
    2 << 20
)  # memory for peers comes in whole pages: a handle is of the whole allocation that an address lies in


class DeviceMemory:
    """Device memory as an array of bytes in the protocol that torch understands (on ROCm too)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class PointerArgument:
    """Arguments of a kernel that takes one pointer: an array of one address, that of a word that holds the pointer."""

    def __init__(self, pointer: int) -> None:
        self.word = ctypes.c_uint64(pointer)
        self.array = (ctypes.c_void_p * 1)(ctypes.addressof(self.word))

    @property
    def word_address(self) -> int:
        return ctypes.addressof(self.word)

    @property
    def array_address(self) -> int:
        return ctypes.addressof(self.array)


@dataclass
class GpuModule:
    """A loaded artifact. The image stays alive with it."""

    driver: GpuDriver
    path: Path
    handle: Any
    image: bytes

    def function(self, name: str, stages: Sequence[str] = ()) -> Function:
        """The kernel called `name`. Raises DriverError, naming the artifact, if it has none."""
        handle = self.driver._function(self.handle, name)
        if handle is None:
            raise DriverError(f"{self.path} has no kernel {name!r}: was it built from another source?")
        return Function(name, handle, tuple(stages))


class EventRunning:
    """A launch with an event behind it."""

    def __init__(self, driver: GpuDriver, event: Any) -> None:
        self._driver, self._event = driver, event

    def done(self) -> bool:
        """Whether it has ended, well or not: `wait` says what went wrong."""
        try:
            return bool(self._event.query())
        except RuntimeError:  # the kernel died, and so did the context
            return True

    def wait(self) -> None:
        """Waits for the end of all that was launched; raises DriverError for what went wrong in it."""
        self._driver.synchronize()


class GpuDriver(ABC):
    """A device that torch shares with us. Subclasses wrap one library; here is what does not depend on which."""

    name: str
    arch: str
    device: torch.device

    def __init__(self, index: int, arch: str) -> None:
        import torch

        self.index, self.arch = index, arch
        self.device = torch.device("cuda", index)  # ROCm builds of torch call it cuda, too
        self._facts: DeviceFacts | None = None
        self._resident: dict[tuple[int, int, int], int] = {}
        self._modules: list[GpuModule] = []
        self._buffers: dict[int, SharedBuffer] = {}

    def facts(self) -> DeviceFacts:
        """What is known about the device; read from it once."""
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts

    @functools.cached_property
    def polls_per_second(self) -> int:
        """Measured on the device when it is first asked for."""
        from rocmega.drivers.polls import per_second

        return per_second(self)

    def shared(self, name: str, nbytes: int, *, peers: bool = False) -> SharedBuffer:
        """Zeroed device memory outside torch's caching allocator, so that its address and lifetime are ours.

        peers: for memory that other GPUs write, of the kind that their caches and ours keep no stale copies of.
        """
        if nbytes <= 0:
            raise DriverError(f"The buffer {name!r} cannot have {nbytes} bytes.")
        self._activate()
        whole = -(-nbytes // PEER_UNIT) * PEER_UNIT if peers else nbytes
        address = self._allocate(whole, peers)
        try:
            self._zero(address, whole)
            return self._buffer(name, address, nbytes, lambda: self._free(address))
        except BaseException:
            self._free(address)
            raise

    def mapped(self, name: str, nbytes: int) -> SharedBuffer:
        """Zeroed, pinned memory of the host that kernels reach across the bus."""
        import torch

        if nbytes <= 0:
            raise DriverError(f"The buffer {name!r} cannot have {nbytes} bytes.")
        self._activate()
        host, address = self._allocate_mapped(nbytes)
        tensor = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(host), dtype=torch.uint8).zero_()

        def closed() -> None:
            self._buffers.pop(address, None)
            self._activate()
            self._free_mapped(host)

        self._buffers[address] = SharedBuffer(name, address, tensor, closed)
        return self._buffers[address]

    def constant(self, tensor: torch.Tensor) -> int:
        """The address of a contiguous tensor on this device."""
        if tensor.device != self.device:
            raise DriverError(f"A tensor on {tensor.device} was handed to the kernels of {self.device}.")
        if not tensor.is_contiguous():
            raise DriverError(f"A tensor of shape {tuple(tensor.shape)} that is not contiguous was handed to a kernel.")
        return tensor.data_ptr()

    def load(self, artifact: Artifact) -> GpuModule:
        """Loads a code object or cubin for exactly this device's architecture."""
        if artifact.target != self.arch:
            raise DriverError(f"{artifact.path} is for {artifact.target}, and the device is {self.arch}.")
        try:
            image = artifact.path.read_bytes()
        except OSError as error:
            raise DriverError(f"The compiled kernel {artifact.path} cannot be read: {error}.") from error
        self._activate()
        module = GpuModule(self, artifact.path, self._load(image, artifact.path), image)
        self._modules.append(module)
        return module

    def max_blocks(self, function: Function, threads: int, dynamic_lds: int) -> int:
        """How many blocks can be resident at once: those of one compute unit times the device's compute units."""
        key = (int(function.handle), threads, dynamic_lds)
        if key not in self._resident:
            facts = self.facts()
            if dynamic_lds > facts.lds_bytes:
                raise DriverError(
                    f"Kernel {function.name} asks for {dynamic_lds} bytes of LDS; {facts.name} has {facts.lds_bytes}."
                )
            self._activate()
            if dynamic_lds:
                self._allow_dynamic_lds(function, dynamic_lds)
            self._resident[key] = self._blocks_per_unit(function, threads, dynamic_lds) * facts.compute_units
        return self._resident[key]

    def launch(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> None:
        """Launches cooperatively, with one pointer argument, on a torch stream (None: the current one)."""
        if blocks < 1 or threads < 1:
            raise DriverError(f"Kernel {function.name} cannot be launched with {blocks} blocks of {threads} threads.")
        most = self.max_blocks(function, threads, dynamic_lds)
        if blocks > most:
            facts = self.facts()
            raise DriverError(
                f"{blocks} blocks of kernel {function.name} ({threads} threads, {dynamic_lds} bytes of dynamic LDS) "
                f"cannot all be resident on {facts.name}: each of its {facts.compute_units} compute units holds "
                f"{most // facts.compute_units}. Blocks wait for each other, so all must be: use at most {most}."
            )
        self._activate()
        self._launch(function, PointerArgument(args_address), blocks, threads, dynamic_lds, self._stream(stream))

    def start(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> EventRunning:
        """As `launch`, which never waits here; tells when the kernel has ended."""
        self.launch(function, args_address, blocks, threads, dynamic_lds, stream)
        return EventRunning(self, self._event(stream))

    def synchronize(self) -> None:
        """Waits until everything launched has ended; raises DriverError for what went wrong in it."""
        self._activate()
        self._wait()

    def export(self, buffer: SharedBuffer) -> bytes:
        """A handle by which another process of this machine opens the buffer; of a buffer that shared() made."""
        if buffer.address not in self._buffers:
            raise DriverError(f"The buffer {buffer.name!r} was not allocated here and cannot be exported.")
        self._activate()
        return self._export(buffer.address)

    def open(self, name: str, handle: bytes, nbytes: int) -> SharedBuffer:
        """The buffer that another process exported, as memory of this one. Close it before its owner does."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise DriverError(f"The handle of buffer {name!r} has {len(handle)} bytes instead of {IPC_HANDLE_BYTES}.")
        self._activate()
        address = self._open(handle)
        try:
            return self._buffer(name, address, nbytes, lambda: self._close_peer(address))
        except BaseException:
            self._close_peer(address)
            raise

    def close(self) -> None:
        """Gives back what was allocated and loaded here."""
        with contextlib.suppress(DriverError):
            self.synchronize()
        for buffer in list(self._buffers.values()):
            buffer.close()
        for module in self._modules:
            self._unload(module.handle)
        self._modules.clear()
        self._resident.clear()

    def _buffer(self, name: str, address: int, nbytes: int, release: Any) -> SharedBuffer:
        def closed() -> None:
            self._buffers.pop(address, None)
            self._activate()
            release()

        buffer = SharedBuffer(name, address, lambda: self._view(address, nbytes), closed, nbytes)
        self._buffers[address] = buffer
        return buffer

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        return torch.as_tensor(DeviceMemory(address, nbytes), device=self.device)

    def _event(self, stream: Any) -> Any:
        """An event of torch's at the end of what a stream has now."""
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device) if stream is None else stream)
        return event

    def _stream(self, stream: Any) -> int:
        if stream is None:
            import torch

            stream = torch.cuda.current_stream(self.device)
        return int(stream.cuda_stream)

    @abstractmethod
    def _activate(self) -> None:
        """Makes the device current for the calling thread."""

    @abstractmethod
    def _read_facts(self) -> DeviceFacts: ...

    @abstractmethod
    def _allocate(self, nbytes: int, peers: bool) -> int: ...

    @abstractmethod
    def _allocate_mapped(self, nbytes: int) -> tuple[int, int]:
        """Pinned memory of the host: its address there, and the one for kernels."""

    @abstractmethod
    def _free_mapped(self, host: int) -> None: ...

    @abstractmethod
    def _zero(self, address: int, nbytes: int) -> None:
        """Zeroes and waits."""

    @abstractmethod
    def _free(self, address: int) -> None: ...

    @abstractmethod
    def _load(self, image: bytes, path: Path) -> Any: ...

    @abstractmethod
    def _unload(self, module: Any) -> None: ...

    @abstractmethod
    def _function(self, module: Any, name: str) -> Any:
        """The handle of a kernel, None if there is no such kernel."""

    @abstractmethod
    def _allow_dynamic_lds(self, function: Function, nbytes: int) -> None: ...

    @abstractmethod
    def _blocks_per_unit(self, function: Function, threads: int, dynamic_lds: int) -> int: ...

    @abstractmethod
    def _launch(
        self, function: Function, argument: PointerArgument, blocks: int, threads: int, dynamic_lds: int, stream: int
    ) -> None: ...

    @abstractmethod
    def _wait(self) -> None: ...

    @abstractmethod
    def _export(self, address: int) -> bytes: ...

    @abstractmethod
    def _open(self, handle: bytes) -> int: ...

    @abstractmethod
    def _close_peer(self, address: int) -> None: ...
