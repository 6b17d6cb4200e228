"""The commands on DeepSeek models."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rocmega.cli.app import app
from tests.models.deepseek.conftest import FAMILIES

run = CliRunner().invoke


# GB that one token reads of the weights: what ranks share, and what every rank reads. By hand from the published
# shapes, with a byte for each scale of FP8 and MXFP4.
READS = {"deepseek-v4-flash": (9.919, 1.292), "deepseek-v4.1-flash": (12.271, 0.763)}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", READS)
def test_inspect_counts_what_a_token_reads(name, tp):
    """Within 0.2%: ours has float32 scales, norms, and what a token looks up."""
    result = run(app, ["inspect", name, "--tp", str(tp), "--arch", "gfx950", "--context", "8192", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    shared, whole = READS[name]
    weights = report["bytes_read_per_token"]["1"] - sum(report["cache_reads_per_row"].values())
    assert 0 < weights / 1e9 - (shared / tp + whole) < 2e-3 * (shared / tp + whole)
    tables = 203e9 if name == "deepseek-v4.1-flash" else 0
    assert abs(report["host_bytes"] - tables) < 0.01 * tables + 1


def test_inspect_prints_what_is_in_host_memory():
    result = run(app, ["inspect", "deepseek-v4.1-flash", "--tp", "8"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "engram_codes (host)" in result.stdout
    assert "5120x288 *" in result.stdout


@pytest.mark.parametrize("name", FAMILIES)
def test_demo_compares_with_someone_else(name):
    if name == "deepseek-v4-flash-tiny":
        pytest.importorskip("transformers", minversion="5.8.0")
    result = run(app, ["demo", "--model", name, "--tokens", "3", "--device", "host", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["agree"]
    assert report["tokens"]["mega"] == report["tokens"]["standard"]
    assert report["launches_per_token"]["mega"] == 1
    other = "transformers" if name == "deepseek-v4-flash-tiny" else "reference"
    assert report["tokens"][other] == report["tokens"]["standard"]
    assert report["max_logit_diff"] < 1e-4


def test_decode_says_which_path_ran(tiny_checkpoint):
    directory = tiny_checkpoint("deepseek-v4-flash-tiny")
    arguments = ["decode", str(directory), "--tokens", "1,2,3", "--max-new-tokens", "2", "--device", "host"]
    report = json.loads(run(app, [*arguments, "--max-model-len", "64", "--blocks", "3", "--json"]).stdout)
    assert report["metrics"]["mega_coverage"] == 1
    assert len(report["outputs"][0]["token_ids"]) == 2


def test_kernels_that_cannot_be_built():
    result = run(app, ["build", "deepseek-v4-flash", "--tensor-parallel-size", "3"])
    assert result.exit_code == 2
    assert "3 ranks cannot share this model evenly" in result.stderr
