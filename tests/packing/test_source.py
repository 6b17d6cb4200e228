"""Which checkpoint it was, and whether its files are what was published."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from rocmega.checkpoint import Checkpoint
from rocmega.errors import CheckpointError
from rocmega.packing.source import SAMPLES, check_published, difference, fingerprint


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path / "checkpoint"))


def change(path: Path, at: float) -> None:
    """Flips a bit at a fraction of the file."""
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def test_fingerprints(checkpoint):
    one = fingerprint(Checkpoint(checkpoint))
    assert one == fingerprint(Checkpoint(checkpoint))
    assert not difference(one, one)
    assert set(one["files"]) == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    # A sample lies at each sixteenth of the data; between them nothing is read.
    for number in (0, 7, SAMPLES - 1):
        path = checkpoint / "model-00002-of-00003.safetensors"
        before = path.read_bytes()
        length = int.from_bytes(before[:8], "little")
        change(path, (8 + length + (len(before) - 8 - length) * number // SAMPLES + 9) / (len(before) - 1))
        other = fingerprint(Checkpoint(checkpoint))
        assert other["id"] != one["id"]
        assert "their model-00002-of-00003.safetensors differ in samples" in difference(one, other)
        path.write_bytes(before)
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text() + "\n")
    assert difference(one, fingerprint(Checkpoint(checkpoint))) == "their config.json differ"


def test_without_published_digests(checkpoint):
    assert check_published(Checkpoint(checkpoint)) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def hub_cache(checkpoint: Path) -> None:
    """As the hub's cache has it: links to files that are named by their SHA-256."""
    blobs = checkpoint.parent / "blobs"
    blobs.mkdir()
    for path in checkpoint.glob("*.safetensors"):
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        path.symlink_to(blob)


def hub_folder(checkpoint: Path) -> None:
    """As a download into a folder has it: notes of commit, digest and time."""
    notes = checkpoint / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for path in checkpoint.glob("*.safetensors"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (notes / f"{path.name}.metadata").write_text(f"{'a' * 40}\n{digest}\n1700000000.0\n")


@pytest.mark.parametrize("download", [hub_cache, hub_folder])
def test_a_flipped_bit_is_found_where_the_download_left_its_digests(download, checkpoint):
    download(checkpoint)
    seen = []
    assert check_published(Checkpoint(checkpoint), lambda *args: seen.append(args)) == []
    assert seen[-1][1] == seen[-1][2] == sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    change(checkpoint / "model-00003-of-00003.safetensors", 0.777)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors is damaged: its SHA-256 is \w+, and"):
        check_published(Checkpoint(checkpoint))
