"""Packs a checkpoint in child processes that kill themselves in the middle of it.

    python -m tests.packing.crashes CHECKPOINT OUT POINTS

Every call that changes the disk counts. POINTS is a JSON list of [phase, number]: die at that call of all ("any") or of
those that finish the pack ("finish"); number 0 for a run that does not die. After each death the pack is completed and
removed, and one JSON line says what was there. One process imports everything and forks: the children begin at once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocmega.packing import is_pack, pack_checkpoint, rank, writer
from tests.packing.kit import digests

WRITES = ("pwrite", "write", "fdatasync", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink")


def count_calls(phase: str, die_at: int) -> list[int]:
    """Makes the die_at-th call that changes the disk the last thing that this process does. Returns the counter."""
    calls = [0]
    finish = rank.RankPack.finish

    def from_here(pack: rank.RankPack) -> None:
        calls[0] = 0
        finish(pack)

    if phase == "finish":
        rank.RankPack.finish = from_here  # type: ignore[method-assign]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == die_at and (phase == "any" or _finishing()):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in WRITES:
        setattr(os, name, counted(getattr(os, name)))
    return calls


def _finishing() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "from_here":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def in_child(checkpoint: Path, out: Path, phase: str, die_at: int) -> int:
    """Packs in a child process; how many calls it made, or -1 if it was killed."""
    reader, sender = os.pipe()
    child = os.fork()
    if not child:
        calls = count_calls(phase, die_at)
        writer.COMMIT_BYTES = 1 << 20  # a dozen commits
        pack_checkpoint(checkpoint, out, arch="host", threads=2)
        os.write(sender, str(calls[0]).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(reader) as told:
        count = told.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, status
    return -1 if killed else int(count)


def main() -> None:
    checkpoint, out, points = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    for phase, number in points:
        shutil.rmtree(out, ignore_errors=True)
        calls = in_child(checkpoint, out, phase, number)
        after = digests(out) if is_pack(out) else None
        # Die again, earlier or later, on the way to completion.
        if number:
            in_child(checkpoint, out, "any", random.Random(number).randint(1, 60))
        finished = in_child(checkpoint, out, "any", 0)
        report = {"phase": phase, "number": number, "calls": calls, "after": after, "finished": finished}
        found = [path.name for path in out.iterdir()]
        print(json.dumps({**report, "found": found, "digests": digests(out)}), flush=True)


if __name__ == "__main__":
    main()
