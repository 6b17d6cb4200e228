"""The kernel of ranks.hip, for one rank, and what numpy says of it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rocmega.drivers import Driver
from rocmega.errors import StepError
from rocmega.parallel import Group, SymmetricBuffer
from rocmega.toolchain import Unit, compile

SOURCE = Path(__file__).with_name("ranks.hip")
STAGES = ("begin", "share", "reduce")
ROWS, VALUES, LAYERS = 16, 40, 6  # an even number of versions: hip/handoff/reduce.h
SPAN = LAYERS + 1  # tags of a step
HANDOFF = Path(__file__).resolve().parents[2] / "hip" / "handoff"


class Params(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint32) for name in ("rows", "rank", "poll_limit", "layers", "epoch", "mute")],
        *[(name, ctypes.c_uint64) for name in ("x", "error", "parts", "alarms", "out")],
    ]


EXCHANGES = ("PUSH", "PULL", "FLAGGED")


def unit(ranks: int, bug: tuple[str, str] | None = None, exchange: str = "PUSH") -> Unit:
    """bug: a piece of reduce.h, and what it becomes. exchange: how shares travel, see there."""
    headers = {"ranks_config.h": f"#pragma once\nconstexpr int ROWS = {ROWS}, RANKS = {ranks}, VALUES = {VALUES};\n"}
    if bug is not None:
        text = (HANDOFF / "reduce.h").read_text()
        assert text.count(bug[0]) == 1, bug
        headers["handoff/reduce.h"] = text.replace(*bug)
    return Unit("ranks", SOURCE, headers, {"EXCHANGE": exchange})


class RankChain:
    """One rank. Every rank makes one, and all run the same steps."""

    def __init__(
        self,
        group: Group,
        driver: Driver,
        blocks: int = 2,
        bug: tuple[str, str] | None = None,
        exchange: str = "PUSH",
    ) -> None:
        self.group, self.driver, self.blocks = group, driver, blocks
        self.limit = group.poll_limit(driver) or 10**6  # measured, on a GPU, before anybody waits for anybody
        module = driver.load(compile(unit(group.tp, bug, exchange), driver.arch))
        self.function = module.function("ranks", STAGES)
        self.buffers = {
            "x": driver.shared("x", 2 * ROWS * VALUES * 8),
            "error": driver.shared("error", (1 + blocks) * 32),
            "out": driver.shared("out", LAYERS * ROWS * VALUES * 4),
        }
        place = ROWS * VALUES * 8
        sizes = {"parts": (2 * group.tp * place, place), "alarms": (4, 0)}
        self.symmetric: dict[str, SymmetricBuffer] = {}
        for name, size in sizes.items():
            self.symmetric[name] = group.symmetric(driver, name, *size)
        self.tables = {
            name: torch.tensor(buffer.addresses, dtype=torch.int64, device=driver.device)
            for name, buffer in self.symmetric.items()
        }
        self.steps = 0

    def step(self, rows: int = 3, *, mute: bool = False) -> np.ndarray:
        """Bits of x(0) ... x(LAYERS), [LAYERS + 1, rows, VALUES]."""
        epoch = 1 + self.steps * SPAN
        self.steps += 1
        params = Params(rows, self.group.rank, self.limit, LAYERS, epoch, mute)
        for name, buffer in self.buffers.items():
            setattr(params, name, buffer.address)
        for name, table in self.tables.items():
            setattr(params, name, self.driver.constant(table))
        there = torch.frombuffer(bytearray(params), dtype=torch.uint8).to(self.driver.device)
        self.driver.launch(self.function, self.driver.constant(there), self.blocks, 256)
        self.driver.synchronize()
        self._raise_if_given_up()
        before = self._words("out").view(LAYERS, ROWS, VALUES)[:, :rows]
        last = self._words("x").view(2, ROWS, VALUES, 2)[LAYERS % 2, :rows, :, 0]
        return torch.cat([before, last[None]]).numpy()

    def _words(self, name: str) -> torch.Tensor:
        return self.buffers[name].tensor.cpu().clone().view(torch.int32)

    def _raise_if_given_up(self) -> None:
        launch, *blocks = self._words("error").view(-1, 8).tolist()
        if launch[0]:
            _, rank, stage, task, _, wanted, seen, peer = min((b for b in blocks if b[0]), key=lambda b: b[4])
            facts: Any = (rank, 0, self.function.stage(stage), task, wanted, seen)
            error = StepError(*facts, peer=peer - 1 if peer else None)
            raise StepError(*facts, self.group.failure(str(error)), peer=error.peer)

    def close(self) -> None:
        for symmetric in self.symmetric.values():
            symmetric.close()
        for buffer in self.buffers.values():
            buffer.close()


def reference(ranks: int, epoch: int = 1, rows: int = 3) -> np.ndarray:
    """Float64: x(0) ... x(LAYERS)."""
    row, i = np.meshgrid(np.arange(rows), np.arange(VALUES), indexing="ij")
    x = [((row * 31 + i * 17 + epoch) % 64 - 32) / 32]
    k, j = np.meshgrid(np.arange(VALUES), np.arange(VALUES), indexing="ij")
    weights = sum((k * 7 + j * 3 + 5 * rank) % 3 - 1 for rank in range(ranks))
    for _ in range(LAYERS):
        x.append(x[-1] + x[-1] @ weights / VALUES)
    return np.stack(x)
