"""`rocmega demo --ranks`: torchrun and all that it starts, once; the rest on made-up results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rocmega import demo_ranks
from rocmega.cli.app import app
from rocmega.demo_ranks import RankRun, RanksComparison

run = CliRunner().invoke


def comparison(*of_ranks: list[int]) -> RanksComparison:
    mega = [RankRun(tokens, [90.0, 2.0 + rank, 3.0 + rank], 2) for rank, tokens in enumerate(of_ranks)]
    standard = [RankRun([1, 2, 3], [50.0, 7.0, 8.0], 0) for _ in of_ranks]
    alone = RankRun([1, 2, 3], [80.0, 5.0, 6.0], 3)
    return RanksComparison("glm-5.2-tiny", "somewhere", "gloo", alone, {"mega": mega, "standard": standard})


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_as_processes_agree_with_one(nodes):
    """Two of each node."""
    command = [sys.executable, "-m", "rocmega", "demo", "--ranks", "2", "--tokens", "3", "--device", "host", "--json"]
    command += ["--nodes", str(nodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["agree"] is True
    assert (report["ranks"], report["nodes"]) == (2 * nodes, nodes)
    assert len(report["tokens"]) == 3
    assert report["launches_per_token"] == 1
    assert all(len(times) == 2 * nodes and min(times) > 0 for times in report["step_ms"].values())
    assert report["standard_path_sums_by"] == "gloo"


def test_the_slowest_rank_and_its_steps_without_the_first():
    result = comparison([1, 2, 3], [1, 2, 3])
    assert result.agree
    assert result.slowest == 1
    assert result.report()["step_ms"] == {"mega": [3.0, 4.0], "standard": [8.0, 8.0]}


def test_a_rank_with_other_tokens_ends_with_1(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(demo_ranks, "run", lambda *args, **options: comparison([1, 2, 3], [1, 2, 4]))
    result = run(app, ["demo"])
    assert result.exit_code == 1
    assert "They differ" in result.stdout
    assert "Slowest rank of the mega-task: 1" in result.stdout


def test_without_torchrun_it_starts_it(monkeypatch):
    started = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(demo_ranks, "start", lambda ranks, arguments: started.append((ranks, arguments)) or 3)
    result = run(app, ["demo", "--ranks", "4", "--nodes", "2", "--blocks", "2", "--json"])
    assert result.exit_code == 3
    [(ranks, arguments)] = started
    assert ranks == 8  # processes, on this machine
    assert arguments[arguments.index("--ranks") :][:4] == ["--ranks", "4", "--nodes", "2"]
    assert arguments[-3:] == ["--blocks", "2", "--json"]
