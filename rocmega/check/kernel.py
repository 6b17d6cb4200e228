"""A kernel of your own as a subject: where its source is, and what it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.drivers.host import HostDriver
from rocmega.toolchain import Unit, compile

if TYPE_CHECKING:
    import torch

    from rocmega.check.subject import Case

THREADS = 256


class Kernel:
    """One kernel, launched a few times in a row over the same memory.

    source: a .hip file; kernel: its entry point. It is given one pointer, to
    `struct { u32 epoch, rows; const ... *each constant; ... *each region; }`, in the order of the mappings here.
    stages: names of the stages that it marks. constants: CPU tensors that nobody writes. regions: bytes of what it
    writes, zeroed before the first launch. results: the regions that have to be the same for every seed and number of
    blocks. epochs: how far `epoch`, 1 in the first launch, is moved on from one launch to the next. writes: stage ->
    the regions that it may store to; None: nobody says.
    """

    def __init__(
        self,
        source: str | Path,
        kernel: str,
        *,
        stages: Sequence[str],
        regions: Mapping[str, int],
        results: Sequence[str],
        constants: Mapping[str, torch.Tensor] | None = None,
        blocks: Sequence[int] = (1, 2, 3, 7),
        rows: Sequence[int] = (1,),
        launches: int = 2,
        epochs: int = 1,
        defines: Mapping[str, str | int] | None = None,
        writes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.name, self.blocks, self.rows = kernel, tuple(blocks), tuple(rows)
        self.driver = HostDriver()
        self.driver.writes = writes
        self.regions, self.results = dict(regions), tuple(results)
        self.constants, self.launches, self.epochs = dict(constants or {}), launches, epochs
        artifact = compile(Unit(Path(source).stem, Path(source), {}, dict(defines or {})), "host")
        self._function = self.driver.load(artifact).function(kernel, stages)
        pointers = [(name, ctypes.c_uint64) for name in (*self.constants, *self.regions)]
        self._args = type("Args", (ctypes.Structure,), {"_fields_": [("epoch", ctypes.c_uint32),
                                                                    ("rows", ctypes.c_uint32), *pointers]})  # fmt: skip

    def run(self, case: Case) -> bytes:
        """All launches, over fresh memory: the results, one after the other."""
        buffers = {name: self.driver.shared(name, nbytes) for name, nbytes in self.regions.items()}
        try:
            args = self._args(1, case.rows)
            for name, tensor in self.constants.items():
                setattr(args, name, self.driver.constant(tensor))
            for name, buffer in buffers.items():
                setattr(args, name, buffer.address)
            for _ in range(self.launches):
                self.driver.launch(self._function, ctypes.addressof(args), case.blocks, THREADS)
                args.epoch += self.epochs
            return b"".join(buffers[name].tensor.numpy().tobytes() for name in self.results)
        finally:
            for buffer in buffers.values():
                buffer.close()
