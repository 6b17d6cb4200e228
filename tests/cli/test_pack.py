"""`rocmega pack` and `rocmega inspect PACK`."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from rocmega.checkpoint import INDEX
from rocmega.cli.app import app
from rocmega.packing import is_pack

run = CliRunner().invoke


@pytest.fixture
def broken(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path / "checkpoint"))


def test_pack_then_inspect_then_decode(tiny_checkpoint, tmp_path):
    checkpoint, out = tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path / "out"
    result = run(app, ["pack", str(checkpoint), "--arch", "host", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    [made] = report["packs"]
    assert made["path"] == str(out / "rank-0-of-1")
    assert is_pack(out)
    result = run(app, ["inspect", str(out), "--json", "--verify"])
    assert result.exit_code == 0, result.output
    [pack] = json.loads(result.stdout)["packs"]
    assert (pack["arch"], pack["tp"], pack["rank"], pack["verified"]) == ("host", 1, 0, True)
    assert pack["bytes"] == made["bytes"] == sum(entry["bytes"] for entry in pack["tensors"])
    assert set(pack["bytes_read_per_step"]) == {"1", "4", "8"}
    assert {entry["device"] for entry in pack["limits"]} == {"MI300X", "MI355X", "H200"}
    tokens = []
    for model in (checkpoint, out):
        command = ["decode", str(model), "--tokens", "3,1,4", "--max-new-tokens", "4", "--path", "standard", "--json"]
        result = run(app, command)
        assert result.exit_code == 0, result.output
        tokens.append(json.loads(result.stdout)["outputs"][0]["token_ids"])
    assert tokens[0] == tokens[1]


def test_inspect_of_what_is_not_packed_yet(tiny_checkpoint):
    """By headers, or by the published dimensions: what it would be."""
    result = run(app, ["inspect", str(tiny_checkpoint("glm-5.2-tiny", "mxfp4")), "--arch", "gfx942", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["formats"]["linear"] == "fp8_fnuz"
    result = run(app, ["inspect", "glm-5.2", "--tp", "8", "--json"])
    report = json.loads(result.stdout)
    assert 96e9 < report["bytes"] < 97e9
    result = run(app, ["inspect", "glm-5.2", "--tp", "8"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "96.494" in result.stdout
    assert "MI355X" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_ranks(tiny_checkpoint, tmp_path):
    checkpoint = str(tiny_checkpoint("glm-5.2-tiny", "bf16"))
    base = ["pack", checkpoint, "--arch", "gfx950", "--tp", "2", "--out", str(tmp_path)]
    result = run(app, [*base, "--rank", "1"])
    assert result.exit_code == 0, result.output
    assert "rank-1-of-2" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1-of-2"]
    assert run(app, base).exit_code == 0
    result = run(app, ["inspect", str(tmp_path)])
    assert "rank-0-of-2" in result.stdout
    assert "rank-1-of-2" in result.stdout


def test_published_digests_are_compared_when_asked(broken, tmp_path):
    result = run(app, ["pack", str(broken), "--arch", "host", "--out", str(tmp_path / "out"), "--verify", "--json"])
    assert len(json.loads(result.stdout)["no_published_digest"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "nowhere", "--arch", "host"], "nowhere"),
        (["pack", "CHECKPOINT", "--arch", "gfx90a"], "gfx90a"),
        (["pack", "CHECKPOINT", "--arch", "host", "--tp", "3"], "3 ranks cannot share this model evenly"),
        (["pack", "CHECKPOINT", "--arch", "host", "--rank", "1"], "ranks are numbered from 0 to 0"),
    ],
)
def test_bad_arguments_exit_2(arguments, message, tiny_checkpoint, tmp_path):
    checkpoint, out = str(tiny_checkpoint("glm-5.2-tiny", "fp8")), tmp_path / "out"
    arguments = [checkpoint if argument == "CHECKPOINT" else argument for argument in arguments]
    result = run(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def missing_shard(checkpoint: Path) -> None:
    (checkpoint / "model-00002-of-00003.safetensors").unlink()


def outside(checkpoint: Path) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../model-00001-of-00003.safetensors"
    (checkpoint / INDEX).write_text(json.dumps(index))


def absurd_header(checkpoint: Path) -> None:
    with (checkpoint / "model-00003-of-00003.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 60))


def truncated(checkpoint: Path) -> None:
    path = checkpoint / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flipped_header_byte(checkpoint: Path) -> None:
    path = checkpoint / "model-00001-of-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[content.index(b"layers.0.self_attn.q_a_proj.weight") + 3] ^= 1
    path.write_bytes(content)


def wrong_scales(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        name = "model.layers.4.self_attn.o_proj.weight_scale_inv"
        if name in tensors:
            save_file({**tensors, name: torch.ones(4, 4)}, path)


def pickle(checkpoint: Path) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "pytorch_model.bin"
    (checkpoint / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_shard, "lacks model-00002-of-00003.safetensors"),
        (outside, "outside the checkpoint's directory"),
        (absurd_header, "model-00003-of-00003.safetensors says that its header is 1152921504606846976 bytes long"),
        (truncated, "model-00003-of-00003.safetensors is truncated"),
        (flipped_header_byte, "model-00001-of-00003.safetensors"),
        (wrong_scales, "is torch.float32 [4, 4], not torch.float32 [2, 2]"),
        (pickle, "only safetensors files are read"),
    ],
)
def test_damaged_checkpoints_exit_2_and_leave_nothing(damage, message, broken, tmp_path):
    damage(broken)
    result = run(app, ["pack", str(broken), "--arch", "host", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
