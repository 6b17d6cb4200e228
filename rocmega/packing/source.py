"""Which checkpoint a pack was made from, and whether its files are what was published.

A checkpoint's fingerprint is the SHA-256 of config.json and, of each safetensors file, its size, the SHA-256 of its
header (names, dtypes, shapes, offsets) and of 16 samples of 4 KB spread over its data. Samples, because hashing all of
it would read hundreds of gigabytes twice; they tell any two models, and any two fine-tunings of one, apart, but not a
single flipped byte. That is what `check_published` is for, where the download's own digests are at hand.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import CheckpointError
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint

SAMPLES, SAMPLE_BYTES = 16, 4096
_CHUNK = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")

Fingerprint = dict[str, Any]


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """{"id", "config", "files": {name: {"size", "header", "samples"}}}. CheckpointError if a file is unreadable."""
    try:
        config = hashlib.sha256((checkpoint.directory / "config.json").read_bytes()).hexdigest()
        files = {_name(checkpoint, path): _file(path) for path in checkpoint.files}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}).") from None
    content = {"config": config, "files": files}
    return {"id": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16], **content}


def difference(one: Fingerprint, other: Fingerprint) -> str:
    """What distinguishes two checkpoints, as half a sentence; empty if nothing does."""
    if one.get("config") != other.get("config"):
        return "their config.json differ"
    mine, theirs = one.get("files", {}), other.get("files", {})
    if mine.keys() != theirs.keys():
        return f"only one of them has {min(mine.keys() ^ theirs.keys())}"
    for name, entry in mine.items():
        for what in ("size", "header", "samples"):
            if entry.get(what) != theirs[name].get(what):
                return f"their {name} differ in {what}: {_short(entry.get(what))} and {_short(theirs[name].get(what))}"
    return ""


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _name(checkpoint: Checkpoint, path: Path) -> str:
    return path.relative_to(checkpoint.directory).as_posix()


def _file(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    samples = hashlib.sha256()
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = hashlib.sha256(file.read(length)).hexdigest()
        data = size - 8 - length
        for number in range(SAMPLES):
            file.seek(8 + length + data * number // SAMPLES)
            samples.update(file.read(SAMPLE_BYTES))
    return {"size": size, "header": header, "samples": samples.hexdigest()}


def published_digest(directory: Path, path: Path) -> str | None:
    """The SHA-256 that the model hub gave with a file, if its download left it here.

    The hub's cache names files by it; `huggingface-cli download --local-dir` notes it beside them.
    """
    target = path.resolve().name
    if path.is_symlink() and _SHA256.fullmatch(target):
        return target
    note = directory / ".cache" / "huggingface" / "download" / f"{path.relative_to(directory).as_posix()}.metadata"
    try:
        found = _SHA256.findall(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found[0] if found else None


def check_published(checkpoint: Checkpoint, progress: Progress = silent) -> list[str]:
    """Compares every file, whole, with its published SHA-256; returns the names of those that have none here.

    Raises CheckpointError for the first that differs: a download that went wrong, a failing disk.
    """
    total, done, unknown = sum(path.stat().st_size for path in checkpoint.files), 0, []
    for path in checkpoint.files:
        wanted = published_digest(checkpoint.directory, path)
        if wanted is None:
            unknown.append(_name(checkpoint, path))
            done += path.stat().st_size
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress("comparing the checkpoint with its published digests", done, total)
        if digest.hexdigest() != wanted:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, and {wanted} was published. Fetch it again."
            )
    return unknown
