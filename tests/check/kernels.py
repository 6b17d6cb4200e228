"""The kernels of kernels.hip as subjects, and what each of their mutants is."""

from __future__ import annotations

from pathlib import Path

import torch

from rocmega.check import Kernel

SOURCE = Path(__file__).with_name("kernels.hip")
STAGES = ("write", "read", "answer")
THREADS, ROUNDS, MOST = 256, 4, 16
WORD, PAIR = 4, 8
OUT = {"out": WORD * THREADS}
SLICES = {"data": 2 * MOST * THREADS * WORD, "flags": MOST * PAIR, **OUT}

# kernel -> its regions, how far it moves the epoch on, which stage may write which regions
KERNELS = {
    "double_buffer": (SLICES, ROUNDS, {}),
    "released": (SLICES, ROUNDS, {}),
    "ll_lines": (
        {"lines": 2 * MOST * THREADS * PAIR, "other": WORD * THREADS, **OUT},
        ROUNDS,
        {"write": ["lines"], "answer": ["lines", "out"], "read": ["other"]},
    ),
    "tickets": ({"tickets": 4 * 12 * WORD, "results": 64 * THREADS * WORD, "flags": 64 * PAIR, **OUT}, 1, {}),
    "two_level": (
        {"data": 2 * MOST * WORD, "arrived": MOST * PAIR, "xcds": 8 * PAIR, "go": PAIR, **OUT}, ROUNDS, {}
    ),
    "pipeline": ({"slots": MOST * THREADS * 16, "full": MOST * PAIR, "empty": MOST * PAIR, **OUT}, ROUNDS, {}),
    "ping_pong": ({"boxes": 2 * PAIR, **OUT}, 8, {}),
    "wave_flags": ({"data": MOST * THREADS * WORD, "flags": MOST * 4 * PAIR, **OUT}, 1, {}),
    "histogram": (OUT, 1, {}),
    "lds_ring": (OUT, 1, {}),
    "fixed_order": (
        {"parts": MOST * THREADS * WORD, "flags": MOST * PAIR, "other": WORD * THREADS, **OUT},
        1,
        {"write": ["parts", "flags"], "read": ["out", "other"]},
    ),
}  # fmt: skip

