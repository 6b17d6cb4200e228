"""Checkpoints as published: safetensors, in one file or in shards with an index. Nothing is ever unpickled.

`Checkpoint` reads tensors by name, `layouts` knows how published checkpoints store matrices, and `tiles` holds the
packed layout they are turned into.
"""

from __future__ import annotations

import json
import os
import threading
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rocmega.checkpoint.header import DTYPES, TensorInfo, read_header
from rocmega.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_READ = 1 << 28  # bytes of one read; the system allows 2 GB
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint:
    """The tensors of a checkpoint directory, read one at a time.

    Files are opened when a tensor of theirs is first asked for. Every fault is a CheckpointError that names the file
    and the tensor.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files = _weight_map(self.directory)  # tensor name -> file, from the index or the single file's header
        self._headers: dict[Path, dict[str, TensorInfo]] = {}
        self._open: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        if name not in self._files:
            raise CheckpointError(
                f"tensor {name} is missing from {self.directory}: the checkpoint is incomplete or of another model "
                "than its config.json says. Fetch it again, or use the config.json that belongs to it."
            )
        return self._files[name]

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, from its file's header."""
        path = self.file(name)
        if path not in self._headers:
            self._headers[path] = read_header(path)
        if name not in self._headers[path]:
            raise CheckpointError(
                f"{path} does not hold tensor {name}, though {INDEX} says so: the files do not belong together. "
                "Fetch the checkpoint again."
            )
        return self._headers[path][name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        import torch

        stored = self.info(name).dtype
        if stored not in DTYPES or not hasattr(torch, DTYPES[stored][0]):
            raise CheckpointError(f"{self.file(name)}: tensor {name} is stored as {stored}, which cannot be read here.")
        return getattr(torch, DTYPES[stored][0])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor's values, on the CPU, as stored."""
        self.dtype(name)  # checks name, header and dtype
        path = self.file(name)
        try:
            if path not in self._open:
                from safetensors import safe_open

                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_tensor(name)
        except Exception as error:  # safetensors' own exception class derives from Exception alone
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}). Fetch the file again.") from None

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor's values, or its rows [start, stop) alone, in memory of their own: nothing stays mapped.

        Threads may read at the same time.
        """
        import torch

        dtype, info = self.dtype(name), self.info(name)
        shape, offset = info.shape, info.offset
        if rows is not None:
            shape = (rows[1] - rows[0], *shape[1:])
            offset += rows[0] * (info.nbytes // max(1, info.shape[0]))
        values = torch.empty(shape, dtype=dtype)
        self._fill(name, values.view(-1).view(torch.uint8) if values.numel() else values, offset)
        return values

    def _fill(self, name: str, buffer: torch.Tensor, offset: int) -> None:
        path = self.file(name)
        view = buffer.numpy().data.cast("B") if buffer.numel() else memoryview(b"")
        done = 0
        try:
            with self._lock:
                if path not in self._descriptors:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
            while done < len(view):
                got = os.preadv(self._descriptors[path], [view[done : done + _READ]], offset + done)
                if not got:
                    raise CheckpointError(f"{path} is truncated: tensor {name} ends before its time. Fetch it again.")
                done += got
        except OSError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error.strerror}).") from None

    @cached_property
    def files(self) -> list[Path]:
        """The files the tensors are in."""
        return sorted(set(self._files.values()))

    def close(self) -> None:
        """Lets go of the files; tensors already read stay valid."""
        self._open.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.directory)!r}, {len(self._files)} tensors in {len(self.files)} files)"


def _weight_map(directory: Path) -> dict[str, Path]:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory: give the folder with config.json and the safetensors files."
        )
    if (directory / INDEX).is_file():
        return _read_index(directory)
    if (directory / SINGLE).is_file():
        return dict.fromkeys(read_header(directory / SINGLE), directory / SINGLE)
    message = f"{directory} holds no weights: neither {INDEX} nor {SINGLE} is there."
    if any(path.suffix in _PICKLES for path in directory.iterdir()):
        message += (
            " It has pickle files, which can run code when loaded and are never read: convert them to safetensors."
        )
    else:
        message += " Fetch the checkpoint's safetensors files."
    raise CheckpointError(message)


def _read_index(directory: Path) -> dict[str, Path]:
    path = directory / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): PurePosixPath(file) for name, file in weight_map.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{path} is no safetensors index (a JSON object with weight_map): fetch it again."
        ) from None
    missing = set()
    for name, file in entries.items():
        # By name only: download caches link their files to a store elsewhere, which is fine.
        if file.is_absolute() or ".." in file.parts or "\\" in str(file):
            raise CheckpointError(
                f"{path} places tensor {name} in {file}, outside the checkpoint's directory: such an index "
                "is not to be trusted."
            )
        if file.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} places tensor {name} in {file}: only safetensors files are read. Convert it."
            )
        if not (directory / file).is_file():
            missing.add(str(file))
    if missing:
        shown = ", ".join(sorted(missing)[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            f"{directory} lacks {shown}, which {INDEX} names: the download is incomplete. Fetch the rest."
        )
    return {name: directory / file for name, file in entries.items()}
