"""Every example runs as it is, without a GPU, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "generate": [r"\[9, 2, 6\] -> \[(\d+, ){7}\d+\] length", r"100% of the tokens by the mega-task"],
    "stream": [r"(token \d+, log probability -\d+\.\d{3}\n){12}"],
    "own_batching": [r"first: \[(\d+, ){5}\d+\] length", r"late: \[(\d+, ){2}\d+\] abort", r"PageUse\(.*held=0"],
    "coroutines": [r"\[5, 6\] -> \[(\d+, ){3}\d+\]", r"\{'mega': \d+, 'fused': 0, 'standard': 0\}"],
}


def test_no_example_is_forgotten():
    assert {file.stem for file in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name, tmp_path):
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for pattern in SAYS[name]:
        assert re.search(pattern, done.stdout), done.stdout