# kernel, mutant: the bug, and what the report says. All reports name the stage.
ORDER, DRAIN = "missing: anything that orders the load behind the store", r"missing: drain\(\) by block"
LATER = "missing: anything that orders (that read before this store|this read before that store|the two stores)"
NOBODY = "no thread can go on"
MUTANTS = {
    ("double_buffer", 1): ("one slot instead of two", f"{LATER}|{ORDER}"),
    ("double_buffer", 2): ("the flag before the data", f"{ORDER}|{DRAIN}"),
    ("double_buffer", 3): ("no drain: the flag overtakes the data", f"{DRAIN}|not drained"),
    ("double_buffer", 4): ("only one wave drains", rf"{DRAIN} .* wave [123]"),
    ("double_buffer", 5): ("no barrier between drain and flag", ORDER),
    ("double_buffer", 6): ("no barrier after the wait: other waves go on without it", ORDER),
    ("released", 1): ("the write-back before the other waves have drained", r"missing: release_device\(\) on XCD"),
    ("released", 2): ("a fence of the block instead of a write-back", r"missing: release_device\(\) on XCD"),
    ("released", 3): ("the acquire before the wait", r"missing: acquire_device\(\) by this wave"),
    ("released", 4): ("no acquire: stale lines", r"missing: acquire_device\(\) by this wave"),
    ("released", 5): ("one wave acquires for all", r"missing: acquire_device\(\) by this wave"),
    ("ll_lines", 1): ("tags that come again", "epochs must grow"),
    ("ll_lines", 2): ("one slot, and no barrier between the reads and what says that they are done", LATER),
    ("ll_lines", 3): ("lines stored plain", "a plain store that XCD . has not released|missing: release_device"),
    ("ll_lines", 4): ("payload and tag stored apart: torn lines", NOBODY),
    ("ll_lines", 5): ("a line that nobody writes", rf"{NOBODY}.* stage (read|answer) .* waits for tag \d+ of byte"),
    ("ll_lines", 6): ("a store into a region of another stage", "stage write .* a region that is not its own"),
    ("ll_lines", 7): ("nobody waits for the readers before the slot comes again", LATER),
    ("tickets", 1): ("load and store instead of an atomic claim", "stage write task . stored too|missing: any"),
    ("tickets", 2): ("LDS reused for the next ticket without a barrier", "LDS race: .* my_ticket"),
    ("tickets", 3): ("a result that is not waited for", ORDER),
    ("two_level", 1): ("the leader does not wait for its XCD", ORDER),
    ("two_level", 2): ("the root does not wait for the other XCDs", ORDER),
    ("two_level", 3): ("a block goes on when it has arrived", ORDER),
    ("pipeline", 1): ("the reader never says that the slot is free, and nobody asks", f"{LATER}|{ORDER}"),
    ("pipeline", 2): ("the writer does not wait for the slot", f"{LATER}|{ORDER}"),
    ("pipeline", 3): ("the writer waits for the epoch before", f"{LATER}|{ORDER}"),
    ("ping_pong", 1): ("a wait for the wrong epoch", rf"{NOBODY}.* stage answer task \d epoch \d+ waits for tag"),
    ("ping_pong", 2): ("the sender does not wait for the answer", f"{LATER}|{NOBODY}"),
    ("ping_pong", 3): ("a block leaves early", rf"{NOBODY}.* stage write .* waits for tag"),
    ("wave_flags", 1): ("another wave's flag", f"{ORDER}|{DRAIN}"),
    ("histogram", 1): ("LDS that nobody has initialized", "nobody has written yet .* missing: its initialization"),
    ("histogram", 2): ("no barrier between zeroing and counting", r"LDS race: .* bins\[|or a barrier before this"),
    ("histogram", 3): ("no barrier between counting and reading", r"LDS race: .* bins\["),
    ("histogram", 4): ("no barrier before the waves' totals are used", r"LDS race: .* totals\[|a barrier before this"),
    ("histogram", 5): ("a barrier that one thread does not reach", r"waits for \d+ threads at a barrier|LDS race"),
    ("histogram", 6): ("LDS reused without a barrier, as in a radix select", "LDS race"),
    ("lds_ring", 1): ("no wait for asynchronous copies", "missing: a wait for the wave's copies"),
    ("lds_ring", 2): ("the wait behind the barrier", r"LDS race: .* ring\[|missing: a wait for the wave's copies"),
    ("lds_ring", 3): ("a wait for one copy too few", "missing: a wait for the wave's copies"),
    ("lds_ring", 4): ("no barrier after the wait", r"LDS race: .* ring\[|missing: a wait|or a barrier before this"),
    ("lds_ring", 5): ("a copy into what is still being read", r"LDS race: .* ring\["),
    ("fixed_order", 1): ("a task that writes into another's part", "stage write task . stored too|orders the two"),
    ("fixed_order", 2): ("a store outside the stage's regions", "stage write .* a region that is not its own"),
    ("fixed_order", 3): ("one tag for all launches", "epochs must grow|wants epoch"),
    ("fixed_order", 4): ("a part that nobody has written", r"wants epoch \d of .* parts .* never written by a kernel"),
    ("fixed_order", 5): ("a spin that does not load again", "stage read .* missing: a load in its loop"),
}  # fmt: skip


def subject(kernel: str, mutant: int = 0, blocks: tuple[int, ...] = (2, 3, 5, 9)) -> Kernel:
    regions, epochs, writes = KERNELS[kernel]
    weights = torch.arange((ROUNDS + 3) * 4 * THREADS, dtype=torch.int32)
    constants = {"mutant": torch.tensor([mutant], dtype=torch.int32)}
    if kernel == "lds_ring":
        constants["weights"] = weights
    return Kernel(
        SOURCE, kernel, stages=STAGES, regions=regions, results=["out"], constants=constants, blocks=blocks,
        launches=2, epochs=epochs, writes=writes or None,
    )  # fmt: skip
