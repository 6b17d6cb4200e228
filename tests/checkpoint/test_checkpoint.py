from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rocmega.checkpoint import INDEX, SINGLE, Checkpoint
from rocmega.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    return tmp_path


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_single_file(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    check_tensors(Checkpoint(tmp_path))


def test_shards(sharded):
    check_tensors(Checkpoint(sharded))


def check_tensors(checkpoint: Checkpoint) -> None:
    assert checkpoint.names() == ["a", "b"]
    assert "a" in checkpoint
    assert "c" not in checkpoint
    for name, expected in TENSORS.items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert checkpoint.dtype(name) == expected.dtype
        assert torch.equal(checkpoint.tensor(name), expected)
    kept = checkpoint.tensor("a")
    checkpoint.close()
    assert torch.equal(kept, TENSORS["a"])
    assert torch.equal(checkpoint.tensor("b"), TENSORS["b"])


def test_shards_may_be_links_as_in_download_caches(sharded, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "blob"
    (sharded / "one.safetensors").rename(store)
    (sharded / "one.safetensors").symlink_to(store)
    assert torch.equal(Checkpoint(sharded).tensor("a"), TENSORS["a"])


def test_missing_tensor(sharded):
    with pytest.raises(CheckpointError, match=r"tensor c is missing from .*incomplete"):
        Checkpoint(sharded).tensor("c")


def test_index_that_promises_too_much(sharded):
    write_index(sharded, {"a": "one.safetensors", "c": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"one.safetensors does not hold tensor c"):
        Checkpoint(sharded).tensor("c")


def test_missing_shard(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks two.safetensors"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors"]
)
def test_index_must_stay_in_the_directory(sharded, file):
    write_index(sharded, {"a": file})
    with pytest.raises(CheckpointError, match=r"outside the checkpoint's directory"):
        Checkpoint(sharded)


def test_pickles_are_never_read(sharded, tmp_path_factory):
    write_index(sharded, {"a": "weights.bin"})
    with pytest.raises(CheckpointError, match=r"weights.bin: only safetensors"):
        Checkpoint(sharded)
    directory = tmp_path_factory.mktemp("pickles")
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pickle files.*convert them to safetensors"):
        Checkpoint(directory)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_damaged_index(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"no safetensors index"):
        Checkpoint(sharded)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a directory"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no weights"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 60, -1])
def test_truncated_file(sharded, size):
    path = sharded / "one.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"one.safetensors.*(truncated|too short).*[Ff]etch"):
        Checkpoint(sharded).tensor("a")


def test_absurd_header_length(sharded):
    with (sharded / "one.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 62))
    with pytest.raises(CheckpointError, match=r"one.safetensors says that its header is 4611686018427387904 bytes"):
        Checkpoint(sharded).tensor("a")


@pytest.mark.parametrize(
    "header",
    [
        [],
        3,
        {"a": 3},
        {"a": {}},
        {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [2, -3], "data_offsets": [0, 24]}},
        {"a": {"dtype": "F32", "shape": [2, True], "data_offsets": [0, 24]}},
        {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}},
        {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]}},
        {"a": {"dtype": 7, "shape": [2, 3], "data_offsets": [0, 24]}},
    ],
)
def test_damaged_header(sharded, header):
    write_header(sharded / "one.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=r"one.safetensors.*[Ff]etch"):
        Checkpoint(sharded).tensor("a")


def test_header_that_is_no_json(sharded):
    (sharded / "one.safetensors").write_bytes(struct.pack("<Q", 8) + b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"no readable safetensors header"):
        Checkpoint(sharded).tensor("a")


def test_dtype_we_do_not_know(sharded):
    write_header(sharded / "one.safetensors", {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(CheckpointError, match=r"tensor a is stored as F4"):
        Checkpoint(sharded).tensor("a")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_never_escapes_as_another_error(sharded, data):
    path = sharded / "one.safetensors"
    save_file({"a": TENSORS["a"]}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        Checkpoint(sharded).tensor("a")
    except CheckpointError as error:
        assert "one.safetensors" in str(error)  # noqa: PT017 - it need not be raised


def test_what_only_safetensors_notices(sharded):
    """A hole in the data passes our own checks; the library's refusal still names file and tensor."""
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}}
    write_header(sharded / "one.safetensors", header, bytes(32))
    with pytest.raises(CheckpointError, match=r"one.safetensors: tensor a cannot be read"):
        Checkpoint(sharded).tensor("a")
