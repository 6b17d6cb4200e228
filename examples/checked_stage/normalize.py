"""A stage of one's own for `rocmega check`: `rocmega check examples/checked_stage/normalize.py`."""

from pathlib import Path

import torch

from rocmega.check import Kernel

TASKS, THREADS = 4, 256

subject = Kernel(
    Path(__file__).with_name("normalize.hip"),
    "normalize",
    stages=["squares", "result"],
    constants={"x": torch.arange(TASKS * THREADS, dtype=torch.float32)},
    regions={"squares": 4 * TASKS, "flags": 8 * TASKS, "y": 4 * TASKS * THREADS},
    results=["y"],
    writes={"squares": ["squares", "flags"], "result": ["y"]},
)
