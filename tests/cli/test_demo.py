import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from rocmega import demo
from rocmega.cli.app import app
from rocmega.launches import count

run = CliRunner().invoke


def path_run(tokens: list[int], shift: float = 0.0) -> demo.PathRun:
    logits = torch.zeros(len(tokens), 8)
    for step, token in enumerate(tokens):
        logits[step, token] = 1 + shift
    return demo.PathRun(tokens, logits, "somewhere", 1, "something", 0.5)


def comparison(**runs: demo.PathRun) -> demo.Comparison:
    return demo.Comparison("glm-5.2-tiny", "host", [1, 2, 3], runs)


def test_agreement_and_the_largest_difference():
    same = comparison(mega=path_run([1, 2]), standard=path_run([1, 2], 0.25), transformers=path_run([1, 2], -0.25))
    assert same.agree
    assert same.max_logit_diff == 0.5
    assert same.logit_diff("mega", "standard") == 0.25


def test_after_tokens_differ_logits_are_not_compared():
    differ = comparison(mega=path_run([1, 2, 3]), standard=path_run([1, 4, 5], 0.5))
    assert not differ.agree
    assert differ.max_logit_diff == 1.5  # at token 4, the first that differs; what follows has another past


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_disagreement_ends_with_1(monkeypatch, arguments):
    monkeypatch.setattr(demo, "run", lambda *a, **k: comparison(mega=path_run([1]), standard=path_run([2])))
    result = run(app, ["demo", *arguments])
    assert result.exit_code == 1
    if arguments:
        report = json.loads(result.stdout)
        assert report["agree"] is False
        assert report["tokens"] == {"mega": [1], "standard": [2], "transformers": None}


def test_unknown_model_ends_with_2():
    result = run(app, ["demo", "--model", "glm-5.2"])
    assert result.exit_code == 2
    assert "glm-5.2-tiny" in result.stderr


def test_the_three_paths_agree():
    pytest.importorskip("transformers")
    result = run(app, ["demo", "--json", "--tokens", "6"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["agree"] is True
    assert report["model"] == "glm-5.2-tiny"
    assert len(report["prompt_token_ids"]) == 75
    assert len(report["tokens"]["mega"]) == 6
    assert report["tokens"]["mega"] == report["tokens"]["standard"] == report["tokens"]["transformers"]
    assert 0 < report["max_logit_diff"] < 1e-3
    assert report["launches_per_token"]["mega"] == 1
    assert report["launches_per_token"]["standard"] > 50
    assert report["launches_per_token"]["transformers"] > 50


def test_a_question_in_text_is_answered_by_all_three():
    pytest.importorskip("transformers")
    result = run(app, ["demo", "--json", "--prompt", "sort banana=", "--device", "host"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["texts"] == dict.fromkeys(demo.PATHS, "aaabnn")
    assert report["prompt"] == "sort banana="
    assert report["prompt_token_ids"] == list(b"sort banana=")
    assert report["tokens"]["mega"] == [*b"aaabnn", 3]  # and no further
    assert report["agree"] is True
    assert 0 < report["max_logit_diff"] < 1e-3
    assert report["launches_per_token"]["mega"] == 1


def test_people_see_question_and_answers(monkeypatch):
    answered = comparison(mega=path_run([7]), standard=path_run([6]))
    answered.text, answered.runs["mega"].text, answered.runs["standard"].text = "copy [b]=", "[b]", "[c]"
    monkeypatch.setattr(demo, "answer", lambda *a, **k: answered)
    result = run(app, ["demo", "--prompt", "copy [b]="])
    assert "mega-task: copy [b]=[b]" in result.stdout
    assert "standard path: copy [b]=[c]" in result.stdout
    assert "random" not in result.stdout
    assert result.exit_code == 1


@pytest.mark.parametrize("options", [["--model", "glm-5-tiny"], ["--ranks", "2"]])
def test_text_is_for_the_trained_model_and_one_rank(options):
    result = run(app, ["demo", "--prompt", "add 1+2=", *options])
    assert result.exit_code == 2
    assert "leave out --model, --ranks" in result.stderr


def test_without_transformers_two_paths_are_compared(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run(app, ["demo", "--tokens", "2"])
    assert result.exit_code == 0, result.output
    assert "transformers did not run" in result.stdout
    assert "pip install" in result.stdout


def test_operators_are_counted_without_views_and_allocations():
    x = torch.ones(4, 4)
    weight, bias = torch.ones(4, 4), torch.ones(4)
    cpu = torch.device("cpu")
    assert count(lambda: x + x, cpu)[0] == 1
    assert count(lambda: x.t().reshape(16)[2:].view(14), cpu)[0] == 1  # reshape of a transpose copies
    assert count(lambda: x.t()[1:].unsqueeze(0), cpu)[0] == 0
    assert count(lambda: torch.empty(3), cpu)[0] == 0
    assert count(lambda: torch.nn.functional.linear(x, weight, bias), cpu)[0] == 1
    with torch.inference_mode():
        assert count(lambda: torch.nn.functional.linear(x, weight, bias), cpu)[0] == 1
        assert count(lambda: x.softmax(-1).sum(), cpu)[0] == 2
