"""`rocmega compare` of DeepSeek on the CPU target: every arm is judged by all that this family chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rocmega.compare import Options, arms, measure
from rocmega.compare.report import Report
from rocmega.compare.subject import Subject
from rocmega.models.deepseek import config as deepseek_config
from rocmega.models.deepseek import presets, shard
from rocmega.models.deepseek.engram import NgramHash

# As many layers as there are of V4.1 until a selection is bound to candidates; more entries than fit in either.
SHARD = Options(
    "deepseek-v4.1-flash-tiny",
    tp=2,
    rank=1,
    loopback=True,
    layers=9,
    rows=(2,),
    contexts=(70,),
    steps=1,
    rounds=1,
    device="host",
)


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(dataclasses.replace(SHARD, arms=("standard", "mega", "mega-alone")))


def test_every_arm_passes(report: Report) -> None:
    for row in report.rows:
        assert row.reason is None, row.details
        assert row.verdict is not None
        assert row.verdict.worst is not None
        assert row.verdict.worst < 1e-5  # float32 sums in another order
        assert row.verdict.agree == row.verdict.judged
    launches = {row.arm: row.launches[0] for row in report.rows if row.launches}
    assert launches["mega"] == launches["mega-alone"] == 1


@pytest.mark.parametrize("model", ["deepseek-v4-flash-tiny", SHARD.model])
def test_the_mega_task_tells_what_it_chose(model: str) -> None:
    """In float32 both paths choose the same."""
    options = SHARD if model == SHARD.model else Options(model, rows=(2,), contexts=(70,), device="host")
    subject = Subject.open(options)
    batch, path = subject.batch(2, 70), subject.standard()
    made = path.record()
    path.run(*path.place(batch), made)
    picks, _ = subject.mega_picks(batch)
    assert len(picks.experts) == len(made.experts) > 2
    assert all(torch.equal(*pair) for pair in zip(picks.experts, made.experts, strict=True))
    for kind in ("entries", "candidates"):
        mine, theirs = ([each for each in getattr(of, kind) if each is not None] for of in (picks, made))
        assert (kind, len(mine) > 0) in (("entries", True), ("candidates", subject.model.config.candidates is not None))
        for (numbers, valid), (others, others_valid) in zip(mine, theirs, strict=True):
            assert torch.equal(numbers[valid], others[others_valid])
    subject.close()


def _lowest(choose: Callable[..., Any]) -> Callable[..., Any]:
    """A choice by scores that takes the worst in place of the best."""
    return lambda scores, counts: choose(-scores, counts)


@pytest.mark.parametrize("choice", ["_take", "_candidates"])
def test_an_arm_that_chooses_badly(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic is right for what it chose."""

    def prepare(subject: Subject, batch: Any) -> arms.Step:
        path = subject.standard()
        setattr(path, choice, _lowest(getattr(path, choice)))
        return arms.StandardStep(path, batch)

    monkeypatch.setitem(arms.ARMS, "other", arms.Arm("faulty", prepare))
    good, bad = measure(dataclasses.replace(SHARD, arms=("standard", "other"))).rows
    assert good.reason is None
    assert bad.reason is not None
    assert "it chose experts or positions that others beat by" in bad.reason


@pytest.fixture
def published() -> Any:
    return deepseek_config.from_dict(presets.preset("deepseek-v4.1-flash"))


def test_tables_that_no_gpu_holds_are_short_and_said_to_be(published: Any) -> None:
    short, note = shard.measurable(published)
    assert "not 384,006,168 in the host's" in note
    assert short.engram.columns == published.engram.columns
    assert 50 << 20 < short.engram.rows[0] * short.engram.head_dim < 4 << 30  # more than caches hold
    last = NgramHash(short.engram, 14, torch.device("cpu"))
    assert int(last.offsets.flatten()[-1] + last.heights.flatten()[-1]) == short.engram.rows[1]
    tiny = deepseek_config.from_dict(presets.preset("deepseek-v4.1-flash-tiny"))
    assert shard.measurable(tiny) == (tiny, "")


def test_first_layers_have_their_own_tables(published: Any) -> None:
    assert shard.first_layers(published, 1).engram is None
    first = shard.first_layers(published, 4).engram
    assert first.layers == (1,)
    whole, cut = (NgramHash(engram, 1, torch.device("cpu")) for engram in (published.engram, first))
    assert torch.equal(whole.heights, cut.heights)
    assert whole.multipliers == cut.multipliers
