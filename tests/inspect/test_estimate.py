"""The static estimate, on loops whose every wait is known."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rocmega import toolchain
from rocmega.cli.app import app
from rocmega.inspect.estimate import DEVICES, estimate
from rocmega.inspect.streams import ISSUE_CYCLES, streams

MFMA = "v_mfma_f32_16x16x32_bf16 v[4:7], v[10:13], v[22:25], v[4:7]"


def loop(turn: list[str], label: str = ".LBB0_1") -> str:
    return "\n".join([f"{label}:", *(f"\t{line}" for line in turn), f"\ts_cbranch_scc1 {label}", ""])


def streaming(ahead: int) -> list[str]:
    """A unit of 1 KB is used and the next one asked for, with so many left on their way."""
    return [f"s_waitcnt vmcnt({ahead})", MFMA, "global_load_dwordx4 v[10:13], v[2:3], off nt"]


@pytest.mark.parametrize("ahead", [0, 1, 3, 7])
def test_a_wait_for_fewer_loads_keeps_more_in_flight(ahead):
    [found] = streams(loop(streaming(ahead)))
    latency = 8000.0
    cycles, most = found.turn_cycles(latency)
    assert most == 1024 * (ahead + 1)
    # Within a latency, as many units as are on their way; and the instructions after the load that is waited for.
    assert cycles == pytest.approx(latency / (ahead + 1), rel=0.01)
    assert found.issue_cycles() == 4 * ISSUE_CYCLES
    assert (found.weights, found.bytes, found.waits) == ("bf16", 1024, (ahead,))


def test_the_matrix_unit_is_waited_for():
    [found] = streams(loop(["s_waitcnt vmcnt(0)", *[MFMA] * 8, "global_load_dwordx4 v[10:13], v[2:3], off nt"]))
    assert found.issue_cycles() == 8 * 16  # each for 16 cycles; the others issue beside it


@pytest.mark.parametrize(
    ("turn", "weights"),
    [
        ([*streaming(1), "v_cvt_scalef32_pk_bf16_fp8 v1, v2, 1.0"], "narrow"),
        (["s_waitcnt vmcnt(1)", MFMA.replace("32x32", "16x32").replace("16x16x32_bf16", "16x16x4_f32"),
          "global_load_dwordx4 v[10:13], v[2:3], off nt"], "exact"),
    ],
)  # fmt: skip
def test_kinds_of_weights(turn, weights):
    [found] = streams(loop(turn))
    assert found.weights == weights


def test_only_innermost_loops_that_stream_weights_count():
    inner = loop(streaming(1), ".LBB0_2")
    other = loop(["global_load_dwordx4 v[10:13], v[2:3], off", "s_waitcnt vmcnt(0)", MFMA], ".LBB0_3")  # not streamed
    outer = loop(["s_nop 0", *inner.splitlines(), *other.splitlines()], ".LBB0_1")
    [found] = streams(outer)
    assert outer.splitlines()[found.lines[0] - 1].strip() == "s_waitcnt vmcnt(1)"


def test_littles_law_and_the_slowest_loop():
    code = loop(streaming(0), ".LBB0_1") + loop(streaming(7), ".LBB0_2")
    found = estimate(streams(code), "gfx950", {"head": 8e6, "attend": 1e6}, {"head": "bf16"}, 2, 1000.0)
    slow, fast = found.loops
    assert slow.wanted == fast.wanted == 31250  # bytes that a 256th of 8 TB/s brings in 1,000 ns
    assert (slow.in_flight, fast.in_flight) == (4096, 8 * 4096)
    assert slow.rate == pytest.approx(4.096, rel=0.02)
    assert fast.rate == pytest.approx(8 * 4.096, rel=0.02)
    head, attend = found.stages
    assert head.memory_us == pytest.approx(0.5)  # 4 MB a layer
    assert head.code_us == pytest.approx(4e3 / (slow.rate * DEVICES["gfx950"].units))
    assert attend.code_us is None


def test_the_command(monkeypatch):
    monkeypatch.setattr(toolchain, "assembly", lambda unit, target: loop(streaming(3)))
    run = CliRunner().invoke
    result = run(app, ["inspect", "--model", "glm-5.2-tiny", "--estimate", "--arch", "gfx942", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["device"]["name"] == "MI300X"
    assert {stage["stage"] for stage in report["stages"]} >= {"down", "gate_up", "head"}
    shown = run(app, ["inspect", "--model", "glm-5.2-tiny", "--estimate"])
    assert "MI355X" in shown.stdout
    refused = run(app, ["inspect", "--estimate", "--arch", "sm_90"])
    assert refused.exit_code == 2
    assert "gfx942 and gfx950" in refused.stderr
