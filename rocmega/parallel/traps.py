"""What is known to keep ranks from sharing memory, found before it shows as a wait that never ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
LEGACY_IPC = "HSA_ENABLE_IPC_MODE_LEGACY"
SHARED_MEMORY = 1 << 30  # bytes of /dev/shm that RCCL and NCCL are content with; Docker gives 64 MB
OPEN_SECONDS = 90  # another Python with torch


@dataclass(frozen=True)
class Trap:
    """Something that is, or may be, in the way of several ranks. `cost`: what fails and what to do; empty: nothing."""

    name: str
    detail: str
    cost: str = ""


def of_environment(environment: Mapping[str, str], gpus: Sequence[tuple[str, int]]) -> Iterator[Trap]:
    """gpus: architecture and compute units of each AMD GPU that the kernel driver knows."""
    if len(set(gpus)) > 1:
        kinds = ", ".join(sorted({f"{arch} with {units} compute units" for arch, units in gpus}))
        yield Trap(
            "GPU types",
            f"different ones: {kinds}",
            f"ranks of one model need equal GPUs: choose them with {VISIBLE[0]}",
        )
    small = sorted({units for arch, units in gpus if _one_xcd(arch, units)})
    if small:
        yield Trap(
            "partitions",
            f"GPUs of {', '.join(map(str, small))} compute units are single XCDs of a partitioned GPU (CPX)",
            "each is a device with an eighth of the compute units and of the bandwidth: for the whole GPU as one rank, "
            "set the partition to SPX (amd-smi set --gpu all --compute-partition SPX)",
        )
    masks = [name for name in VISIBLE if name in environment]
    if len(masks) > 1:
        yield Trap(
            "visible devices",
            " and ".join(f"{name}={environment[name]}" for name in masks),
            f"the masks apply one after the other and renumber devices: keep {VISIBLE[0]} alone, equal on all ranks",
        )
    expandable = [name for name in ALLOCATOR_OPTIONS if "expandable_segments:true" in environment.get(name, "").lower()]
    if expandable:
        yield Trap(
            "expandable segments",
            f"{expandable[0]}={environment[expandable[0]]}: torch's memory cannot be exported. The mega-task's shared "
            "buffers are not torch's, so it does not matter to them",
        )


def _one_xcd(arch: str, units: int) -> bool:
    from rocmega.drivers.hip import UNITS_PER_XCD

    return units in UNITS_PER_XCD.get(arch, ())


def of_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Trap]:
    """Room for the collective library that the standard path uses between GPUs."""
    if not folder.is_dir():
        return
    total = shutil.disk_usage(folder).total
    size = f"{folder} has {total >> 20} MB"
    if total < SHARED_MEMORY:
        yield Trap("shared memory", size, "RCCL or NCCL may fail in the standard path: docker run --shm-size=8g")
    else:
        yield Trap("shared memory", size)


def of_handles(driver: Driver, other_index: int | None = None) -> Trap:
    """Whether another process opens what this one exports; other_index: on which GPU."""
    with driver.shared("doctor", 4096, peers=True) as buffer:
        command = [sys.executable, "-c", _OPEN, driver.name, str(other_index), driver.export(buffer).hex()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=OPEN_SECONDS, check=False)
            said = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        except subprocess.TimeoutExpired:
            return Trap("memory between processes", f"not opened within {OPEN_SECONDS} s", _remedy(driver.name))
    if done.returncode:
        return Trap("memory between processes", f"another process cannot open it: {said[0]}", _remedy(driver.name))
    return Trap("memory between processes", "another process opens what this one exports")


# What the other process does.
_OPEN = """
import sys
from rocmega.drivers.select import pick
kind, index, handle = sys.argv[1:]
driver = pick(kind, index=None if index == "None" else int(index))
driver.open("doctor", bytes.fromhex(handle), 4096).close()
"""


def _remedy(driver: str) -> str:
    cost = (
        "ranks cannot share a model. All need one user, one IPC and one PID namespace (docker: --ipc=host --pid=host)"
    )
    if driver == "hip":
        other = f"without {LEGACY_IPC}" if os.environ.get(LEGACY_IPC, "0") != "0" else f"with {LEGACY_IPC}=1"
        cost += f", every GPU visible to every rank. Try once more {other}: ROCm has two kinds of handles"
    return cost


def check_equal(accounts: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError if ranks differ in what has to be equal; each rank's account is name -> value."""
    differ = [name for name in accounts[0] if len({str(account[name]) for account in accounts}) > 1]
    if differ:
        listed = "; ".join(
            f"{name}: {', '.join(f'{account[name]} (rank {rank})' for rank, account in enumerate(accounts))}"
            for name in differ
        )
        raise RequestError(f"Ranks have to be equal, or they compute different bits, and these are not. {listed}.")


def account(driver: Driver | None) -> dict[str, Any]:
    """What has to be equal on all ranks."""
    import torch

    from rocmega import __version__

    facts = driver.facts() if driver is not None else None
    return {
        "rocmega": __version__,
        "torch": torch.__version__,
        "ROCm": torch.version.hip,
        "CUDA": torch.version.cuda,
        "architecture": facts and facts.arch,
        "device": facts and facts.name,
        "compute units": facts and facts.compute_units,
    }
