import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from rocmega import LLM, SamplingParams
from rocmega.cli.app import app

run = CliRunner().invoke
STANDARD = ["--path", "standard", "--max-new-tokens", "5"]


def decode(directory, *arguments):
    return run(app, ["decode", str(directory), *STANDARD, *arguments])


@pytest.fixture(scope="module")
def expected(tiny):
    with LLM(tiny, path="standard", max_model_len=64) as llm:
        outputs = llm.generate([[3, 1, 4], [9]], SamplingParams(max_tokens=5))
    return [output.outputs[0].token_ids for output in outputs]


def test_json_is_one_object_and_nothing_else(tiny, expected):
    result = decode(tiny, "--tokens", "3,1,4", "--tokens", "9", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert [output["token_ids"] for output in report["outputs"]] == expected
    assert [output["prompt_token_ids"] for output in report["outputs"]] == [[3, 1, 4], [9]]
    assert {output["finish_reason"] for output in report["outputs"]} == {"length"}
    assert report["metrics"]["steps"] == {"mega": 0, "fused": 0, "standard": 5}
    assert report["activations"] == "f32"


def test_people_get_a_table_and_progress_goes_to_stderr(tiny, expected):
    result = decode(tiny, "--tokens", "3 1 4")
    assert result.exit_code == 0
    assert all(str(token) in result.stdout for token in expected[0])
    assert "decoding" in result.stderr
    assert "decoding" not in result.stdout


def test_saved_logits_are_those_behind_the_tokens(tiny, expected, tmp_path):
    file = tmp_path / "logits.safetensors"
    result = decode(tiny, "--tokens", "3,1,4", "--tokens", "9", "--save-logits", str(file), "--json")
    assert result.exit_code == 0, result.output
    saved = load_file(file)
    assert set(saved) == {"logits.0", "logits.1", "tokens.0", "tokens.1"}
    for row, tokens in enumerate(expected):
        assert saved[f"logits.{row}"].shape == (5, 512)
        assert saved[f"logits.{row}"].argmax(dim=1).tolist() == tokens == saved[f"tokens.{row}"].tolist()
    assert list(tmp_path.iterdir()) == [file]


def test_a_timeline_is_of_the_last_step(tiny, tmp_path):
    file = tmp_path / "trace.json"
    arguments = [
        "--path",
        "mega",
        "--device",
        "host",
        "--blocks",
        "2",
        "--max-new-tokens",
        "2",
        "--timeline",
        str(file),
    ]
    result = run(app, ["decode", str(tiny), "--tokens", "3,1,4", *arguments])
    assert result.exit_code == 0, result.output
    assert "waits longest" in " ".join(result.stdout.split())
    assert "gate_up" in result.stdout
    slices = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == {0, 1}
    assert {"embed", "sample", "waiting"} <= {event["name"] for event in slices}


BAD = {
    "a timeline without the mega-task": (["--tokens", "1", "--timeline", "trace.json"], "no timeline"),
    "no prompt": ([], "Give prompts either as"),
    "activations": (["--tokens", "1", "--activations", "bf16"], "this checkpoint is float32"),
    "two kinds of prompt": (["--tokens", "1", "--prompt", "x"], "Give prompts either as"),
    "not numbers": (["--tokens", "1,two"], "not a list of token ids"),
    "empty": (["--tokens", ""], "Prompt 0 is empty"),
    "out of range": (["--tokens", "1,512"], "0 to 511"),
    "negative": (["--tokens", "-1"], "token -1"),
    "text without tokenizer": (["--prompt", "hello"], "tokenizer.json"),
    "rows nobody can run": (["--tokens", "1", "--max-rows", "17"], "max_rows=17"),
    "too long": (["--tokens", "1,2,3", "--max-model-len", "7"], "longest context of 7"),
    "context past the model": (["--tokens", "1", "--max-model-len", "4097"], "2 to 4096"),
    "unknown path": (["--tokens", "1", "--path", "fast"], "path='fast'"),
    "unknown device": (["--tokens", "1", "--device", "tpu"], "tpu"),
    "no folder for logits": (["--tokens", "1", "--save-logits", "/nowhere/x.safetensors"], "folder does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_paragraph_and_exit_2(tiny, name):
    arguments, message = BAD[name]
    result = decode(tiny, *arguments, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


def damage_nothing_there(directory):
    for file in directory.iterdir():
        file.unlink()


def damage_unknown_type(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))


def damage_contradiction(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "scoring_func": "softmax"}))


def damage_config_is_no_json(directory):
    (directory / "config.json").write_text("{")


def damage_missing_shard(directory):
    sorted(directory.glob("*.safetensors"))[1].unlink()


def damage_truncated(directory):
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])


def damage_missing_tensor(directory):
    rewrite(directory, lambda tensors: tensors.pop("model.norm.weight"))


def damage_wrong_shape(directory):
    def cut(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    rewrite(directory, cut)


def rewrite(directory, change):
    """Changes the tensors of the shard with the final norm, and lets the index agree."""
    from safetensors.torch import save_file

    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    file = index["weight_map"]["model.norm.weight"]
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file or n in tensors}
    index_path.write_text(json.dumps(index))


DAMAGE = {
    damage_nothing_there: "config.json",
    damage_unknown_type: "unheard_of",
    damage_contradiction: "num_key_value_heads",
    damage_config_is_no_json: "config.json",
    damage_missing_shard: "00002-of",
    damage_truncated: "00001-of",
    damage_missing_tensor: "model.norm.weight",
    damage_wrong_shape: "model.norm.weight",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_bad_checkpoints_are_one_paragraph_and_exit_2(tiny_copy, damage, tmp_path):
    damage(tiny_copy)
    file = tmp_path / "logits.safetensors"
    result = decode(tiny_copy, "--tokens", "1", "--save-logits", str(file))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert DAMAGE[damage] in result.stderr
    assert "Traceback" not in result.stderr
    assert not file.exists()


def test_every_contradiction_is_named(tiny_copy):
    damage_contradiction(tiny_copy)
    result = decode(tiny_copy, "--tokens", "1")
    assert "num_key_value_heads" in result.stderr
    assert "scoring_func" in result.stderr


def test_a_process_that_fails_shows_no_traceback(tmp_path):
    command = [sys.executable, "-m", "rocmega", "decode", str(tmp_path / "nowhere"), "--tokens", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("rocmega: ")
    assert "Traceback" not in result.stderr


def test_wrong_usage_exits_2():
    assert run(app, ["decode"]).exit_code == 2
    assert run(app, ["no-such-command"]).exit_code == 2
    assert run(app, ["decode", "x", "--max-new-tokens", "0"]).exit_code == 2


def test_no_compiler_exits_2_and_says_what_was_tried(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("ROCMEGA_HOSTCXX", "/nowhere/c++")
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path))
    result = run(app, ["decode", str(tiny), "--tokens", "1", "--path", "mega", "--device", "host"])
    assert result.exit_code == 2
    assert "/nowhere/c++" in result.stderr
    assert "Traceback" not in result.stderr
