"""Runs hip/measure/handoff.hip: every kind of hand-off between blocks, every word looked at; and how long one takes."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocmega.errors import RocmegaError

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver, SharedBuffer
    from rocmega.toolchain import Artifact, Unit

THREADS, WORDS, FAULT_WORDS, ERROR_WORDS = 256, 4 * 256, 8, 8  # as in the kernel
STAGES = ("write", "read", "exchange")
KINDS = {
    "tagged": "every word with its tag, polled by its reader",
    "through": "written past the L2 caches, drained, one flag",
    "released": "plain stores, drained, L2 written back, one flag; the reader invalidates its caches",
}


class HandoffError(RocmegaError):
    """A device did not do what the protocol asks of it."""


def unit() -> Unit:
    """What the toolchain compiles."""
    from rocmega.toolchain import Unit
    from rocmega.toolchain.unit import hip_dir

    return Unit("handoff", hip_dir() / "measure" / "handoff.hip")


class _StressArgs(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint32) for name in ("kind", "rounds", "first_tag", "poll_limit", "chunks")],
        *[
            (name, ctypes.c_uint64)
            for name in ("tagged", "bulk", "ready", "done", "stream", "sums", "xcds", "faults", "error")
        ],
    ]


class _ExchangeArgs(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint32) for name in ("values", "rounds", "first_tag", "poll_limit")],
        *[(name, ctypes.c_uint64) for name in ("words", "error")],
    ]


@dataclass(frozen=True)
class Stressed:
    """A run without a fault. xcds: of each block; pairs: writer's and reader's XCD -> rounds in which they met."""

    blocks: int
    rounds: int
    xcds: tuple[int, ...]
    pairs: Counter[tuple[int, int]]


class Handoffs:
    """The kernels on a device. Raises ToolchainError or DriverError if they cannot be had there."""

    def __init__(self, driver: Driver, artifact: Artifact | None = None, seconds: float = 2.0) -> None:
        """seconds: after which a wait gives up. artifact: instead of what the toolchain builds."""
        from rocmega.toolchain import compile

        self.driver = driver
        module = driver.load(artifact or compile(unit(), driver.arch))
        self.stress_kernel = module.function("stress", STAGES)
        self.exchange_kernel = module.function("exchange", STAGES)
        most = driver.max_blocks(self.stress_kernel, THREADS, 0)
        self.blocks = min(most, driver.facts().compute_units)
        # The CPU target says itself what can never end.
        self.poll_limit = min(1 << 31, int(seconds * driver.polls_per_second)) if driver.arch != "host" else 1 << 30

    def stress(self, kind: str, rounds: int, *, blocks: int | None = None, chunks: int = 4) -> Stressed:
        """Blocks hand words to each other `rounds` times, in turn every block to every other one.

        kind: of KINDS. chunks: of 4 KB that a block streams from memory in every round. Raises HandoffError that names
        the words that arrived wrong, or the wait that did not end.
        """
        import torch

        blocks = blocks or self.blocks
        words = 2 * blocks * WORDS
        sizes = {"tagged": 8 * words, "bulk": 4 * words, "ready": 8 * blocks, "done": 8 * blocks}
        sizes |= {"sums": 4 * blocks * THREADS, "xcds": 4 * blocks, "faults": 4 * blocks * FAULT_WORDS}
        sizes["error"] = 4 * (1 + blocks) * ERROR_WORDS
        stream = torch.zeros(blocks * max(1, chunks) * THREADS * 16, dtype=torch.uint8, device=self.driver.device)
        buffers = {name: self.driver.shared(name, size) for name, size in sizes.items()}
        try:
            args = _StressArgs(list(KINDS).index(kind), rounds, 1, self.poll_limit, chunks)
            args.stream = self.driver.constant(stream)
            self._launch(self.stress_kernel, args, buffers, blocks)
            xcds = tuple(_words(buffers["xcds"]))
            self._raise_if_stuck(kind, buffers["error"], xcds)
            _raise_if_wrong(kind, _words(buffers["faults"]), xcds)
        finally:
            for buffer in buffers.values():
                buffer.close()
        met = Counter((xcds[_partner(b, r, blocks)], xcds[b]) for r in range(rounds) for b in range(blocks))
        return Stressed(blocks, rounds, xcds, met)

    def exchange(self, values: int, rounds: int, *, blocks: int | None = None) -> float | None:
        """Microseconds in which all blocks have all of `values` tagged values of a round, of which each makes its part.

        As many values as blocks: a barrier of the grid. The launch is not in it. None on a CPU, where it means nothing.
        Raises HandoffError if a wait does not end.
        """
        blocks = blocks or self.blocks
        if self.driver.arch == "host":
            self._exchange(values, rounds, blocks)
            return None
        self._exchange(values, rounds, blocks)  # a warm-up
        times = [min(self._exchange(values, n, blocks) for _ in range(3)) for n in (rounds, 2 * rounds)]
        return (times[1] - times[0]) * 1e3 / rounds

    def _exchange(self, values: int, rounds: int, blocks: int) -> float:
        import torch

        sizes = {"words": 16 * values, "error": 4 * (1 + blocks) * ERROR_WORDS}
        buffers = {name: self.driver.shared(name, size) for name, size in sizes.items()}
        try:
            events = None
            if self.driver.arch != "host":
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            args = _ExchangeArgs(values, rounds, 1, self.poll_limit)
            self._launch(self.exchange_kernel, args, buffers, blocks, events)
            self._raise_if_stuck("exchange", buffers["error"], ())
            return events[0].elapsed_time(events[1]) if events else 0.0
        finally:
            for buffer in buffers.values():
                buffer.close()

    def _launch(
        self, kernel: Any, args: Any, buffers: dict[str, SharedBuffer], blocks: int, events: Any = None
    ) -> None:
        import torch

        for name, buffer in buffers.items():
            setattr(args, name, buffer.address)
        there = torch.frombuffer(bytearray(args), dtype=torch.uint8).to(self.driver.device)
        address = self.driver.constant(there)
        if events:
            events[0].record()
        self.driver.launch(kernel, address, blocks, THREADS)
        if events:
            events[1].record()
        self.driver.synchronize()

    def _raise_if_stuck(self, kind: str, error: SharedBuffer, xcds: Sequence[int]) -> None:
        launch, *blocks = _rows(_words(error), ERROR_WORDS)
        if not launch[0]:
            return
        waits = [(words[4], block, words) for block, words in enumerate(blocks) if words[0]]
        if not waits:
            raise HandoffError(f"hand-off {kind}: a block gave up waiting and did not say for what.")
        _, block, (_, _, stage, task, tag, wanted, seen, _) = min(waits)
        where = f" (XCD {xcds[block]})" if xcds else ""
        what = {0: "until every block had read", 1: f"for block {task}'s words", 2: "for all blocks' values"}[stage]
        raise HandoffError(
            f"hand-off {kind}: {len(waits)} of {len(blocks)} blocks gave up waiting. The one furthest behind: block "
            f"{block}{where}, round {tag - 1}, waited {what}: wanted tag {wanted}, saw {seen}."
        )


def _raise_if_wrong(kind: str, words: list[int], xcds: Sequence[int]) -> None:
    wrong = [(fault[2], block, fault) for block, fault in enumerate(_rows(words, FAULT_WORDS)) if fault[0]]
    if not wrong:
        return
    _, block, (_, source, round, word, expected, seen, count, _) = min(wrong)
    between = Counter(f"{xcds[fault[1]]} to {xcds[reader]}" for _, reader, fault in wrong)
    raise HandoffError(
        f"hand-off {kind}: {len(wrong)} of {len(xcds)} blocks read wrong words. The first: block {block} (XCD "
        f"{xcds[block]}) from block {source} (XCD {xcds[source]}), round {round}, word {word}: expected "
        f"{expected:#010x}, saw {seen:#010x}, {_kind_of(seen, source, round, word)}; {count} wrong words in that "
        f"block. XCDs of writers and readers: {', '.join(f'{pair} ({n})' for pair, n in between.most_common(6))}."
    )


def _kind_of(seen: int, source: int, round: int, word: int) -> str:
    """What a wrong word is, which says what failed: an old one was in a cache, or overtaken by its flag."""
    if seen == 0:
        return "which nobody wrote: the flag was ahead of the data, or the reader's cache kept what was there before"
    for back in range(1, min(round, 64) + 1):
        if seen == word_of(source, round + 1 - back, word):
            return f"which is round {round - back}'s: the flag was ahead of the data, or the reader's cache kept it"
    if any(seen == word_of(source, round + 1 + ahead, word) for ahead in range(1, 4)):
        return "which is of a later round: the writer did not wait for its readers"
    return "which is no word of that block's"


def word_of(source: int, tag: int, word: int) -> int:
    """What a block hands over, as in the kernel."""
    return (tag * 0x9E3779B9 ^ (source * WORDS + word) * 0x85EBCA6B) & 0xFFFFFFFF


def _partner(block: int, round: int, blocks: int) -> int:
    return 0 if blocks == 1 else (block + 1 + round % (blocks - 1)) % blocks


def _words(buffer: SharedBuffer) -> list[int]:
    import torch

    return [word & 0xFFFFFFFF for word in buffer.tensor.view(torch.int32).cpu().tolist()]


def _rows(words: list[int], width: int) -> list[list[int]]:
    return [words[at : at + width] for at in range(0, len(words), width)]
