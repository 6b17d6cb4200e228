"""`rocmega selftest` on the CPU target, and what it says of devices that do not do what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rocmega.cli.app import app
from rocmega.drivers.host import HostDriver
from rocmega.selftest import checks, models
from rocmega.selftest.handoff import KINDS, HandoffError, Handoffs, unit
from rocmega.selftest.report import Report, Result
from rocmega.selftest.soak import soak
from rocmega.toolchain import Artifact, Unit, compile

BLOCKS, ROUNDS = 4, 6


def broken(folder: Path, before: str, after: str) -> Artifact:
    """The kernel with a fault."""
    text = unit().source.read_text()
    assert before in text
    source = folder / "handoff.hip"
    source.write_text(text.replace(before, after))
    return compile(Unit("handoff", source, {}, {}), "host")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 5])
def test_hand_offs_pass_the_protocol_checker(kind, seed):
    driver = HostDriver(seed, check=True)
    run = Handoffs(driver).stress(kind, ROUNDS, blocks=BLOCKS)
    assert driver.last_report.reports == 0
    assert len(run.pairs) == 12  # every XCD to every other one
    assert sum(run.pairs.values()) == BLOCKS * ROUNDS


FAULTS = {
    "an old word": (
        "word_of(mine, tag, w), at",
        "word_of(mine, w == 77 && mine == 2 && round == 3 ? tag - 2 : tag, w), at",
        r"block \d \(XCD \d\) from block 2 \(XCD 2\), round 3, word 77: expected 0x[0-9a-f]{8}, saw 0x[0-9a-f]{8}, "
        r"which is round 1's: .*; 1 wrong words",
    ),
    "nothing": ("if (a->kind == RELEASED) store_plain", "if (a->kind == 9) store_plain", "which nobody wrote"),
    "a foreign word": ("u32 value = word_of(mine, tag, w)", "u32 value = 7", "no word of that block's"),
    "no flag": (
        "if (a->kind != TAGGED) s.announce(",
        "if (a->kind != TAGGED && mine != 1) s.announce(",
        r"gave up waiting.*round 0, waited for block 1's words: wanted tag 1, saw 0",
    ),
    "readers that are not done": (
        "publish(a->done + mine",
        "if (mine != 3) publish(a->done + mine",
        r"round 2, waited until every block had read: wanted tag 1, saw 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_fault_is_called(fault, tmp_path):
    before, after, message = FAULTS[fault]
    handoffs = Handoffs(HostDriver(watch=False), broken(tmp_path, before, after))
    handoffs.poll_limit = 2000
    with pytest.raises(HandoffError, match=message):
        handoffs.stress("released", ROUNDS, blocks=BLOCKS)


def test_the_command_writes_a_report_to_attach(tmp_path):
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["selftest", "--device", "host", "--json", "--soak", "12", "--report", str(file)])
    assert result.exit_code == 0, result.stdout
    report = json.loads(result.stdout)
    assert report == json.loads(file.read_text())
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert list(states) == list(checks.CHECKS)
    assert {name for name, state in states.items() if state == "skipped"} == {
        "bandwidth", "tiny model, bf16", "tiny model, fp8", "tiny model, mxfp4", "mid model, fp8",
    }  # fmt: skip
    assert set(states.values()) == {"ok", "skipped"}
    assert report["environment"]["arch"] == "host"
    assert report["environment"]["packages"]["torch"]
    assert any(finding["name"] == "CPU (host)" for finding in report["doctor"])
    [lost] = [check for check in report["checks"] if check["name"] == "lost layer"]
    assert "waited in stage" in lost["values"]["said"]


def test_a_check_that_fails_is_the_reports_content(monkeypatch, tmp_path):
    def fails(bench):
        raise checks.Unfit("It is too busy.")

    def ends(bench):
        return "fine", {}

    monkeypatch.setattr(checks, "CHECKS", {"first": fails, "second": ends})
    file = tmp_path / "report.txt"
    result = CliRunner().invoke(app, ["selftest", "--device", "host", "--report", str(file)])
    assert result.exit_code == 1
    text = file.read_text()
    assert text.startswith("rocmega selftest: FAILED")
    assert "[failed] first" in text
    assert "Unfit: It is too busy." in text
    assert "Traceback" in text
    assert "[ok] second" in text


def test_a_report_of_a_check_that_hangs():
    report = Report(results=[Result("first", "ok", "fine"), Result("second", "running", "did not end")])
    assert not report.passed
    assert "[running] second" in report.text()


class Flaky:
    """A mega-task whose answer changes at the n-th step."""

    def __init__(self, mega, at):
        self.mega, self.at, self.steps = mega, at, 0

    def decode(self, batch):
        result = self.mega.decode(batch)
        self.steps += 1
        if self.steps > self.at:
            result.logits[-1, 5] += 1e-6
        return result

    def close(self):
        self.mega.close()


@pytest.fixture(scope="module")
def subject():
    bench = checks.Bench(HostDriver())
    yield bench.tiny
    bench.close()


def test_a_bit_that_changes_is_found(subject, monkeypatch):
    make, steady = subject.make_mega, subject.mega()
    monkeypatch.setattr(subject, "make_mega", lambda **way: Flaky(make(**way), 1))
    with pytest.raises(models.ModelError, match=r"with 5 blocks, run 2 1 of 1536 logits have other bits.*token 5: "):
        models.same_bits(subject)
    monkeypatch.setattr(subject, "mega", lambda: Flaky(steady, 50))
    with pytest.raises(models.ModelError, match=r"step \d+, \d rows: 1 logits differ from the same step's before"):
        soak(subject, 300)


def test_a_lost_layer_that_nobody_notices_is_found(subject, monkeypatch):
    monkeypatch.setattr(models, "_error_of", lambda mega, batch: None)
    with pytest.raises(models.ModelError, match="layer 2 was left out, and the step ended without an error"):
        models.lost_layer(subject)
