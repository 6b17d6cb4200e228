"""The hand-offs and a step of a tiny model under NVIDIA's compute-sanitizer; docs/selftest.md says what it can see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rocmega.drivers.select import kind_for
from tests.conftest import ROOT

SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path=str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
)
pytestmark = [
    pytest.mark.skipif(kind_for() != "cuda", reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is neither on the PATH nor in $CUDA_HOME/bin"),
]

# Few blocks: a tool makes every access some hundred times slower, and all blocks wait for each other.
HANDOFFS = """
from rocmega.drivers.select import pick
from rocmega.selftest.handoff import KINDS, Handoffs
handoffs = Handoffs(pick("cuda"), seconds=60.0)
for kind in KINDS:
    handoffs.stress(kind, 4, blocks=4)
handoffs.exchange(300, 3, blocks=4)
"""
MODEL = """
from rocmega.compare import Options
from rocmega.compare.subject import Subject
subject = Subject.open(Options("glm-5.2-tiny", format="fp8", layers=4, rows=(3,), contexts=(70,), device="cuda"))
mega = subject.make_mega(blocks=4)
for _ in range(2):
    print(mega.decode(subject.batch(3, 70)).tokens.tolist())
"""


# Kernels by name: torch's own are not ours to judge, and take long.
PROGRAMS = {"stress": HANDOFFS, "exchange": HANDOFFS, "glm_decode": MODEL}


@pytest.mark.parametrize("kernel", PROGRAMS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str, kernel: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--kernel-name", f"kernel_substring={kernel}", "--error-exitcode", "9"]
    command += [sys.executable, "-c", PROGRAMS[kernel]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    print(done.stdout[-3000:], done.stderr[-3000:])
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device here, as in some virtual machines")
    assert done.returncode == 0
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout
