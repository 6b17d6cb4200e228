"""The engine's measurement: what it counts, and which differences between paths it lets pass."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rocmega import LLM
from rocmega.engine.measure import WAYS, Switching, covered, measure, switching, time_way

SETTINGS = {"device": "host", "max_rows": 2, "max_model_len": 128, "blocks": 2}


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, **SETTINGS) as made:
        yield made


def test_all_of_it(llm):
    timings, shares, [switched] = measure(llm, [2], tokens=3, prompt=5)
    assert [(each.way, each.rows, each.tokens) for each in timings] == [
        (way.name, 2, 3) for way in WAYS if way.path != "fused"
    ]
    assert [each.launches for each in timings] == [None, 1, pytest.approx(1 / 6)]
    assert all(0 < each.ms <= each.p99 and each.cpu_ms > 0 for each in timings)
    assert shares == {1: 1, 2: 1}
    assert (switched.paths, switched.equal, switched.tokens) == (("mega", "standard"), 3, 3)
    assert switched.explained
    assert (llm.engine.path, llm.engine.tokens_per_launch, llm.engine.running) == ("auto", 1, 0)


def test_paths_that_differ_are_told(llm, monkeypatch):
    decode = llm.runner.standard.decode
    monkeypatch.setattr(llm.runner.standard, "decode", lambda batch: decode(batch).roll(1, dims=1))
    found = switching(llm, "standard", tokens=3, prompt=5)
    assert found.equal == 0
    assert found.margin > 0
    assert found.apart > 0
    assert Switching(("mega", "standard"), 9, 4, margin=0.1, apart=0.06).explained
    assert not Switching(("mega", "standard"), 9, 4, margin=0.2, apart=0.06).explained


def test_steps_of_other_paths_show(llm, monkeypatch):
    monkeypatch.setattr("rocmega.policy.MEGA_ROWS", 1)
    assert covered(llm, 2, prompt=5) == 0
    assert covered(llm, 1, prompt=5) == 1


def test_a_way_that_cannot_run_is_an_error(llm):
    from rocmega.errors import RequestError

    with pytest.raises(RequestError, match=r"it has not been loaded|target 'host'"):
        time_way(llm, WAYS[1], 1, 2, 5)
    llm.engine.abort([*llm.engine._running])  # it had come in


def test_the_command(tiny):
    options = ["--device", "host", "--rows", "1", "--tokens", "2", "--prompt", "3", "--blocks", "2", "--max-rows", "2"]
    command = [sys.executable, "-m", "rocmega.engine.measure", str(tiny), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["coverage"].values()) == {1}
    assert list(found["coverage"]) == ["1", "2"]
