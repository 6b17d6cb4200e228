"""Stamps of a whole step: complete, in order, and nothing that the same kernel without them would notice."""

import dataclasses
import itertools
import re

import pytest
import torch

from rocmega import descriptor
from rocmega.compare import Options
from rocmega.compare.subject import Subject
from rocmega.errors import RequestError
from rocmega.models.glm import flow, kernel, traffic
from rocmega.packing.traffic import read_bytes
from rocmega.step import StepBatch
from rocmega.timeline import Timeline
from rocmega.toolchain import assembly
from rocmega.toolchain.unit import hip_dir

BLOCKS, ROWS, CONTEXT, LAYERS = 3, 2, 70, 5


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.open(Options(layers=LAYERS, rows=(ROWS,), contexts=(CONTEXT,), device="host", blocks=BLOCKS))


@pytest.fixture(scope="module")
def batch(subject) -> StepBatch:
    return subject.batch(ROWS, CONTEXT)


@pytest.fixture(scope="module")
def stamped(subject, batch) -> tuple[Timeline, torch.Tensor]:
    mega = subject.mega_with_timeline()
    logits = mega.decode(batch).logits.clone()
    made = mega.timeline()
    mega.close()
    return made, logits


def test_stamps_change_no_bit(subject, batch, stamped):
    assert torch.equal(subject.mega().decode(batch).logits, stamped[1])


def test_every_task_is_there_once(subject, stamped):
    config, timeline = subject.model.config, stamped[0]
    seen = [(task.stage, task.layer, task.number) for task in timeline.tasks]
    output = [number for stage, layer, number in seen if (stage, layer) == ("output", 2)]
    # A run's number is that of the last which its block had begun when it ended, so they are counted, not listed. A
    # block of three gets six or five of 16 tasks, in runs of three.
    assert len(output) == 6
    full = [layer for layer in range(LAYERS) if config.full_index[layer]]
    assert sorted({layer for stage, layer, _ in seen if stage == "select"}) == full
    assert sum(stage == "select" for stage, *_ in seen) == ROWS * len(full)
    assert sum(stage == "cache_entry" for stage, *_ in seen) == ROWS * LAYERS
    assert sum(stage == "head" for stage, *_ in seen) == config.vocab_size // 16
    assert [layer for stage, layer, _ in seen if stage == "sample"] == [LAYERS]
    assert {layer for stage, layer, _ in seen if stage == "embed"} == {-1}


def test_times_are_in_order(stamped):
    timeline = stamped[0]
    assert timeline.unit == "turns"
    assert timeline.truncated == 0
    for block in range(BLOCKS):
        mine = [task for task in timeline.tasks if task.block == block]
        assert len(mine) > 100
        for task in mine:
            assert 0 <= task.begin <= task.input <= task.end <= timeline.length
        for before, after in itertools.pairwise(mine):
            assert before.end <= after.end
            if (before.stage, before.layer) == (after.stage, after.layer):
                assert before.end <= after.begin


def test_inputs_are_there_when_their_producers_have_ended(stamped):
    """The order that the data give: nobody has an input whose maker has not begun."""
    timeline = stamped[0]
    begun = {}
    for task in timeline.tasks:
        key = (task.stage, task.layer)
        begun[key] = min(begun.get(key, task.begin), task.begin)
    for task in timeline.tasks:
        for stage, by in flow.PRODUCERS[task.stage]:
            if (stage, task.layer + by) in begun:
                assert task.end >= begun[stage, task.layer + by], task


def test_the_table_accounts_for_every_byte_and_task(subject, stamped):
    timeline = stamped[0]
    reads = subject.stage_reads(ROWS, CONTEXT)
    rows = timeline.stages(reads, 1e12)
    assert sum(row.tasks for row in rows) == len(timeline.tasks)
    counted = traffic.cache_reads(subject.model.config, subject.model.weights.formats, CONTEXT)
    weights = sum(read_bytes(field, ROWS) for field in subject.model.fields)
    assert sum(reads.values()) == pytest.approx(weights + ROWS * sum(counted.values()))
    assert {row.stage: row.bytes for row in rows if row.bytes is not None} == reads
    assert all(row.bandwidth is None for row in rows)  # turns are no time
    assert 0 < sum(sum(row.share) for row in rows) <= 1
    assert "turns a task" in timeline.diagnosis(flow.PRODUCERS)


def test_a_path_without_stamps_has_none(subject):
    with pytest.raises(RequestError, match="timeline=True"):
        subject.mega().timeline()


def test_every_stage_is_known():
    stages = [name.lower() for name in descriptor.load(kernel.FOLDER / "stages.h").enums["Stage"]]
    assert set(stages) <= set(flow.PRODUCERS)
    assert set(flow.FIELDS) <= set(flow.PRODUCERS)


def test_every_field_is_read_by_one_stage(subject):
    names = [name for names in flow.FIELDS.values() for name in names]
    assert len(names) == len(set(names))
    assert {field.name.rsplit(".", 1)[-1] for field in subject.model.fields} <= set(names)


@pytest.mark.slow
def test_off_it_costs_nothing(subject):
    """The code for gfx950 with stamps left out is that of a source which knows no stamps."""
    off, on = (
        kernel.unit(subject.model.config, subject.model.weights.formats, "gfx950", timeline=timeline)
        for timeline in (False, True)
    )
    step = (hip_dir() / "handoff" / "step.h").read_text()
    without = re.sub(r"^.*timeline\.stamp\(.*$", "", re.sub(r"\{ timeline\.stamp\(.*\); \}", "{}", step), flags=re.M)
    assert without.count("timeline.stamp") == 0 < step.count("timeline.stamp")
    blind = dataclasses.replace(off, headers={**off.headers, "handoff/step.h": without})
    code = {
        name: instructions(assembly(unit, "gfx950")) for name, unit in {"off": off, "on": on, "blind": blind}.items()
    }
    assert code["off"] == code["blind"]
    assert code["off"] != code["on"]


def instructions(text: str) -> list[str]:
    """Without comments and debug directives, which name files and lines."""
    lines = (line.split(";")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith((".file", ".loc", ".ident"))]
