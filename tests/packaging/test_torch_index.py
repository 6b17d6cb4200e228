import contextlib
import platform
import runpy
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "torch_index.py"


@pytest.fixture
def answer(monkeypatch, capsys):
    """What the script prints on Linux x86-64, given pip's configuration and what the index says."""

    def run(configured: str = "", reachable: bool = True) -> str:
        def urlopen(url, timeout):
            if not reachable:
                raise OSError("no route")
            return contextlib.nullcontext()

        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=configured))
        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        runpy.run_path(str(SCRIPT))
        return capsys.readouterr().out

    return run


def test_the_cpu_index_is_added_where_pip_has_no_index_of_its_own(answer):
    assert answer().startswith("--extra-index-url https://")


def test_a_configured_index_is_left_alone(answer):
    assert answer(configured="global.index-url='https://example.org/simple'") == ""


def test_an_index_that_does_not_answer_is_left_out(answer):
    assert answer(reachable=False) == ""
