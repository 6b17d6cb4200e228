"""What a decode step costs: the mega-task beside the standard path, on the same weights and cache, in one run.

`rocmega compare`, `python -m rocmega.compare` and, from Python, `measure(Options(...))`. The measuring needs torch and
what the drivers need; tables are drawn by rich where it is installed, else written as plain text.

An arm is a way to run a step (`arms.py`). For each number of rows and each context, every arm is judged first
(`accuracy.py`): one that is further from float32 than its number formats explain gets no latency. Those that pass are
timed in turns (`timing.py`), on weights that no cache can hold. docs/performance.md describes the method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocmega.compare.options import Options
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.compare.report import Report

__all__ = ["Options", "measure"]


def measure(options: Options, progress: Progress = silent) -> Report:
    """Carries the comparison out. An arm that cannot run has a row that says why.

    Raises RocmegaError if there is nothing to measure: no device, no such model, no room, weights that a cache holds.
    """
    from rocmega.compare.run import compare

    return compare(options, progress)
