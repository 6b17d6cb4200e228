"""How long a poll takes: kernels count polls, people want a wait to end after so many seconds."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from rocmega.errors import DriverError

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver
    from rocmega.toolchain import Unit

POLLS = 20_000  # some ten milliseconds on a GPU: a launch is nothing beside it
RUNS = 3  # the first one loads the kernel
THREADS = 256


class _Args(ctypes.Structure):
    _fields_ = [
        ("polls", ctypes.c_uint32),
        ("words", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("alarms", ctypes.c_uint64),
    ]


def unit() -> Unit:
    """What the toolchain compiles."""
    from rocmega.toolchain import Unit
    from rocmega.toolchain.unit import hip_dir

    return Unit("poll", hip_dir() / "measure" / "poll.hip")


def per_second(driver: Driver, polls: int = POLLS) -> int:
    """Polls of a second, of a block that waits for other ranks in memory of this device that nobody else uses.

    Measured, the fastest of a few runs: a busy device polls more slowly, and its waits last longer than was asked for.
    Raises ToolchainError or DriverError if the kernel cannot be built or run.
    """
    import torch

    from rocmega.toolchain import compile

    function = driver.load(compile(unit(), driver.arch)).function("poll", ["poll"])
    best = 0.0
    with driver.shared("words", 16, peers=True) as words, driver.shared("alarm", 4, peers=True) as alarm:
        for _ in range(RUNS):
            alarm.tensor.zero_()
            with driver.shared("error", 64) as error:
                table = torch.tensor([alarm.address] * 2, dtype=torch.int64, device=driver.device)
                fields = _Args(polls, words.address, error.address, driver.constant(table))
                args = torch.frombuffer(bytearray(fields), dtype=torch.uint8).to(driver.device)
                driver.synchronize()
                start = time.perf_counter()
                driver.launch(function, driver.constant(args), 1, THREADS)
                driver.synchronize()
                best = max(best, polls / (time.perf_counter() - start))
                if not int(error.tensor.view(torch.int32)[0]):
                    raise DriverError("The kernel that measures a poll ended without having waited.")
    return int(best)
