"""Both paths of an untrained model answer puzzles: they are wrong, and equally so."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from rocmega.cli.app import app
from rocmega.errors import RequestError
from rocmega.eval import run as eval_run
from rocmega.eval.puzzles import TASKS
from rocmega.models.glm.training.data import write_tokenizer

run = CliRunner().invoke


@pytest.fixture(scope="module")
def speaking(tiny_checkpoint, tmp_path_factory):
    """A tiny model in FP8 that knows ASCII."""
    directory = shutil.copytree(tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path_factory.mktemp("eval") / "speaking")
    write_tokenizer(directory)
    return directory


def test_paths_and_formats_are_compared(speaking):
    asked = ["eval", str(speaking), "--puzzles", "1", "--tasks", "add,copy", "--device", "host", "--json"]
    result = run(app, [*asked, "--formats", "f32,fp8"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["asked_by_task"] == {"add": 1, "copy": 1}
    arms = {(arm["format"], arm["path"]): arm for arm in report["arms"]}
    assert list(arms) == [("f32", "standard"), ("f32", "mega"), ("fp8", "standard"), ("fp8", "mega")]
    assert all(arm["mega_coverage"] == (path == "mega") for (_, path), arm in arms.items())
    assert arms["f32", "mega"]["activations"] == "f32"
    pairs = {(pairing["base"], pairing["other"]): pairing for pairing in report["pairs"]}
    exact = pairs["f32, standard path", "f32, mega-task"]
    assert exact["same"] == exact["asked"] == 2
    assert 0 < exact["max_difference"] < 1e-3
    formats = pairs["f32, standard path", "fp8, standard path"]
    assert formats["mean_difference"] > 10 * exact["mean_difference"]  # the values are the same, activations bf16
    assert set(pairs) == {
        ("f32, standard path", "f32, mega-task"),
        ("fp8, standard path", "fp8, mega-task"),
        ("f32, standard path", "fp8, standard path"),
        ("f32, mega-task", "fp8, mega-task"),
    }


def arm(path: str, rights: list[bool]) -> eval_run.Arm:
    answers = [eval_run.Answer("", [7, right], right, torch.eye(8)[[7, int(right)]]) for right in rights]
    return eval_run.Arm(eval_run.STORED, path, "somewhere", "bf16", answers, None)


@pytest.mark.parametrize(("others", "words"), [([True] * 8, "within chance"), ([False] * 8, "beyond chance")])
def test_people_are_told_what_it_means(monkeypatch, speaking, others, words):
    made = iter([arm("standard", [True] * 8), arm("mega", others)])
    monkeypatch.setattr(eval_run, "_ask", lambda *arguments: next(made))
    result = run(app, ["eval", str(speaking), "--puzzles", "4", "--tasks", "add,sort"])
    assert result.exit_code == 0, result.output
    assert "100.0%" in result.stdout
    assert words in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "add,juggle"], "juggle is none of add"),
        (["--paths", "mega,mega"], "the same thing twice"),
        (["--formats", "int4"], "cannot be put into 'int4'"),
        (["--paths", "slow"], "slow is none of standard"),
    ],
)
def test_what_cannot_be_asked_is_said(speaking, options, message):
    result = run(app, ["eval", str(speaking), "--puzzles", "1", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_model_without_a_tokenizer_cannot_be_asked(tiny):
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        eval_run.evaluate(tiny, each=1, tasks=list(TASKS)[:1], paths=["standard"])
