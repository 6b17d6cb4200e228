"""The CPU as a device: kernels run as fibers, under a seeded scheduler and, if asked, a memory model that checks them.

Shared memory belongs to the process, not to a driver: several `HostDriver`s and all modules they load see the same. It
is an arena of two equal ranges of addresses. Kernels know the first, which nobody may touch, so that an access past the
accessors faults; data lie at the same offsets of the second, and a third mapping is Python's tensor. Each loaded module
has a runtime of its own (hip/host) and is handed the arena with every launch.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.drivers import host_abi as abi
from rocmega.drivers.base import DeviceFacts, Function, SharedBuffer
from rocmega.errors import DriverError, StepError

if TYPE_CHECKING:
    import torch

    from rocmega.toolchain import Artifact

ARENA_BYTES = 1 << 38
GAP = 64 << 10  # inaccessible bytes between regions, at least
LINE = 128
_HANDLE = struct.Struct("<4Q")  # process, file descriptor, bytes before the buffer, bytes in all
STACK_BYTES = 32 << 10  # of a thread; kernels use two or three KB
STACK_GUARD = 1 << 20
HUGE_STACKS = 1 << 29  # bytes of stacks in huge pages: one wave has as many stacks as a small TLB has entries
MAX_REGIONS = 16384
RECORD_ROOM = 1 << 20  # choices of a launch that are kept
MAX_XCDS = 64  # of all ranks that run in one launch
MAX_BLOCKS = 65535
COMPUTE_UNITS = 4  # what a persistent kernel gets unless told otherwise: enough for blocks to wait for each other


@dataclass(frozen=True)
class LaunchReport:
    """What a launch did.

    Fields:
        reports, text, story: how much the checker found, the first of it, and what the two waves in question did before
            and after, if it is about two.
        choices: if they were recorded, (turn, wave) wherever the turn went to another wave than the one that had it.
    """

    turns: int
    switches: int
    seconds: float
    finished: bool
    reports: int
    text: str
    story: str = ""
    choices: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Order:
    """How the waves of a launch take turns, instead of the way that its seed stands for.

    Fields:
        choices: (turn, wave), ascending: who gets these turns; all others stay with whoever has the turn as long as it
            can go on. What was recorded of a launch with the same seed gives the same run again.
        in_step: the lanes of a wave take turns at every access, so that a turn is about an instruction.
        kind_memory: nothing is evicted, fetched, or arrives before it has to.
    """

    choices: tuple[tuple[int, int], ...] = ()
    in_step: bool = False
    kind_memory: bool = False

    @property
    def flags(self) -> int:
        return abi.REPLAY | abi.IN_STEP * self.in_step | abi.KIND_MEMORY * self.kind_memory


class Memory:
    """The arena of the process: makes, lists and frees regions."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._regions = (abi.Region * MAX_REGIONS)()
        self._exported: dict[int, tuple[tuple[int, int, int], SharedBuffer]] = {}  # address -> fd, lead, span; buffer
        self._cursor = GAP
        nbytes = ARENA_BYTES
        while True:
            try:
                window, data = self._reserve(nbytes), self._reserve(nbytes)
                break
            except DriverError:
                nbytes //= 2
                if nbytes < 1 << 30:
                    raise
        self.arena = abi.Arena(window, data, nbytes, self._regions, 0)
        self.lock = threading.RLock()  # also held by launches: the table must not change under a running kernel
        self.launches = 0
        self._stacks, self._stacks_bytes = 0, 0

    def _map(self, address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
        got = self._libc.mmap(address, nbytes, protection, flags, fd, 0)
        if got is None or got == ctypes.c_void_p(-1).value:
            raise DriverError(f"The host driver cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}.")
        return int(got)

    def _reserve(self, nbytes: int, address: int | None = None) -> int:
        no_reserve, fixed = 0x4000, 0x10
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve | (fixed if address else 0)
        return self._map(address, nbytes, 0, flags)

    def stacks(self, nbytes: int) -> int:
        """Memory for so many bytes of stacks, the same for all modules, with a guard below; call it with the lock."""
        if nbytes > self._stacks_bytes:
            if self._stacks_bytes:
                self._libc.munmap(self._stacks, self._stacks_bytes + STACK_GUARD)
            self._stacks_bytes = 0
            read_write, huge_page, no_reserve = mmap.PROT_READ | mmap.PROT_WRITE, 14, 0x4000
            self._stacks = self._reserve(nbytes + STACK_GUARD)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve | 0x10
            self._map(self._stacks + STACK_GUARD, nbytes, read_write, flags)
            self._stacks_bytes = nbytes
            self._libc.madvise(self._stacks + STACK_GUARD, min(nbytes, HUGE_STACKS), huge_page)
        return self._stacks + STACK_GUARD

    def _offsets(self) -> list[int]:
        return [self._regions[i].offset for i in range(self.arena.count)]

    def _find_place(self, span: int) -> int:
        """Where `span` bytes fit with a gap on both sides. Freed addresses come again as late as possible."""
        if self._cursor + span + GAP <= self.arena.bytes:
            at, self._cursor = self._cursor, self._cursor + span + GAP
            return at
        end = GAP
        for i in range(self.arena.count):
            region = self._regions[i]
            if region.offset // mmap.PAGESIZE * mmap.PAGESIZE - end >= span + GAP:
                return end
            end = _round_up(region.offset + region.bytes, mmap.PAGESIZE) + GAP
        raise DriverError(f"The host driver has no room left for {span} bytes of shared memory.")

    def allocate(self, name: str, nbytes: int, *, peers: bool = False) -> SharedBuffer:
        """A zeroed region, at the end of its pages so that what lies past it is inaccessible.

        peers: other ranks write it, in this process or, by its handle, in others.
        """
        if nbytes <= 0:
            raise DriverError(f"Shared memory {name!r} needs at least one byte, not {nbytes}.")
        lead = -nbytes % mmap.PAGESIZE // LINE * LINE
        span = _round_up(lead + nbytes, mmap.PAGESIZE)
        fd = os.memfd_create(name[:60] or "shared")  # without a name in any file system: nothing outlives its users
        try:
            os.ftruncate(fd, span)
            buffer = self._enter(name, nbytes, fd, lead, span, peers)
        except BaseException:
            os.close(fd)
            raise
        if not peers:
            os.close(fd)
            return buffer

        def release() -> None:
            del self._exported[buffer.address]
            os.close(fd)
            buffer.close()

        exported = SharedBuffer(name, buffer.address, buffer.tensor, release)
        self._exported[buffer.address] = (fd, lead, span), exported
        return exported

    def export(self, buffer: SharedBuffer) -> bytes:
        """The handle by which `attach` finds a buffer that was allocated for peers."""
        if buffer.address not in self._exported:
            raise DriverError(f"The buffer {buffer.name!r} was not allocated for peers and cannot be exported.")
        return _HANDLE.pack(os.getpid(), *self._exported[buffer.address][0])

    def attach(self, name: str, handle: bytes, nbytes: int) -> SharedBuffer:
        """The buffer of another process, or of this one, that a handle names."""
        pid, fd, lead, span = _HANDLE.unpack(handle)
        if pid == os.getpid():
            own = next(buffer for place, buffer in self._exported.values() if place == (fd, lead, span))
            return SharedBuffer(name, own.address, own.tensor, lambda: None)
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise DriverError(
                f"The memory {name!r} of process {pid} cannot be opened: {error.strerror}. Ranks on the CPU target "
                "need one machine, one user and one PID namespace (in containers: --pid=host, or all ranks in one)."
            ) from error
        try:
            return self._enter(name, nbytes, opened, lead, span, peers=True)
        finally:
            os.close(opened)

    def _enter(self, name: str, nbytes: int, fd: int, lead: int, span: int, peers: bool) -> SharedBuffer:
        """Puts a file's memory into the arena."""
        import torch

        with self.lock:
            if self.arena.count == MAX_REGIONS:
                raise DriverError(f"The host driver has room for {MAX_REGIONS} shared buffers; close some.")
            start = self._find_place(span)
            view = mmap.mmap(fd, span)
            self._map(self.arena.data + start, span, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10, fd)
            self._insert(name, start + lead, nbytes, peers)
        tensor = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=lead)
        return SharedBuffer(name, self.arena.window + start + lead, tensor, lambda: self._free(start, lead, span))

    def allow(self, stages: Sequence[str], writes: Mapping[str, Sequence[str]]) -> None:
        """Notes in every region which stages may store there; call it with the lock."""
        masks: dict[str, int] = {}
        for number, stage in enumerate(stages):
            for name in writes.get(stage, ()):
                masks[name] = masks.get(name, 0) | 1 << number
        for region in self._regions[: self.arena.count]:
            name = region.name.decode(errors="replace").partition("[")[0]
            region.stages = masks.get(name, abi.ALL_STAGES)

    def _insert(self, name: str, offset: int, nbytes: int, peers: bool) -> None:
        at, count = bisect.bisect(self._offsets(), offset), self.arena.count
        size, base = ctypes.sizeof(abi.Region), ctypes.addressof(self._regions)
        ctypes.memmove(base + (at + 1) * size, base + at * size, (count - at) * size)
        self._regions[at] = abi.Region(name.encode()[:63], offset, nbytes, None, None, peers, abi.ALL_STAGES)
        self.arena.count = count + 1

    def _free(self, start: int, lead: int, span: int) -> None:
        with self.lock:
            at = bisect.bisect_left(self._offsets(), start + lead)
            region, count = self._regions[at], self.arena.count
            if region.epochs:
                self._libc.munmap(region.epochs, region.bytes)
                self._libc.munmap(region.history, (region.bytes + 3) // 4 * abi.HISTORY_BYTES)
            size, base = ctypes.sizeof(abi.Region), ctypes.addressof(self._regions)
            ctypes.memmove(base + at * size, base + (at + 1) * size, (count - at - 1) * size)
            self.arena.count = count - 1
            self._reserve(span, self.arena.data + start)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


_memory: Memory | None = None
_memory_lock = threading.Lock()


def memory() -> Memory:
    """The arena, made when it is first needed."""
    global _memory
    with _memory_lock:
        if _memory is None:
            _memory = Memory()
        return _memory


class HostModule:
    """A loaded artifact. Loading the same file twice gives the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.library = ctypes.CDLL(str(path))
            version, self.launch = self.library.rocmega_host_abi, self.library.rocmega_host_launch
        except (OSError, AttributeError) as error:
            raise DriverError(f"{path} cannot be loaded as a kernel for the host: {error}.") from error
        version.restype = ctypes.c_uint32
        if version() != abi.version():
            raise DriverError(f"{path} was built from another version of hip/host: build it again.")
        self.launch.argtypes = [ctypes.POINTER(abi.Launch), ctypes.POINTER(abi.Result)]
        self.launch.restype = None

    def function(self, name: str, stages: Sequence[str] = ()) -> Function:
        """The kernel called `name`. Raises DriverError, naming the artifact, if it has none."""
        try:
            address = ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value
        except AttributeError:
            raise DriverError(f"{self.path} has no kernel {name!r}: was it built from another source?") from None
        return Function(name, (self, address), tuple(stages))


class ThreadRunning:
    """A launch in a thread of its own, which runs beside Python: the library is called without Python's lock."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="rocmega-launch", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # for the one who waits
            self._error = error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for its end; raises what went wrong in it, once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class HostDriver:
    """Runs kernels on the CPU, one OS thread, all blocks resident; see `rocmega.drivers.base.Driver`.

    seed: the order of threads; with check, also how the caches behave. Every seed must give the same bits.
    check: model caches that are not coherent and stores that take time, look for LDS races, and report at once a wait
        that can never end. Slow. A launch in which anything was found raises DriverError (StepError for such a wait).
    watch: report such waits without check too; else the kernel's own limit ends them, or `patience` seconds.

    Attributes that a caller may set between launches:
        order: an order of waves to follow, None for that of the seed.
        record: keep the order of each launch in its report.
        writes: stage -> regions that it may store to, with the checks on; regions that are nowhere named are anybody's.
            A name stands for all regions `name[...]`.
    """

    name = "host"
    arch = "host"
    polls_per_second = 400  # with ranks in other processes; wait_for_peers in hip/host/scheduler.cpp

    def __init__(
        self,
        seed: int | None = 0,
        check: bool = False,
        xcds: int = 8,
        *,
        watch: bool | None = None,
        patience: float = 10.0,
    ) -> None:
        import torch

        self.device = torch.device("cpu")
        self.seed, self.check, self.xcds, self.watch, self.patience = seed or 0, check, xcds, watch, patience
        self.has_peers = False  # other processes write some of the memory
        self.order: Order | None = None
        self.record = False
        self.writes: Mapping[str, Sequence[str]] | None = None
        self.last_report: LaunchReport | None = None

    def facts(self) -> DeviceFacts:
        """The processor, with the LDS of gfx950 and as many compute units as make sense for fibers."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceFacts(_processor(), self.arch, COMPUTE_UNITS, total, 160 << 10, self.xcds)

    def shared(self, name: str, nbytes: int, *, peers: bool = False) -> SharedBuffer:
        """Zeroed memory that kernels write; `name` appears in reports. peers: other ranks write it too."""
        return memory().allocate(name, nbytes, peers=peers)

    def mapped(self, name: str, nbytes: int) -> SharedBuffer:
        """Memory that a thread of Python's uses while a kernel runs; the checks see that kernels use system scope."""
        return memory().allocate(name, nbytes, peers=True)

    def export(self, buffer: SharedBuffer) -> bytes:
        """A handle by which another process of this machine opens a buffer that was made for peers."""
        return memory().export(buffer)

    def open(self, name: str, handle: bytes, nbytes: int) -> SharedBuffer:
        """The buffer that another rank exported, as memory of this process."""
        foreign = _HANDLE.unpack(handle)[0] != os.getpid()
        if foreign and self.check:
            raise DriverError("The checks see one process: run the ranks as threads (rocmega.parallel.threads).")
        buffer = memory().attach(name, handle, nbytes)
        self.has_peers |= foreign
        return buffer

    def constant(self, tensor: torch.Tensor) -> int:
        """The address of a contiguous CPU tensor that nobody writes during a launch; the caller keeps it alive."""
        if tensor.device != self.device or not tensor.is_contiguous():
            raise DriverError(f"Kernels on the host take contiguous CPU tensors, not one on {tensor.device}.")
        return int(tensor.data_ptr())

    def load(self, artifact: Artifact) -> HostModule:
        """Loads what the toolchain built for `host`."""
        if artifact.target != self.arch:
            raise DriverError(f"{artifact.path} was built for {artifact.target} and does not run on the host.")
        return HostModule(artifact.path)

    def max_blocks(self, function: Function, threads: int, dynamic_lds: int) -> int:
        """Any number of blocks can be resident; this is the largest the checker can name."""
        return MAX_BLOCKS

    def launch(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> None:
        """Runs the kernel to its end. Raises what the checker found: StepError for a wait that can never end."""
        self.launch_ranks(function, [args_address], blocks, threads)

    def start(
        self,
        function: Function,
        args_address: int,
        blocks: int,
        threads: int,
        dynamic_lds: int = 0,
        stream: Any = None,
    ) -> ThreadRunning:
        """The same in a thread of its own."""
        return ThreadRunning(lambda: self.launch(function, args_address, blocks, threads, dynamic_lds, stream))

    def launch_ranks(self, function: Function, arguments: Sequence[int], blocks: int, threads: int) -> None:
        """Runs the kernel for several ranks of this process at once, each with its own argument and `blocks` blocks."""
        ranks = len(arguments)
        if not 1 <= blocks * ranks <= MAX_BLOCKS or threads < 64 or threads % 64:
            raise DriverError(f"{blocks} blocks of {threads} threads: a block is one or more waves of 64 threads.")
        if self.xcds * ranks > MAX_XCDS:
            raise DriverError(f"{ranks} ranks of {self.xcds} XCDs: the host target models {MAX_XCDS} XCDs in all.")
        module, address = function.handle
        names = (ctypes.c_char_p * max(1, len(function.stages)))(*[s.encode() for s in function.stages])
        watch = self.check if self.watch is None else self.watch
        flags = abi.CHECK * self.check | abi.WATCH_WAITS * watch | abi.PEERS * self.has_peers
        choices = [turn << 16 | wave for turn, wave in self.order.choices] if self.order else []
        if self.order:
            flags |= self.order.flags
        record = (ctypes.c_uint64 * RECORD_ROOM)() if self.record else None
        result, mem = abi.Result(), memory()
        with mem.lock:
            mem.launches += 1
            if self.check:
                mem.allow(function.stages, self.writes or {})
            launch = abi.Launch(
                address, (ctypes.c_void_p * ranks)(*arguments), ctypes.pointer(mem.arena), names,
                len(function.stages), mem.launches, ranks, blocks, threads, self.xcds,
                flags, self.seed, self.patience, mem.stacks(ranks * blocks * threads * STACK_BYTES), STACK_BYTES,
                (ctypes.c_uint64 * max(1, len(choices)))(*choices), len(choices), record, RECORD_ROOM * self.record,
            )  # fmt: skip
            module.launch(ctypes.byref(launch), ctypes.byref(result))
        text = result.report.decode(errors="replace")
        self.last_report = LaunchReport(
            result.turns, result.switches, result.seconds, bool(result.finished), result.reports, text,
            result.story.decode(errors="replace"),
            tuple((c >> 16, c & 0xFFFF) for c in record[: min(result.recorded, RECORD_ROOM)]) if record else (),
        )  # fmt: skip
        if result.reports:
            self._raise(function, result, text)

    def _raise(self, function: Function, result: abi.Result, text: str) -> None:
        more = f" ({result.reports - 1} more reports followed.)" if result.reports > 1 else ""
        if result.stuck:
            stage = function.stage(result.stage)
            raise StepError(
                result.rank, result.block, stage, result.task, result.expected, result.seen, f"{text}{more}"
            )
        raise DriverError(f"Kernel {function.name} on the host, seed {self.seed}: {text}.{more}")

    def synchronize(self) -> None:
        """Nothing to wait for: launches return when the kernel has ended."""


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
