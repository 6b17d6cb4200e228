"""How long a decode step takes on this machine by each path: measured once, kept beside the compiled kernels.

`choose` (rocmega.policy) looks at it: the path that was measured to be faster runs the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError
from rocmega.policy import Measured
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.runner import Runner

STEPS = 7  # of which the median counts, after two to warm up
VERSION = 1


def folder() -> Path:
    """Where measurements are kept."""
    from rocmega.toolchain.store import root

    return root() / "tuning"


def place(runner: Runner) -> Path:
    """The file for this model, as it is loaded, on this device."""
    what = {
        "version": VERSION,
        "config": {name: str(value) for name, value in vars(runner.config).items()},
        "formats": runner.weights.formats.label,
        "activations": runner.activations,
        "target": runner.target,
        "where": runner.where,
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    return folder() / f"{key}.json"


def load(runner: Runner) -> tuple[Measured, ...]:
    """What was measured here; nothing if nothing was, or the file is damaged."""
    try:
        cells = json.loads(place(runner).read_text(encoding="utf-8"))["cells"]
        return tuple(Measured(**cell) for cell in cells)
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def save(runner: Runner, cells: Sequence[Measured]) -> Path:
    """Keeps measurements, in place of earlier ones."""
    file = place(runner)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"model": str(runner.directory.resolve()), "where": runner.where}
        text = json.dumps({**kept, "cells": [vars(cell) for cell in cells]}, indent=2)
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)  # complete, or not there
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error}. Set ROCMEGA_CACHE to a folder that can.") from None
    return file


def measure(
    runner: Runner, rows: Sequence[int], contexts: Sequence[int], progress: Progress = silent
) -> list[Measured]:
    """Times steps of so many rows, each with so many tokens in its cache, by every path that is loaded, by turns.

    The caches hold what they hold: zeros after loading. Raises RequestError if the mega-task cannot run here.
    """
    cells = [(count, context) for context in contexts for count in rows]
    paths = ("mega", *(path for path in runner.paths if path != "mega"))
    out = []
    for done, (count, context) in enumerate(cells):
        progress(f"{count} rows, {context} tokens", done, len(cells))
        sequences = [runner.sequence() for _ in range(count)]
        try:
            times: dict[str, list[float]] = {path: [] for path in paths}
            for turn in range(STEPS + 2):
                for path in paths if turn % 2 else reversed(paths):
                    seconds = _step(runner, sequences, context, path)
                    if turn >= 2:
                        times[path].append(seconds * 1e3)
            medians = {f"{path}_ms": statistics.median(each) for path, each in times.items()}
            out.append(Measured(count, context, **medians))
        finally:
            for sequence in sequences:
                sequence.close()
    return out


def _step(runner: Runner, sequences: list[Any], context: int, path: str) -> float:
    for sequence in sequences:
        sequence.length = context - 1
    start = time.perf_counter()
    runner.step([(sequence, 1) for sequence in sequences], path)
    return time.perf_counter() - start
