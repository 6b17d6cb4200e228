"""Packing into files: one pass over the checkpoint for all ranks, several threads, memory for a few bands of rows.

Threads read, convert and write; the main thread waits for the disk and keeps the journals.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import PackError, RequestError
from rocmega.packing.files import file_of, pieces
from rocmega.packing.manifest import CONFIG, identity
from rocmega.packing.plan import ARCHS, Job, Plan
from rocmega.packing.rank import RankPack, Record, disk_error
from rocmega.packing.source import fingerprint
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint

SIDECARS = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
AHEAD = 16  # jobs for each thread that may be done or under way while the main thread waits for the disk
COMMIT_BYTES, COMMIT_SECONDS = 256 << 20, 5.0  # what a kill may cost, at most about


def pack_checkpoint(
    directory: Path,
    out: Path,
    *,
    arch: str,
    tp: int = 1,
    ranks: Sequence[int] | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> list[Path]:
    """Packs a checkpoint directory for `tp` ranks of an architecture; returns each rank's folder in `out`.

    ranks: only these. threads: by default one for each core. What `out` holds already of the same packs is kept and
    completed. Raises ConfigError, CheckpointError, RequestError or PackError.
    """
    from rocmega import registry
    from rocmega.checkpoint import Checkpoint

    if arch not in ARCHS:
        raise RequestError(f"--arch {arch!r}: choose one of {', '.join(ARCHS)}.")
    ranks = list(range(tp)) if ranks is None else sorted(set(ranks))
    if tp < 1 or not ranks or not all(0 <= rank < tp for rank in ranks):
        raise RequestError(f"rank {ranks[0] if ranks else '?'} of {tp}: ranks are numbered from 0 to {tp - 1}.")
    raw = registry.read_config(directory)
    config = registry.load_config(directory)
    weights = registry.family_module(raw["model_type"], "weights")
    checkpoint = Checkpoint(directory)
    try:
        progress("reading headers")
        plan = weights.pack_plan(checkpoint, config, tp=tp, arch=arch)
        source = fingerprint(checkpoint)
        sidecars = [directory / name for name in SIDECARS if (directory / name).is_file()]
        with ExitStack() as stack:
            packs = [
                stack.enter_context(RankPack(out, plan, identity(plan, rank, raw["model_type"], raw, source), sidecars))
                for rank in ranks
            ]
            _Run(checkpoint, plan, [pack for pack in packs if not pack.finished], threads, progress).run()
        return [pack.path for pack in packs]
    finally:
        checkpoint.close()


class _Run:
    """Carries out what is left of a plan."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, packs: list[RankPack], threads: int | None, progress: Progress
    ):
        self.checkpoint, self.plan, self.packs, self.progress = checkpoint, plan, packs, progress
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or cores
        self.total = sum(pack.size for pack in packs)
        self.written = sum(pack.written for pack in packs)
        self.label = "packing" if len(packs) < 2 else f"packing {len(packs)} ranks"
        self.finished: dict[int, dict[int, Record]] = {}  # job -> rank -> record, not yet in the journals
        self.uncommitted, self.committed_at = 0, time.monotonic()

    def run(self) -> None:
        if not self.packs:
            return
        self._check_room()
        try:
            self._all_jobs()
        except BaseException:
            self._commit_quietly()
            raise
        self._commit(set())
        self.progress(self.label, self.total, self.total)
        for pack in self.packs:
            pack.finish()

    def _check_room(self) -> None:
        out = self.packs[0].partial
        try:
            # What is written of uncommitted jobs counts twice here, which errs on the side of going on.
            there = sum(f.stat().st_blocks * 512 for pack in self.packs for f in pack.partial.glob("*.safetensors"))
            free = shutil.disk_usage(out).free
        except OSError as error:
            raise disk_error(out, error) from None
        if free < self.total - there:
            raise PackError(
                f"The disk of {out.parent} has {free / 1e9:.1f} GB free and the pack needs "
                f"{(self.total - there) / 1e9:.1f} GB more. Make room, or choose another --out; what is packed is kept."
            )

    def _all_jobs(self) -> None:
        import torch

        waiting: deque[tuple[int, Future[dict[int, Record]]]] = deque()
        pool = ThreadPoolExecutor(self.threads, "pack", initializer=torch.set_num_threads, initargs=(1,))
        try:
            for number, job, ranks in self._pending():
                waiting.append((number, pool.submit(self._work, job, ranks)))
                if len(waiting) > AHEAD * self.threads:
                    self._collect(*waiting.popleft(), waiting)
            while waiting:
                self._collect(*waiting.popleft(), waiting)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _pending(self) -> Iterator[tuple[int, Job, list[RankPack]]]:
        for number, job in enumerate(self.plan.jobs):
            packs = [p for p in self.packs if number not in p.done and (job.ranks is None or p.rank in job.ranks)]
            if packs:
                yield number, job, packs

    def _work(self, job: Job, packs: list[RankPack]) -> dict[int, Record]:
        by_rank = {pack.rank: pack for pack in packs}
        records: dict[int, Record] = {rank: [] for rank in by_rank}
        for made in job.run(self.checkpoint, list(by_rank)):
            for piece in pieces(self.plan.fields[made.field], made):
                data = piece.data.numpy().data
                crc = zlib.crc32(data)
                for rank in made.ranks:
                    by_rank[rank].write(piece.tensor, piece.offset, data)
                    records[rank].append((piece.tensor, piece.offset, len(data), crc))
        return records

    def _collect(self, number: int, future: Future[dict[int, Record]], waiting: deque[Any]) -> None:
        records = future.result()
        self.finished[number] = records
        size = sum(size for record in records.values() for _, _, size, _ in record)
        self.uncommitted += size
        self.written += size
        self.progress(self.label, self.written, self.total)
        if self.uncommitted >= COMMIT_BYTES or time.monotonic() - self.committed_at >= COMMIT_SECONDS:
            self._commit({file_of(self.plan.jobs[next_].field) for next_, _ in waiting})

    def _commit(self, keep_open: set[str]) -> None:
        for pack in self.packs:
            jobs = {number: records[pack.rank] for number, records in self.finished.items() if pack.rank in records}
            pack.commit(jobs, keep_open)
        self.finished = {}
        self.uncommitted, self.committed_at = 0, time.monotonic()

    def _commit_quietly(self) -> None:
        """After an error: what can be kept is kept; the error itself is the news."""
        import contextlib

        with contextlib.suppress(PackError):
            self._commit(set())
