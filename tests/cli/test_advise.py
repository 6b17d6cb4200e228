"""Advice before and after measuring, and what path "auto" makes of measurements."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rocmega import LLM, SamplingParams
from rocmega.cli.app import app
from rocmega.models.glm.config import from_dict
from rocmega.models.glm.presets import preset
from rocmega.models.glm.traffic import hand_offs
from rocmega.policy import Measured
from rocmega.tuning import load, place, save

run = CliRunner().invoke


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Nothing measured yet, and compiled kernels where they are."""
    monkeypatch.setattr("rocmega.tuning.folder", lambda: tmp_path / "tuning")


def test_advice_from_numbers():
    found = json.loads(run(app, ["advise", "--model", "glm-5.2", "--rows", "8", "--context", "8000", "--json"]).stdout)
    assert (found["path"], found["reasons"]) == ("mega", [])
    assert found["bytes"]["1"] < found["bytes"]["8"] < 8 * found["bytes"]["1"]
    assert found["least_ms"]["MI355X"] == pytest.approx(found["bytes"]["8"] / 8.0e12 * 1e3)


def test_all_reasons_are_listed(cache):
    done = run(app, ["advise", "--model", "glm-5.2", "--rows", "17", "--context", "999999999", "--tp", "8"])
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert "the standard path" in text
    for reason in ("17 rows", "a context of 999999999", "Nothing was measured here yet"):
        assert reason in text


def test_stages_that_wait_for_one_another():
    config = from_dict(preset("glm-5.2-tiny"))
    layers, dense = config.num_hidden_layers, sum(config.dense_layers)
    assert hand_offs(config, 1) == 3 + 7 * layers + 2 * dense + 3 * (layers - dense)
    assert hand_offs(config, 4096) == hand_offs(config, 1) + sum(config.full_index)


def test_what_was_measured_is_kept_and_shown(tiny, cache):
    arguments = ["tune", str(tiny), "--rows", "1,2", "--context", "30", "--device", "host", "--json"]
    done = run(app, arguments)
    assert done.exit_code == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["rows"], cell["context"]) for cell in cells] == [(1, 30), (2, 30)]
    assert all(cell["mega_ms"] > 0 and cell["standard_ms"] > 0 for cell in cells)
    shown = json.loads(run(app, ["advise", "--model", str(tiny), "--arch", "host", "--json"]).stdout)
    assert [kept["cells"] for kept in shown["measured"]] == [cells]


def test_auto_takes_what_was_faster_and_says_so(tiny, cache):
    settings = {"device": "host", "max_rows": 3, "max_model_len": 64}
    with LLM(tiny, **settings) as llm:
        save(llm.runner, [Measured(1, 64, 1.0, 2.0), Measured(3, 64, 3.0, 2.0)])
        assert not llm.runner.measured  # of before
    with LLM(tiny, **settings) as llm:
        llm.generate([[1], [2], [3]], [SamplingParams(max_tokens=n) for n in (1, 1, 3)])
        metrics = llm.metrics()
        assert metrics["steps"] == {"mega": 2, "fused": 0, "standard": 1}
        [reason] = metrics["fallback_reasons"]
        assert "3 rows and 64 tokens: 3 ms, and 2 ms" in reason
        assert metrics["mega_coverage"] == pytest.approx(2 / 5)
        llm.engine.path = "mega"  # asked for by name: measurements do not count
        llm.generate([[1], [2], [3]], SamplingParams(max_tokens=1))
        assert llm.metrics()["steps"]["mega"] == 3


def test_damaged_measurements_are_none(tiny, cache):
    with LLM(tiny, device="host", max_rows=1, max_model_len=64) as llm:
        place(llm.runner).parent.mkdir()
        for text in ("{", "[]", '{"cells": [{"rows": 1}]}'):
            place(llm.runner).write_text(text)
            assert load(llm.runner) == ()


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--rows", "1,x"], ["--rows", "17"], ["--context", ""]])
def test_impossible_numbers_are_refused(tiny, arguments):
    done = run(app, ["tune", str(tiny), *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.stderr
