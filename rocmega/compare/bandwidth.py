"""How fast the device reads its memory: what percentages of bandwidth are percentages of.

Several ways, each a few times; the fastest median counts, so that a poor way of measuring flatters nobody.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocmega.errors import DriverError, ToolchainError

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import Driver, Function
    from rocmega.toolchain import Unit

BYTES = 4 << 30  # some 80 times the largest L2
THREADS = 256
CHUNK = THREADS * 8 * 16  # bytes that a block reads at a time, as in hip/measure/read.hip
REPEATS = 10


@dataclass(frozen=True)
class Bandwidth:
    """Fields:
    bytes_per_second: the best of `ways`. how: which it was.
    ways: way -> bytes per second, the median of REPEATS reads. failed: way -> why it could not be tried.
    """

    bytes_per_second: float
    how: str
    ways: dict[str, float]
    failed: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


class _Args(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("sums", ctypes.c_uint64), ("chunks", ctypes.c_uint64)]


class ReadKernel:
    """hip/measure/read.hip. Raises ToolchainError or DriverError if it cannot be had here."""

    def __init__(self, driver: Driver) -> None:
        from rocmega.toolchain import compile

        self.driver = driver
        self.function: Function = driver.load(compile(unit(), driver.arch)).function("read_memory")
        self.most = driver.max_blocks(self.function, THREADS, 0)

    def prepare(self, data: torch.Tensor, blocks: int) -> tuple[Callable[[], None], torch.Tensor]:
        """A function that reads `data` (uint8, whole chunks) with `blocks` blocks, and the sums it leaves: int32
        [blocks, THREADS].
        """
        import torch

        sums = self.driver.shared("sums", blocks * THREADS * 4)
        fields = _Args(self.driver.constant(data), sums.address, data.numel() // CHUNK)
        args = torch.frombuffer(bytearray(fields), dtype=torch.uint8).to(self.driver.device)
        address = self.driver.constant(args)

        def read(keep: Any = args) -> None:
            self.driver.launch(self.function, address, blocks, THREADS)

        return read, sums.tensor.view(torch.int32).view(blocks, THREADS)


def unit() -> Unit:
    """What the toolchain compiles."""
    from rocmega.toolchain import Unit
    from rocmega.toolchain.unit import hip_dir

    return Unit("read", hip_dir() / "measure" / "read.hip")


def measure(driver: Driver) -> Bandwidth | None:
    """The device's read bandwidth; None on a CPU, which would say nothing about a GPU."""
    import torch

    if driver.device.type == "cpu":
        return None
    free, _ = torch.cuda.mem_get_info(driver.device)
    size = min(BYTES, free // 2) // CHUNK * CHUNK
    data = torch.empty(size, dtype=torch.uint8, device=driver.device).random_(0, 256)
    ways, failed = {}, {}
    for name, read in _torch_ways(data):
        ways[name] = size / _seconds(read)
    try:
        kernel = ReadKernel(driver)
        for blocks in _block_counts(kernel.most, driver.facts().compute_units):
            read, _ = kernel.prepare(data, blocks)
            ways[f"read.hip, {blocks} blocks"] = size / _seconds(read)
    except (ToolchainError, DriverError) as error:
        failed["read.hip"] = str(error)
    del data, read
    torch.cuda.empty_cache()
    best = max(ways, key=lambda way: ways[way])
    return Bandwidth(ways[best], best, ways, failed)


def _torch_ways(data: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    floats = data.view(torch.float32)
    yield "torch sum of float32", lambda: floats.sum()
    yield "torch maximum of int32", lambda: data.view(torch.int32).max()


def _block_counts(most: int, units: int) -> list[int]:
    return [units * each for each in (1, 2, 4, 8) if units * each <= most]


def _seconds(read: Callable[[], Any]) -> float:
    import torch

    from rocmega.compare.timing import quantile

    times = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        read()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return quantile(times[2:], 0.5)
