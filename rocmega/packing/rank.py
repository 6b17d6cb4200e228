"""One rank's pack while it is made: a hidden folder, a journal of what is safely in it, and the final renaming.

    OUT/.rank-0-of-1.partial/    until it is done, then OUT/rank-0-of-1/

A job is in the journal only after its bytes have reached the disk, so whatever stops the work, the same command goes on
from the journal. The folder is renamed only when everything in it is on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rocmega.errors import PackError
from rocmega.packing.files import PackFile, lay_out
from rocmega.packing.manifest import (
    CHECKSUMS,
    MANIFEST,
    Identity,
    complete,
    mismatch,
    rank_folder,
    read_json,
    to_bytes,
)
from rocmega.packing.plan import Plan

IDENTITY, JOURNAL, LOCK = "identity.json", "journal", "lock"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Record = list[tuple[str, int, int, int]]  # pieces: tensor, offset in it, bytes, CRC-32


class RankPack:
    """A pack in the making. Use as a context manager: leaving it keeps what was committed.

    Fields:
        path: the finished pack.
        finished: whether it is.
        done: numbers of the jobs that are in the journal, and written: bytes that they wrote.
        size: bytes of all its files when finished.
    """

    def __init__(self, out: Path, plan: Plan, base: Identity, sidecars: Iterable[Path]):
        self.path = out / rank_folder(base["rank"], plan.tp)
        self.partial = out / f".{self.path.name}.partial"
        self.rank: int = base["rank"]
        self.files = lay_out(plan.fields.values())
        self.done: set[int] = set()
        self.written = 0
        self.finished = False
        self._base, self._sidecars = base, list(sidecars)
        self._where = {tensor: file for file in self.files.values() for tensor in file.sizes}
        self._open: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._new_files = False
        self._mutex = threading.Lock()
        self._lock = self._journal = -1

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def __enter__(self) -> RankPack:
        try:
            self._begin()
        except OSError as error:
            self._close()
            raise disk_error(self.partial, error) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    # Beginning, or going on.

    def _begin(self) -> None:
        if self._is_finished():
            return
        self._take_lock()
        if self._is_finished():  # another process was quicker
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        if (self.partial / MANIFEST).is_file():  # all is there but for the renaming
            self._compare(read_json(self.partial / MANIFEST), self.partial)
            self._publish()
            return
        if (self.partial / IDENTITY).is_file():
            self._compare(read_json(self.partial / IDENTITY), self.partial)
        else:
            self._write_file(IDENTITY, to_bytes(self._base))
        self._open_journal()

    def _is_finished(self) -> bool:
        if not self.path.exists():
            return False
        self._compare(read_json(self.path / MANIFEST), self.path)
        self.finished = True
        return True

    def _compare(self, other: dict[str, Any], at: Path) -> None:
        # A pack that is finished may have been made by another version; one in the making is continued by the same.
        base = {**self._base, "rocmega": other.get("rocmega")} if at == self.path else self._base
        difference = mismatch(base, other)
        if difference:
            raise PackError(
                f"{at} is another pack than the one asked for: {difference}. Delete it, or choose another --out."
            )

    def _take_lock(self) -> None:
        while True:
            self.partial.mkdir(parents=True, exist_ok=True)
            path = self.partial / LOCK
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PackError(f"{self.partial} is being written by another process: let it finish.") from None
            try:
                if os.path.samestat(path.stat(), os.fstat(self._lock)):
                    return
            except FileNotFoundError:
                pass
            os.close(self._lock)  # the folder was finished and renamed meanwhile
            self._lock = -1

    def _open_journal(self) -> None:
        self._journal = os.open(self.partial / JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        good = 0
        for number, record, end in self._entries():
            self._enter(number, record)
            good = end
        os.ftruncate(self._journal, good)  # what follows is a line that was being written
        os.lseek(self._journal, good, os.SEEK_SET)

    def _entries(self) -> Iterator[tuple[int, Record, int]]:
        """The journal's jobs: number, what it wrote, where in the journal its line ends."""
        end = 0
        with (self.partial / JOURNAL).open("rb") as journal:
            for line in journal:
                entry = _entry(line)
                if entry is None:
                    return
                end += len(line)
                yield (*entry, end)

    def _enter(self, number: int, record: Record) -> None:
        self.done.add(number)
        self.written += sum(size for _, _, size, _ in record)

    # Writing. `write` is called by several threads at a time, the rest by one.

    def write(self, tensor: str, offset: int, data: memoryview) -> None:
        """Puts bytes of a tensor where they belong. Raises PackError if the disk refuses them."""
        file = self._where[tensor]
        if offset + len(data) > file.sizes[tensor]:
            raise ValueError(f"{tensor}: {len(data)} bytes at {offset} are too many")
        at = file.offsets[tensor] + offset
        try:
            descriptor, written = self._descriptor(file), 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], at + written)
        except OSError as error:
            raise disk_error(self.partial / file.name, error) from None
        with self._mutex:
            self._dirty.add(file.name)  # after the writing: a commit may have come in between

    def _descriptor(self, file: PackFile) -> int:
        with self._mutex:
            if file.name not in self._open:
                self._open[file.name] = os.open(self.partial / file.name, os.O_RDWR | os.O_CREAT, 0o644)
                self._new_files = True
                os.pwrite(self._open[file.name], file.header, 0)
            return self._open[file.name]

    def commit(self, jobs: dict[int, Record], keep_open: set[str]) -> None:
        """Brings what these jobs wrote to the disk, then enters them in the journal.

        keep_open: files that jobs at work now may write to. Raises PackError if the disk refuses.
        """
        with self._mutex:
            dirty = {name: self._open[name] for name in self._dirty}
            self._dirty.clear()
            new_files, self._new_files = self._new_files, False
        try:
            if new_files:
                _sync_folder(self.partial)
            for descriptor in dirty.values():
                os.fdatasync(descriptor)
            lines = b"".join(json.dumps([number, record]).encode() + b"\n" for number, record in jobs.items())
            _write_all(self._journal, lines)
            os.fdatasync(self._journal)
        except OSError as error:
            raise disk_error(self.partial, error) from None
        for number, record in jobs.items():
            self._enter(number, record)
        with self._mutex:
            for name in self._open.keys() - keep_open - self._dirty:
                os.close(self._open.pop(name))

    # Ending.

    def finish(self) -> None:
        """Writes manifest and checksums and gives the pack its name. Raises PackError if the disk refuses."""
        try:
            checksums = to_bytes(self._checksums())
            self._write_file(CHECKSUMS, checksums)
            for source in self._sidecars:
                self._write_file(source.name, source.read_bytes())
            self._write_file(MANIFEST, to_bytes(complete(self._base, self.files, checksums)))
            self._publish()
        except OSError as error:
            raise disk_error(self.partial, error) from None

    def _checksums(self) -> dict[str, list[list[int]]]:
        parts: dict[str, list[list[int]]] = {tensor: [] for tensor in self._where}
        for _, record, _ in self._entries():
            for tensor, offset, size, crc in record:
                parts[tensor].append([offset, size, crc])
        for tensor, listed in parts.items():
            listed.sort()
            ends = [0, *(offset + size for offset, size, _ in listed)]
            if [offset for offset, _, _ in listed] != ends[:-1] or ends[-1] != self._where[tensor].sizes[tensor]:
                raise PackError(f"{self.partial}: tensor {tensor} has holes. Delete the folder and pack again.")
        return parts

    def _publish(self) -> None:
        for name in (JOURNAL, IDENTITY, LOCK):
            (self.partial / name).unlink(missing_ok=True)
        _sync_folder(self.partial)
        self.partial.rename(self.path)
        _sync_folder(self.path.parent)
        self.finished = True

    def _write_file(self, name: str, content: bytes) -> None:
        """A whole file, or none."""
        temporary = self.partial / f"{name}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(self.partial / name)
        _sync_folder(self.partial)

    def _close(self) -> None:
        for descriptor in (*self._open.values(), self._journal, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._open, self._journal, self._lock = {}, -1, -1


def _entry(line: bytes) -> tuple[int, Record] | None:
    try:
        number, record = json.loads(line)
        return (int(number), [(t, int(o), int(s), int(c)) for t, o, s, c in record]) if line.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> PackError:
    """What a failed write means for the user."""
    if error.errno in _FULL:
        return PackError(
            f"{path} cannot grow ({error.strerror}): the disk, a quota or a limit on file sizes is exhausted. What is "
            "packed so far is kept: make room and run the same command again, and it goes on from there."
        )
    return PackError(f"{path} cannot be written ({error.strerror}). Run the same command again to go on from there.")
