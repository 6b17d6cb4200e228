"""What the checker costs where it is off: steps of the kernel as it is, and of one that cannot be checked.

    python -m tests.host.overhead

Both take turns; times are the processor's. The other kernel is compiled with the variable that says whether there are
checks a constant, so that nothing of them is left in it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from rocmega.checkpoint import Checkpoint
from rocmega.models.glm import kernel
from rocmega.models.glm.config import from_dir
from rocmega.models.glm.presets import write_checkpoint
from rocmega.models.glm.weights import pack
from rocmega.toolchain import Unit, compile
from tests.models.glm.kit import POSITIONS, Bench

RUNTIME = kernel.FOLDER.parent.parent / "hip" / "host" / "runtime.h"
ASKED = "extern bool checking;"
STEPS = 40


def uncheckable(unit: Unit) -> Unit:
    text = RUNTIME.read_text()
    assert text.count(ASKED) == 1
    constant = text.replace(ASKED, "constexpr bool checking = false;")
    return Unit(unit.name, unit.source, {**unit.headers, "host/runtime.h": constant}, unit.defines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint("glm-5.2-tiny", Path(folder) / "model", "f32")
        config = from_dir(directory)
        weights = pack(Checkpoint(directory), config)
    unit = kernel.unit(config, weights.formats, "host")
    benches = [
        Bench(config, weights, POSITIONS[:3], artifact=compile(each, "host")) for each in (unit, uncheckable(unit))
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for bench, times in zip(benches, seconds, strict=True):
            start = time.process_time()
            bench.step()
            times.append(time.process_time() - start)
    for what, times in zip(("with the checker, off", "without it"), seconds, strict=True):
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{what:22} {1e3 * middle:7.1f} ms a step, middle half {1e3 * low:.1f} to {1e3 * high:.1f}")


if __name__ == "__main__":
    main()
