"""What the compiler made of the primitives for AMD: cache bits, waits, widths. No run shows a dropped wait."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from rocmega.toolchain import Unit, assembly, search
from tests.platform.kit import unit

ARCHES = ("gfx942", "gfx950")
STAGE = Path(__file__).parents[2] / "examples" / "checked_stage" / "normalize.hip"
pytestmark = pytest.mark.skipif(search("gfx942").found is None, reason="no compiler for AMD GPUs")


@cache
def kernels(arch: str) -> dict[str, list[str]]:
    """Instructions of each kernel, one a line, without comments."""
    found: dict[str, list[str]] = {}
    pattern = r"^(\w+):\s*; @\1\n(.*?)^\.Lfunc_end"
    for name, body in re.findall(pattern, assembly(unit(), arch), re.DOTALL | re.MULTILINE):
        lines = [line.split(";")[0].strip() for line in body.splitlines()]
        found[name] = [" ".join(line.split()) for line in lines if re.match(r"[a-z]\w+($| )", line)]
    return found


def accesses(lines: list[str], kind: str) -> list[str]:
    return [line for line in lines if re.match(rf"(global|flat|buffer)_{kind}", line)]


def bits(line: str) -> set[str]:
    return {word for word in line.split() if word in ("sc0", "sc1", "nt")}


@pytest.mark.parametrize("arch", ARCHES)
def test_no_scratch_and_no_flat(arch: str) -> None:
    assert len(kernels(arch)) == 14
    for name, lines in kernels(arch).items():
        assert not [line for line in lines if re.match(r"(flat|scratch)_", line)], name
    assert not re.search(r"\.(private_segment_fixed_size|\w+_spill_count):\s+[1-9]", assembly(unit(), arch))


@pytest.mark.parametrize("arch", ARCHES)
def test_subnormals_are_kept(arch: str) -> None:
    """FP8 is widened by a multiplication that begins with subnormal floats."""
    text = assembly(unit(), arch)
    assert set(re.findall(r"float_denorm_mode_32 (\d)", text)) == {"3"}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("scope", "wanted", "widest"),
    [("plain", set(), "x4"), ("device", {"sc1"}, "x2"), ("system", {"sc0", "sc1"}, "x2")],
)
def test_scopes(arch: str, scope: str, wanted: set[str], widest: str) -> None:
    lines = kernels(arch)[f"copy_{scope}"]
    for kind in ("load", "store"):
        found = accesses(lines, kind)
        assert len(found) == (3 if scope == "plain" else 4)
        assert all(bits(line) == wanted for line in found), found
        assert any(re.match(rf"global_{kind}_dword{widest} ", line) for line in found)


@pytest.mark.parametrize("arch", ARCHES)
def test_pairs_and_flags_are_single_accesses(arch: str) -> None:
    lines = kernels(arch)["hand_over"]
    flag_stores = accesses(lines, "store_dwordx2")
    assert len(flag_stores) == 2
    assert all(bits(line) == {"sc1"} for line in flag_stores)
    polls = accesses(lines, "load_dwordx2")
    assert polls
    assert all(bits(line) == {"sc1"} for line in polls)


@pytest.mark.parametrize("arch", ARCHES)
def test_release_is_waited_for(arch: str) -> None:
    """clang 22 drops the wait after a write-back that follows a drain; the flag would overtake the data."""
    lines = kernels(arch)["hand_over"]
    at = [i for i, line in enumerate(lines) if line.startswith("buffer_wbl2")]
    assert [bits(lines[i]) for i in at] == [{"sc1"}, {"sc0", "sc1"}]
    for i in at:
        assert lines[i + 1] == "s_waitcnt vmcnt(0)"
    first_flag = next(i for i, line in enumerate(lines) if line.startswith("global_store_dwordx2"))
    assert at[0] < first_flag < at[1]
    drained = [i for i, line in enumerate(lines) if re.match(r"s_waitcnt vmcnt\(0\)", line) and i < at[0]]
    barrier = next(i for i, line in enumerate(lines) if line == "s_barrier")
    assert [i for i in drained if i < barrier], "no drain before the barrier"


@pytest.mark.parametrize("arch", ARCHES)
def test_acquire(arch: str) -> None:
    lines = kernels(arch)["hand_over"]
    at = [i for i, line in enumerate(lines) if line.startswith("buffer_inv")]
    assert [bits(lines[i]) for i in at] == [{"sc1"}, {"sc0", "sc1"}]
    plain = [i for i, line in enumerate(lines) if line.startswith("global_load_dword ") and not bits(line)]
    assert plain
    assert at[0] < plain[0]


@pytest.mark.parametrize("arch", ARCHES)
def test_what_only_the_checker_reads_costs_nothing(arch: str, tmp_path: Path) -> None:
    """The assembly stays the same, to the letter, without the marks and the epochs of untagged data."""
    text = STAGE.read_text()
    bare, marks = re.subn(r"(?m)^ *mark\(.*\n", "", text)
    bare, epochs = re.subn(r"((?:load|store)_(?:plain|device)\(.*), a\.epoch\)", r"\1, 0u)", bare)
    assert (marks, epochs) == (2, 3)
    (tmp_path / STAGE.name).write_text(bare)
    with_both, without = (assembly(Unit("stage", path), arch) for path in (STAGE, tmp_path / STAGE.name))
    assert "s_barrier" in with_both
    assert with_both == without


@pytest.mark.parametrize("arch", ARCHES)
def test_streams(arch: str) -> None:
    lines = kernels(arch)["streams"]
    assert [bits(line) for line in accesses(lines, "load_dwordx4")] == [{"nt"}]
    assert any(line.startswith("global_atomic_cmpswap") for line in lines)


@pytest.mark.parametrize("arch", ARCHES)
def test_lds(arch: str) -> None:
    text = "\n".join(kernels(arch)["lds_ops"])
    for name in ("ds_add_u32", "ds_or_b32", "ds_read_b128", "s_barrier"):
        assert re.search(rf"^{name}\b", text, re.MULTILINE), name


@pytest.mark.parametrize("arch", ARCHES)
def test_matrix_instructions(arch: str) -> None:
    text = "\n".join(kernels(arch)["tiles"])
    bf16 = "v_mfma_f32_16x16x32_bf16" if arch == "gfx950" else "v_mfma_f32_16x16x16_bf16"
    for name in ("v_mfma_f32_16x16x4_f32", "v_mfma_f32_16x16x32_fp8_fp8", bf16):
        assert name in text
    assert ("v_cvt_scalef32_pk_bf16_fp8" in text) == (arch == "gfx950")
