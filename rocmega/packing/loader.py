"""Packs that are finished: finding, checking and loading them.

Loading maps the files; nothing is read before it is used, and a GPU gets one tensor after the other. What is checked
each time: the manifest, and every file's size and header. `Pack.verify` reads everything and compares checksums.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.checkpoint.header import DTYPES, TensorInfo, read_header
from rocmega.checkpoint.tiles import LAYOUT_TAG, LAYOUT_VERSION, PackedMatrix
from rocmega.errors import CheckpointError, PackError
from rocmega.packing.files import file_of
from rocmega.packing.manifest import CHECKSUMS, MANIFEST, read_json
from rocmega.packing.plan import DRAFT, Field, field_from_json
from rocmega.packing.source import difference, fingerprint
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    import torch

    from rocmega.checkpoint import Checkpoint

_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")
_CHUNK = 16 << 20


def rank_folders(directory: Path) -> dict[tuple[int, int], Path]:
    """(tp, rank) -> the folder of a finished pack in `directory`, in order."""
    if not directory.is_dir():
        return {}
    found = {}
    for path in directory.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match[2]), int(match[1])] = path
    return dict(sorted(found.items()))


def is_pack(directory: Path) -> bool:
    """Whether a directory is one rank's pack, or holds some."""
    return (directory / MANIFEST).is_file() or bool(rank_folders(directory))


def find(directory: Path, tp: int = 1, rank: int = 0) -> Path | None:
    """The folder of a rank's pack: `directory` itself, or one in it. None if there is no pack at all.

    Raises PackError if there are only packs for other ranks.
    """
    if (directory / MANIFEST).is_file():
        return directory
    folders = rank_folders(directory)
    if not folders:
        return None
    if (tp, rank) not in folders:
        there = ", ".join(f"rank {other} of {ranks}" for ranks, other in folders)
        raise PackError(f"{directory} holds packs of {there}; rank {rank} of {tp} is wanted. Pack it for {tp}.")
    return folders[tp, rank]


@dataclass(frozen=True)
class Pack:
    """One rank's finished pack.

    Fields:
        directory: where it is.
        manifest: what it says of itself.
        fields: by name.
        headers: file name -> its tensors.
    """

    directory: Path
    manifest: dict[str, Any]
    fields: dict[str, Field]
    headers: dict[str, dict[str, TensorInfo]]
    _maps: dict[str, mmap.mmap] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> str:
        return str(self.manifest["arch"])

    @property
    def tp(self) -> int:
        return int(self.manifest["tp"])

    @property
    def rank(self) -> int:
        return int(self.manifest["rank"])

    @property
    def family(self) -> str:
        """The model_type of its config.json."""
        return str(self.manifest["family"])

    @property
    def formats(self) -> dict[str, str]:
        """What is stored in which format, by the family's names."""
        return dict(self.manifest["formats"])

    def bytes(self) -> int:
        """Bytes of all fields."""
        return sum(of.bytes() for of in self.fields.values())

    def check_for(
        self, *, arch: str | None = None, tp: int = 1, rank: int = 0, checkpoint: Checkpoint | None = None
    ) -> None:
        """Raises PackError, naming both sides, if the pack is for something else. arch None: whatever it is for."""
        if arch is not None and self.arch != arch:
            raise PackError(
                f"{self.directory} was packed for {self.arch} and this is {arch}: the bytes differ. Pack the "
                f"checkpoint again with --arch {arch}."
            )
        if (self.tp, self.rank) != (tp, rank):
            raise PackError(
                f"{self.directory} is rank {self.rank} of {self.tp} and rank {rank} of {tp} is wanted. Pack the "
                f"checkpoint with --tp {tp}."
            )
        if checkpoint is not None:
            source, given = self.manifest["source"], fingerprint(checkpoint)
            differ = difference(given, source)
            if differ:
                raise PackError(
                    f"{self.directory} was packed from another checkpoint ({source.get('id')}) than "
                    f"{checkpoint.directory} ({given['id']}): {differ}. Pack this one."
                )

    def load(
        self,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
        wanted: Callable[[str], bool] = lambda field: not field.startswith(DRAFT),
    ) -> dict[str, PackedMatrix | torch.Tensor]:
        """Field name -> packed matrices or plain tensor. On the CPU they are views of the mapped files.

        wanted: only these fields; by default all but those of a layer for guessing ahead.
        """
        fields = {name: of for name, of in self.fields.items() if wanted(name)}
        total, done = sum(of.bytes() for of in fields.values()), 0
        out: dict[str, PackedMatrix | torch.Tensor] = {}
        for name, of in fields.items():
            place = "cpu" if of.host else device
            tensors = {tensor: self._tensor(name, tensor).to(place) for tensor in of.tensors()}
            if of.count:
                n, k = of.shape
                scales = tensors.get(f"{name}.scales")
                out[name] = PackedMatrix(of.format, n, k, tensors[f"{name}.tiles"], scales, of.count)
            else:
                out[name] = tensors[name]
            done += of.bytes()
            progress(f"loading {self.directory.name}", done, total)
        return out

    def verify(self, progress: Progress = silent) -> None:
        """Reads everything and compares it with the checksums made when it was written. Raises PackError."""
        import torch

        listed = _checksums(self.directory, self.manifest)
        total, done = self.bytes(), 0
        for name, of in self.fields.items():
            for tensor in of.tensors():
                data = self._tensor(name, tensor).flatten().view(torch.uint8).numpy().data
                for offset, size, wanted in listed.get(tensor, []):
                    crc = 0
                    for start in range(offset, offset + size, _CHUNK):
                        crc = zlib.crc32(data[start : min(start + _CHUNK, offset + size)], crc)
                    if crc != wanted:
                        raise PackError(
                            f"{self.directory / file_of(name)} is damaged: bytes {offset} to {offset + size} of tensor "
                            f"{tensor} are not what was written. Delete {self.directory} and pack again."
                        )
                    done += size
                    progress(f"verifying {self.directory.name}", done, total)
        if done != total:
            raise PackError(f"{self.directory / CHECKSUMS} lacks some tensors: delete {self.directory} and pack again.")

    def _tensor(self, name: str, tensor: str) -> torch.Tensor:
        import torch

        file = file_of(name)
        info = self.headers[file][tensor]
        if file not in self._maps:
            with (self.directory / file).open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        dtype = getattr(torch, DTYPES[info.dtype][0])
        count = info.nbytes // dtype.itemsize
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mapping is read-only: nobody writes to weights
            values = torch.frombuffer(self._maps[file], dtype=dtype, count=count, offset=info.offset)
        return values.view(info.shape)


