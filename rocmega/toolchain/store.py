"""The content-addressed cache: one folder per result, complete or absent, checked when it is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocmega.errors import ToolchainError

MANIFEST = "manifest.json"


def root() -> Path:
    """ROCMEGA_CACHE, else $XDG_CACHE_HOME/rocmega, else ~/.cache/rocmega."""
    given = os.environ.get("ROCMEGA_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocmega"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(entry: Path, name: str = MANIFEST) -> dict[str, Any] | None:
    """The manifest of a folder whose files have the sizes and hashes it says; None for anything else."""
    try:
        manifest: dict[str, Any] = json.loads((entry / name).read_text())
        for file, (size, expected) in manifest["files"].items():
            path = entry / file
            if path.stat().st_size != size or digest(path) != expected:
                return None
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seal(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes the manifest over the files that are in the folder now."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    manifest = {**facts, "files": {n: [(folder / n).stat().st_size, digest(folder / n)] for n in names}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def write(path: Path, content: bytes) -> None:
    """Writes a file that appears complete or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def put(folder: Path, entry: Path) -> None:
    """Moves a sealed folder to its place. Whoever comes second finds the place taken and drops its own."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.rename(entry)
    except OSError:
        if read(entry) is None:
            raise


def discard(entry: Path) -> None:
    """Removes an entry; first out of the way in one step, so that nobody sees half of it."""
    if entry.exists():
        with workspace() as folder, contextlib.suppress(OSError):
            entry.rename(folder / "discarded")


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder beside the entries (same file system: a rename is one step); gone afterwards, whatever happens."""
    place = root() / "tmp"
    try:
        place.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        folder = Path(tempfile.mkdtemp(dir=place))
    except OSError as error:
        raise ToolchainError(
            f"The kernel cache {root()} cannot be written: {error}. Set ROCMEGA_CACHE to a folder that can."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Removes what killed processes left behind, a day later."""
    for old in place.iterdir():
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(old)


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Held by one process at a time. Where the file system has no locks two may build; the rename still keeps one."""
    place = root() / "locks"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            place.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context((place / f"{name}.lock").open("w"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
