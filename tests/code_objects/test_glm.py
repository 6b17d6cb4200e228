"""The mega-task at GLM-5.2's real dimensions, one rank of TP8, as compiled for MI300X and MI355X."""

from __future__ import annotations

from typing import Any

import pytest

from rocmega import inspect, toolchain
from rocmega.errors import ConfigError
from rocmega.models.glm import config, kernel, presets
from rocmega.models.glm.weights import Formats

LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
BF16 = {"gfx942": "v_mfma_f32_16x16x16_bf16", "gfx950": "v_mfma_f32_16x16x32_bf16"}
# Scalar registers that are parked in lanes of vector registers, one instruction to put and one to fetch. No more than
# eight vector registers' worth: some of what a stage finds when it begins, not of what its loops turn on.
PARKED = 8 * 64

# The last of each: whether it is the kernel of one row.
CASES = [
    ("gfx942", Formats("fp8_fnuz", "bf16"), "bf16", {}, False),
    ("gfx942", Formats("fp8_fnuz", "bf16"), "bf16", {}, True),
    ("gfx950", Formats("fp8", "bf16"), "bf16", {}, False),
    ("gfx950", Formats("fp8", "bf16"), "bf16", {}, True),
    ("gfx942", Formats("fp8_fnuz", "bf16", "mxfp4"), "fp8", {"v_mfma_f32_16x16x32_fp8_fp8"}, False),
    (
        "gfx950",
        Formats("fp8", "bf16", "mxfp4"),
        "fp8",
        {"v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_scale_f32_16x16x128_f8f6f4"},
        False,
    ),
]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].label}-a{case[2]}{'-row' * case[4]}"
)
def compiled(request: pytest.FixtureRequest) -> tuple[str, set[str], Any]:
    """Target, matrix instructions meant besides bf16's and f32's, and the report of the kernel."""
    target, formats, activations, meant, one_row = request.param
    if toolchain.search(target).found is None:
        pytest.skip(f"no compiler for {target}")
    glm = config.from_dict(presets.preset("glm-5.2"))
    unit = kernel.unit(glm, formats, target, tp=8, activations=activations, one_row=one_row)
    [report] = inspect.report(unit, target)
    return target, meant, report


def test_registers_and_lds(compiled: tuple[str, set[str], Any]) -> None:
    target, _, report = compiled
    assert report.name == kernel.KERNEL
    assert report.scratch_bytes == 0
    assert report.vgpr_spills == 0
    assert report.sgpr_spills <= PARKED
    assert report.lds_bytes <= LDS_BYTES[target]
    assert report.blocks_per_cu == 1
    assert report.waves_per_simd >= 1


def test_instructions(compiled: tuple[str, set[str], Any]) -> None:
    target, meant, report = compiled
    assert set(report.mfma) == {BF16[target], "v_mfma_f32_16x16x4_f32", *meant}
    assert report.flat_accesses == 0
    assert report.load_widths["global_load_dwordx4"] >= 40, "weights, cache entries and index keys come 16 bytes a lane"
    assert report.lds_widths["ds_read_b128"] >= 40, "so do activations"


def test_scoped_accesses(compiled: tuple[str, set[str], Any]) -> None:
    """Agent scope is sc1: pairs and flags are 8 bytes, bulk data 4 and 8; weights are streamed past the caches."""
    _, _, report = compiled
    scoped = report.scoped
    for access in ("global_load_dwordx2 sc1", "global_store_dwordx2 sc1", "global_store_dword sc1", "buffer_inv sc1"):
        assert scoped.get(access), f"no {access}"
    assert scoped.get("global_load_dwordx4 nt"), "no streamed loads"
    assert report.wbl2 >= 1
    assert report.wbl2_waited == report.wbl2, report.unwaited_lines


def test_what_ranks_write_for_each_other_has_system_scope(compiled: tuple[str, set[str], Any]) -> None:
    """System scope is sc0 sc1: shares and candidates are pushed and polled as 8 bytes, alarms as 4."""
    scoped = compiled[2].scoped
    assert scoped.get("global_store_dwordx2 sc0 sc1", 0) >= 2 * 3 + 2, (
        "two channels a push, in three stages; candidates"
    )
    assert scoped.get("global_load_dwordx2 sc0 sc1", 0) >= 8 + 2 * 8, "a share of each rank, a candidate's two words"
    assert scoped.get("global_store_dword sc0 sc1", 0) >= 1
    assert scoped.get("global_load_dword sc0 sc1", 0) >= 1


def test_what_cannot_be_compiled_is_refused_first() -> None:
    glm = config.from_dict(presets.preset("glm-5.2"))
    with pytest.raises(ConfigError, match="Pack the checkpoint for gfx942"):
        kernel.unit(glm, Formats("fp8", "bf16"), "gfx942", activations="fp8")
    with pytest.raises(ConfigError, match="no instructions for matrices in fp8_32: scales of 32x32 blocks"):
        kernel.unit(glm, Formats("fp8_32", "bf16"), "gfx950", tp=2)
    with pytest.raises(ConfigError, match="dense layers"):
        kernel.unit(glm, Formats("bf16", "bf16", "mxfp4", "mxfp4"), "gfx950")
    with pytest.raises(ConfigError, match="num_attention_heads 64 is not divisible by 3 ranks"):
        kernel.unit(glm, Formats("fp8", "bf16"), "gfx950", tp=3)
