"""Runs single stages on the host target: a kernel around them, its arguments, and what it left in its regions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rocmega.drivers.base import Function
from rocmega.drivers.host import HostDriver
from rocmega.toolchain import Unit, compile
from tests.models.glm.mutants import FAST

THREADS, ERROR_WORDS = 256, 8
LDS_WORDS = 15104  # as tight as the tightest target


@dataclass(frozen=True)
class Region:
    """Memory that the kernel writes: so many values of a dtype, or of tagged pairs. `before`: what they hold first."""

    count: int
    dtype: torch.dtype = torch.float32
    pairs: bool = False
    before: torch.Tensor | None = None

    def bytes(self) -> int:
        return self.count * (8 if self.pairs else self.dtype.itemsize)


def function(
    source: Path, kernel: str, sizes: str, stages: Sequence[str], headers: Mapping[str, str] | None = None
) -> Function:
    """sizes: the text of sizes.h, which the source includes. headers: others that are not as they lie there."""
    return _function(source, kernel, sizes, tuple(stages), tuple((headers or {}).items()))


@cache
def _function(
    source: Path, kernel: str, sizes: str, stages: tuple[str, ...], headers: tuple[tuple[str, str], ...]
) -> Function:
    header = f"#pragma once\n{FAST if headers else ''}{sizes}\nconstexpr int RANKS = 1, LDS_WORDS = {LDS_WORDS};\n"
    unit = Unit(f"stage-{kernel}", source, {"sizes.h": header, **dict(headers)}, {})
    return HostDriver().load(compile(unit, "host")).function(kernel, list(stages))


def run(
    of: Function, fields: dict[str, int | float | torch.Tensor | Region | None], *, blocks: int, seed: int | None = None
) -> dict[str, torch.Tensor]:
    """One checked launch. fields: the kernel's arguments in their order, without `error`, which comes last.

    Returns what the regions hold; of tagged pairs the payloads, as float32. Raises StepError or DriverError as the
    driver does, AssertionError for anything that the checker reports.
    """
    driver = HostDriver(seed, check=True)
    fields = {**fields, "error": Region((1 + blocks) * ERROR_WORDS, torch.int32)}
    buffers = {name: driver.shared(name, of_.bytes()) for name, of_ in fields.items() if isinstance(of_, Region)}
    try:
        for name, buffer in buffers.items():
            before = fields[name].before
            if before is not None:
                buffer.tensor.copy_(before.contiguous().view(-1).view(torch.uint8))
        args = _struct(fields)()
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                setattr(args, name, driver.constant(value))
            else:
                setattr(args, name, buffers[name].address if name in buffers else value or 0)
        driver.launch(of, ctypes.addressof(args), blocks, THREADS)
        report = driver.last_report
        assert report is not None
        assert report.finished
        assert report.reports == 0, report.text
        assert not buffers["error"].tensor.any(), buffers["error"].tensor.view(torch.int32).view(-1, ERROR_WORDS)
        return {name: _values(buffer.tensor, fields[name]) for name, buffer in buffers.items()}
    finally:
        for buffer in buffers.values():
            buffer.close()


def _struct(fields: dict[str, object]) -> type[ctypes.Structure]:
    kinds = {int: ctypes.c_uint32, float: ctypes.c_float}
    members = [(name, kinds.get(type(value), ctypes.c_uint64)) for name, value in fields.items()]
    return type("Args", (ctypes.Structure,), {"_fields_": members})


def _values(raw: torch.Tensor, region: Region) -> torch.Tensor:
    values = raw.clone()
    return values.view(torch.float32).view(-1, 2)[:, 0].clone() if region.pairs else values.view(region.dtype)