def open_pack(directory: Path) -> Pack:
    """A finished pack of one rank. Raises PackError if it is damaged, or of a layout that this version cannot read."""
    manifest = read_json(directory / MANIFEST)
    layout = manifest.get("layout")
    wanted = {"tag": LAYOUT_TAG, "version": LAYOUT_VERSION}
    if layout != wanted:
        shown = " ".join(map(str, layout.values())) if isinstance(layout, dict) else layout
        raise PackError(
            f"{directory} has layout {shown} (rocmega {manifest.get('rocmega')}) and this rocmega reads {LAYOUT_TAG} "
            f"{LAYOUT_VERSION}: pack the checkpoint again."
        )
    try:
        fields = {name: field_from_json(name, entry) for name, entry in manifest["fields"].items()}
        files = {_inside(name): (entry["size"], entry["header"]) for name, entry in manifest["files"].items()}
        headers = {name: _header(directory / name, *expected) for name, expected in files.items()}
        for name, of in fields.items():
            for tensor, (dtype, shape) in of.tensors().items():
                info = headers[file_of(name)][tensor]
                if (info.dtype, info.shape) != (dtype, shape):
                    raise PackError(f"{directory}: tensor {tensor} is not what {MANIFEST} says. Pack again.")
        pack = Pack(directory, manifest, fields, headers)
        _ = pack.tp, pack.rank, pack.arch, pack.formats, pack.family, manifest["config"], manifest["source"]["id"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PackError(
            f"{directory / MANIFEST} is damaged. Delete {directory} and pack the checkpoint again."
        ) from None
    return pack


def _inside(name: str) -> str:
    """A name in the pack's folder; ValueError for one that leads out of it."""
    if name != Path(name).name or name in (".", ".."):
        raise ValueError(name)
    return name


def _header(path: Path, size: int, digest: str) -> dict[str, TensorInfo]:
    try:
        found = path.stat().st_size
        if found != size:
            raise PackError(
                f"{path} is {found} bytes long and was written with {size}: it is damaged, or not all of it was "
                "copied. Copy it again, or pack again."
            )
        tensors = read_header(path)
        with path.open("rb") as file:
            begin = min(info.offset for info in tensors.values())
            same = hashlib.sha256(file.read(begin)).hexdigest() == digest
    except OSError as error:
        raise PackError(f"{path} cannot be read ({error.strerror}): the pack is incomplete. Pack again.") from None
    except CheckpointError as error:
        raise PackError(f"{error} It is part of a pack: pack the checkpoint again.") from None
    if not same:
        raise PackError(f"{path} is damaged: its header is not what was written. Pack again.")
    return tensors


def _checksums(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    content = read_json(directory / CHECKSUMS)
    if hashlib.sha256((directory / CHECKSUMS).read_bytes()).hexdigest() != manifest.get("checksums"):
        raise PackError(f"{directory / CHECKSUMS} is damaged. Delete {directory} and pack the checkpoint again.")
    return content
