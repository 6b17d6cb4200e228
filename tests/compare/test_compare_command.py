"""The two ways to call the comparison, and what is not needed for it."""

import json
import subprocess
import sys

ARGUMENTS = ["--layers", "2", "--rows", "1", "--contexts", "12", "--steps", "1", "--rounds", "1", "--device", "host"]
WITHOUT = """
import sys
for name in ("rich", "typer", "matplotlib"):
    sys.modules[name] = None
sys.argv[1:] = {arguments!r}
from rocmega.compare.command import main
main()
"""


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)


def test_without_rich_and_typer(tmp_path):
    file = tmp_path / "out.json"
    result = run("-c", WITHOUT.format(arguments=[*ARGUMENTS, "--json", str(file)]))
    assert result.returncode == 0, result.stderr
    assert "rich is not installed" in result.stderr
    assert "1 row, context 12" in result.stdout
    assert [row["arm"] for row in json.loads(file.read_text())["rows"]] == ["standard", "mega"]


def test_a_plot_without_matplotlib_is_refused_before_anything_runs():
    result = run("-c", WITHOUT.format(arguments=[*ARGUMENTS, "--plot", "a.png"]))
    assert result.returncode == 2
    assert "pip install 'rocmega[plot]'" in result.stderr


def test_the_command_of_the_command_line(tmp_path):
    trace = tmp_path / "trace.json"
    result = run("-m", "rocmega", "compare", *ARGUMENTS, "--json", "-", "--blocks", "3", "--timeline", str(trace))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["about"]["layers"] == 2
    assert report["timeline"]["blocks"] == 3
    assert "waits longest" in report["timeline"]["diagnosis"]
    assert {event["tid"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"} == {0, 1, 2}


def test_the_module_is_the_same_command():
    result = run("-m", "rocmega.compare", "--help")
    assert result.returncode == 0
    assert "--loopback" in result.stdout
    assert result.stdout == run("-m", "rocmega", "compare", "--help").stdout
