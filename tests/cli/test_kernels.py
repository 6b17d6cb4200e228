"""build, inspect and doctor: what they print. What they find is tested where it is found."""

import json

import pytest
from typer.testing import CliRunner

from rocmega.cli.app import app

run = CliRunner().invoke


def test_build_for_the_host(tiny, tmp_path):
    result = run(app, ["build", str(tiny), "--arch", "host", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    [artifact] = report["artifacts"]
    assert artifact["target"] == "host"
    assert artifact["compiler"]
    assert artifact["path"].startswith(str(tmp_path))
    assert list(tmp_path.rglob("*.so"))


def test_build_shows_a_table(tiny):
    result = run(app, ["build", str(tiny), "--arch", "host"])
    assert result.exit_code == 0, result.output
    assert "host" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "no-such-model"], "no-such-model"),
        (["build", "--arch", "gfx90a"], "gfx90a"),
        (["build", "glm-5.2", "--format", "int3"], "int3"),
        (
            ["build", "glm-5.2-tiny", "--arch", "host", "--tensor-parallel-size", "3"],
            "3 ranks cannot share this model evenly",
        ),
        (["inspect", "--arch", "host"], "host"),
        (["inspect", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_arguments_exit_2(arguments, message):
    result = run(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_no_compiler_at_all_exits_2(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCMEGA_HOSTCXX", "/nowhere/c++")
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path))
    result = run(app, ["build", "--arch", "host"])
    assert result.exit_code == 2
    assert "/nowhere/c++" in result.stderr


def test_inspect_prints_the_named_fields(monkeypatch):
    """The compiler is slow on the real dimensions: the reports come from elsewhere here."""
    from rocmega.inspect import KernelReport

    asked = []

    def report(unit, target, progress):
        asked.append((unit.name, target))
        return [KernelReport(name="glm_decode", arch=target, vgpr=96, mfma={"v_mfma_f32_16x16x32_bf16": 2})]

    monkeypatch.setattr("rocmega.inspect.report", report)
    result = run(app, ["inspect", "--arch", "gfx942", "--json"])
    assert result.exit_code == 0, result.output
    [kernel] = json.loads(result.stdout)["kernels"]
    named = "name arch vgpr agpr sgpr lds_bytes scratch_bytes vgpr_spills sgpr_spills waves_per_simd mfma load_widths"
    assert {*named.split(), "code_bytes"} <= set(kernel)
    assert asked == [("glm-fp8_fnuz-bf16-abf16-tp8", "gfx942")]
    result = run(app, ["inspect", "--model", "glm-5.2-tiny"])
    assert result.exit_code == 0, result.output
    assert "glm_decode" in result.stdout
    assert asked[1] == ("glm-f32-f32-af32-tp1", "gfx950")


def test_doctor_names_what_it_looked_for():
    result = run(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert json.loads(result.stdout)["findings"]
    assert "PyTorch" in run(app, ["doctor"]).stdout
