"""The mega-task at the real dimensions of DeepSeek-V4-Flash, as compiled for MI300X and MI355X."""

from __future__ import annotations

from typing import Any

import pytest

from rocmega import inspect, toolchain
from rocmega.models.deepseek import config, kernel, presets
from rocmega.models.deepseek.weights import Formats
from tests.code_objects.test_glm import BF16, LDS_BYTES, PARKED

# V4.1 is not among them: without scratch or spilled vector registers it parks 616 scalar ones (gfx942), more than
# PARKED, and 497 (gfx950).
CASES = [
    ("deepseek-v4-flash", "gfx942", 1, Formats("fp8_fnuz", "bf16", "mxfp4")),
    ("deepseek-v4-flash", "gfx950", 2, Formats("fp8", "bf16", "mxfp4")),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-tp{case[2]}")
def compiled(request: pytest.FixtureRequest) -> tuple[str, int, Any]:
    """Target, ranks, and the report of the kernel."""
    name, target, tp, formats = request.param
    if toolchain.search(target).found is None:
        pytest.skip(f"no compiler for {target}")
    model = config.from_dict(presets.preset(name))
    [report] = inspect.report(kernel.unit(model, formats, target, tp), target)
    return target, tp, report


def test_registers_and_lds(compiled: tuple[str, int, Any]) -> None:
    target, _, report = compiled
    assert report.name == kernel.KERNEL
    assert report.scratch_bytes == 0
    assert report.vgpr_spills == 0
    assert report.sgpr_spills <= PARKED
    assert report.lds_bytes <= LDS_BYTES[target]
    assert report.blocks_per_cu == 1


def test_instructions(compiled: tuple[str, int, Any]) -> None:
    target, tp, report = compiled
    assert set(report.mfma) == {BF16[target], "v_mfma_f32_16x16x4_f32"}
    assert report.flat_accesses == 0
    assert report.scoped.get("global_load_dwordx4 nt"), "no streamed loads"
    assert report.wbl2 >= 1
    assert report.wbl2_waited == report.wbl2, report.unwaited_lines
    assert bool(report.scoped.get("global_store_dwordx2 sc0 sc1")) == (tp > 1), "what ranks push has system scope"
