"""AMD code objects on the CPU, as a `Driver`: the mega-task's own Python side runs on it unchanged.

The emulator (a package `cdna_emulate`) is not part of this repository. It executes the instructions of a gfx942 or
gfx950 code object wave by wave, with memory that is coherent and in order: so it shows that what was compiled computes
the right thing, not that a fence or a cache bit is where it must be.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rocmega.drivers.base import DeviceFacts, Function, SharedBuffer
from rocmega.errors import DriverError
from rocmega.toolchain import Artifact

ARCHS = ("gfx942", "gfx950")
MMA_K = {
    "gfx942": 16,
    "gfx950": 32,
}  # depth of a bf16 matrix instruction; the host target is built for one or the other
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
GUARD = 4096  # inaccessible bytes around each shared buffer
ALIGNMENT = 256
MAX_BLOCKS = 1024
COMPUTE_UNITS = 3  # what a persistent kernel gets unless told otherwise


def emulator() -> ModuleType:
    """The emulator, or a skip that says what is missing; for use while a test module is imported too."""
    if not os.environ.get("TINYGRAD_REPO"):
        pytest.skip("no emulator of AMD code objects: TINYGRAD_REPO is not set", allow_module_level=True)
    return pytest.importorskip(
        "cdna_emulate", reason="no emulator of AMD code objects: cdna_emulate", exc_type=ImportError
    )


@dataclass(frozen=True)
class Execution:
    """What a launch took. `instructions` counts those of all waves."""

    instructions: int
    seconds: float


@cache
def _code_object(path: Path) -> Any:
    """A loaded code object; it remembers its decoded instructions, which is most of a first launch."""
    return emulator().CodeObject(path)


class EmulatorModule:
    """A loaded artifact."""

    def __init__(self, path: Path) -> None:
        self.path, self.code = path, _code_object(path)

    def function(self, name: str, stages: Sequence[str] = ()) -> Function:
        """The kernel called `name`. Raises DriverError, naming the artifact, if it has none."""
        if name not in self.code.kernels:
            raise DriverError(f"{self.path} has no kernel {name!r}: was it built from another source?")
        return Function(name, (self.code, name), tuple(stages))


class EmulatorDriver:
    """Executes code objects of one architecture; see `rocmega.drivers.base.Driver`.

    seed: of the order in which waves get their slices; None is round robin. Every seed must give the same bits.
    slice_instructions: of a wave before the next one runs, about. most: wave-instructions of a launch.
    A launch may touch what `shared` and `constant` handed out, nothing else: a stray access raises DriverError.
    """

    name = "emulator"
    polls_per_second = 1000

    def __init__(self, arch: str, seed: int | None = 0, *, slice_instructions: int = 200, most: int = 10**9) -> None:
        self.arch, self.seed, self.slice_instructions, self.most = arch, seed, slice_instructions, most
        self.device = torch.device("cpu")
        self.executions: list[Execution] = []
        self._shared: dict[int, int] = {}  # address -> bytes
        self._constants: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = weakref.WeakValueDictionary()

    def facts(self) -> DeviceFacts:
        """The emulated device, with as many compute units as one has patience for."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceFacts(f"emulated {self.arch}", self.arch, COMPUTE_UNITS, memory, LDS_BYTES[self.arch], 8)

    def shared(self, name: str, nbytes: int, *, peers: bool = False) -> SharedBuffer:
        """Zeroed memory, with bytes before and behind it that kernels may not touch."""
        if nbytes <= 0:
            raise DriverError(f"Shared memory {name!r} needs at least one byte, not {nbytes}.")
        whole = torch.zeros(nbytes + 2 * GUARD + ALIGNMENT, dtype=torch.uint8)
        start = GUARD + -(whole.data_ptr() + GUARD) % ALIGNMENT
        tensor = whole[start : start + nbytes]
        address = tensor.data_ptr()
        self._shared[address] = nbytes
        return SharedBuffer(name, address, tensor, lambda: self._shared.__delitem__(address))

    def constant(self, tensor: torch.Tensor) -> int:
        """The address of a contiguous CPU tensor; the caller keeps it alive, and kernels may read it as long."""
        if tensor.device != self.device or not tensor.is_contiguous():
            raise DriverError(f"Emulated kernels take contiguous CPU tensors, not one on {tensor.device}.")
        self._constants[tensor.data_ptr(), tensor.nbytes] = tensor
        return tensor.data_ptr()

    def load(self, artifact: Artifact) -> EmulatorModule:
        """Loads a code object of this architecture."""
        if artifact.target != self.arch:
            raise DriverError(f"{artifact.path} was built for {artifact.target}, not for {self.arch}.")
        return EmulatorModule(artifact.path)

    def max_blocks(self, function: Function, threads: int, dynamic_lds: int) -> int:
        """All blocks are resident; each has compute units, so to speak, of its own."""
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
        """Runs the kernel to its end, with one pointer argument."""
        ce = emulator()
        code, name = function.handle
        start = time.perf_counter()
        try:
            count = ce.launch(
                code, name, blocks, threads, struct.pack("<Q", args_address), dynamic_lds=dynamic_lds, seed=self.seed,
                slice_insts=self.slice_instructions, max_insts=self.most, verbose=False,
                allowed=[*self._shared.items(), *self._constants.keys()],
            )  # fmt: skip
        except ce.EmulationError as error:
            raise DriverError(f"Kernel {name} in the emulator, seed {self.seed}: {error}.") from error
        self.executions.append(Execution(count, time.perf_counter() - start))

    def synchronize(self) -> None:
        """Nothing to wait for: launches return when the kernel has ended."""
