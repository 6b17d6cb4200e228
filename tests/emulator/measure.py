"""Prints docs/amd.md's table: `python -m tests.emulator.measure`, some ten minutes. Every step is compared, too."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from rocmega.checkpoint import Checkpoint
from rocmega.models.glm.config import from_dir
from rocmega.models.glm.presets import write_checkpoint
from rocmega.models.glm.weights import pack
from tests.emulator.compare import LENGTHS, Comparison
from tests.emulator.driver import ARCHS

# Weights, activations of FP8 weights, architectures. FP8 activations on gfx942 need weights that are packed as FNUZ.
FORMATS = (("f32", "bf16", ARCHS), ("bf16", "bf16", ARCHS), ("fp8", "bf16", ARCHS), ("fp8", "fp8", ("gfx950",)))
BLOCKS = (1, 3, 5)
SEEDS = (0, 1, 2)  # the last is measured; the first warms the emulator


def main() -> None:
    torch.set_num_threads(1)
    print("| target | weights | rows |", *(f"{blocks} blocks |" for blocks in BLOCKS))
    print("|---" * (3 + len(BLOCKS)) + "|")
    for dtype, activations, archs in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            directory = write_checkpoint("glm-5.2-tiny", Path(folder), dtype)
            config = from_dir(directory)
            weights = pack(Checkpoint(directory), config)
        label = "fp8, activations too" if activations == "fp8" else dtype
        for arch in archs:
            for rows, lengths in LENGTHS.items():
                cells = []
                for blocks in BLOCKS:
                    comparison = Comparison(config, weights, arch, blocks, lengths, activations)
                    *_, last = (comparison.step(seed) for seed in SEEDS)
                    comparison.close()
                    cells.append(f"{last.instructions / 1e6:.2f} M, {last.seconds:.1f} s")
                print("|", " | ".join([arch, label, str(rows), *cells]), "|", flush=True)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s in all")
