"""The fused kernels compiled for AMD at GLM-5.2's dimensions, a rank of eight: nothing of them ran there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton")

STREAMING = ("latents", "queries", "absorbed", "add_linear", "gate_up", "down", "router", "head")
OTHERS = ("embed", "attend", "merge", "route", "index_scores", "count_next", "count_taken", "collect")
# The matrix units' loop takes Triton ten seconds where a kernel has four of them: a choice of kernels.
CASES = {
    "gfx942, one row": ("gfx942", "fp8", 1, (*STREAMING, *OTHERS)),
    "gfx950, rows": ("gfx950", "mxfp4", 8, ("add_linear", "gate_up", "down", "attend")),
}
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}


def compiled(arch: str, format: str, rows: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fused.compiled", arch, format, str(rows), *names]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_compiles_for_amd(case: str) -> None:
    arch, format, rows, names = CASES[case]
    kernels = compiled(arch, format, rows, names)
    assert {kernel["kernel"] for kernel in kernels} == set(names)
    for kernel in kernels:
        assert kernel["scratch"] == 0, kernel
        assert kernel["lds"] <= LDS[arch], kernel
        if kernel["kernel"] in STREAMING:
            assert kernel["wide_loads"] > 0, kernel
            assert (kernel["matrix_instructions"] > 0) == (rows > 1), kernel
