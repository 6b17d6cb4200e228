"""`rocmega check`: a model, a stage of one's own, and what is said when something is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rocmega.cli.app import app

run = CliRunner().invoke
EXAMPLE = Path(__file__).parents[2] / "examples" / "checked_stage"
SEEDS = 10  # of a model: all orders of the scheduler twice; by hand as many as one likes


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The documented example without its drain."""
    for file in EXAMPLE.iterdir():
        shutil.copy(file, tmp_path)
    source = tmp_path / "normalize.hip"
    lines = source.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "drain();" not in line]
    assert len(kept) == len(lines) - 1
    source.write_text("".join(kept))
    return tmp_path / "normalize.py"


@pytest.mark.parametrize(
    ("model", "ranks", "seeds"),
    [("glm-5.2", 1, SEEDS), ("glm-5.2", 2, 6), ("deepseek-v4-flash", 1, 5), ("deepseek-v4.1-flash", 1, 5)],
)
def test_a_model_is_clean(model: str, ranks: int, seeds: int) -> None:
    arguments = ["--model", model, "--preset", "tiny", "--ranks", str(ranks), "--seeds", str(seeds)]
    result = run(app, ["check", *arguments, "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["clean"]
    assert report["failure"] is None
    assert sum(each["runs"] for each in report["runs"]) == seeds
    assert len({each["blocks"] for each in report["runs"]}) > 2


def test_the_documented_stage_is_clean_in_all_orders_with_a_preemption() -> None:
    result = run(app, ["check", str(EXAMPLE / "normalize.py"), "--seeds", "10", "--jobs", "1", "--preemptions", "1",
                       "--minutes", "5", "--json"])  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["clean"]
    assert report["explored"]["all"]
    assert report["explored"]["orders"] > 100


def test_what_is_found_is_told_as_a_story_and_fails_again(broken: Path) -> None:
    result = run(app, ["check", str(broken), "--seeds", "5", "--jobs", "1", "--json"])
    assert result.exit_code == 1
    failure = json.loads(result.stdout)["failure"]
    assert failure["stage"] == "result"
    assert "missing: drain()" in failure["report"]
    assert any("stores tag 1 to byte" in line for line in failure["story"])
    assert failure["switches"] == 0
    result = run(app, ["check", str(broken), "--replay", failure["case"], "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failure"]["case"] == failure["case"]
    result = run(app, ["check", str(broken), "--seeds", "2", "--jobs", "2"])
    assert result.exit_code == 1
    assert "missing: drain()" in " ".join(result.stdout.split())


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "empty.py").touch()
    for arguments, message in (
        ([], "either the Python file of a stage or --model"),
        (["--model", "glm-9"], "there is no preset 'glm-9-tiny'"),
        ([str(tmp_path / "none.py")], "does not exist"),
        ([str(tmp_path / "empty.py")], "defines no `subject`"),
        ([str(EXAMPLE / "normalize.py"), "--replay", "1,2"], "not a case"),
    ):
        result = run(app, ["check", *arguments])
        assert result.exit_code == 2, result.output
        assert message in result.stderr
