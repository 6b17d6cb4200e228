"""Stamps to tasks, tables and traces, on stamps made by hand."""

import json

import pytest
import torch

from rocmega.errors import RequestError
from rocmega.timeline import BEGIN, END, INPUT, Timeline, read

STAGES = ("make", "use")
EPOCH, LAYERS = 100, 2
MAKE, USE = 0, 1
PRODUCERS = {"use": (("make", 0),)}


def timeline(*blocks, capacity: int = 32, arch: str = "sm_90") -> Timeline:
    """Blocks of stamps (time, version, stage, task, moment); sm_90 has 1000 ticks in a microsecond."""
    records = torch.zeros(len(blocks), capacity, 4, dtype=torch.int32)
    for block, stamps in enumerate(blocks):
        for at, (time, version, stage, task, moment) in enumerate(stamps[:capacity]):
            time = (time + (1 << 31)) % (1 << 32) - (1 << 31)
            records[block, at] = torch.tensor([time, EPOCH + version, stage, task * 4 + moment], dtype=torch.int32)
    made = torch.tensor([len(stamps) for stamps in blocks], dtype=torch.int32)
    return read(records, made, stages=STAGES, epoch=EPOCH, layers=LAYERS, arch=arch)


def times(line: Timeline) -> list[tuple]:
    return [(t.block, t.stage, t.layer, t.begin, t.input, t.end) for t in line.tasks]


ONE = [(5000, 1, MAKE, 0, BEGIN), (6000, 1, MAKE, 0, INPUT), (9000, 1, MAKE, 0, END)]
TWO = [(7000, 1, USE, 0, BEGIN), (10_500, 1, USE, 0, INPUT), (12_000, 1, USE, 0, END)]


def test_times_begin_at_the_first_stamp_and_are_microseconds():
    line = timeline(ONE, TWO)
    assert times(line) == [(0, "make", 0, 0.0, 1.0, 4.0), (1, "use", 0, 2.0, 5.5, 7.0)]
    assert (line.length, line.unit) == (7.0, "us")


def test_turns_of_the_cpu_target_are_no_time():
    line = timeline(ONE, arch="host")
    assert (line.length, line.unit) == (4000, "turns")


@pytest.mark.parametrize("start", [(1 << 31) - 6000, (1 << 32) - 6000])
def test_a_clock_word_that_comes_round(start):
    shifted = [(start + time, *rest) for time, *rest in ONE]
    assert times(timeline(shifted, [(start + time, *rest) for time, *rest in TWO])) == times(timeline(ONE, TWO))


def test_a_task_may_begin_before_the_one_before_it_has_ended():
    """As linear maps do, to have its weights on their way; the end then carries the later task's number."""
    line = timeline(
        [
            (0, 1, MAKE, 0, BEGIN),
            (1000, 1, MAKE, 0, INPUT),
            (2000, 1, MAKE, 3, BEGIN),
            (3000, 1, MAKE, 3, END),
            (5000, 1, MAKE, 3, END),
        ]
    )
    assert times(line) == [(0, "make", 0, 0.0, 1.0, 3.0), (0, "make", 0, 3.0, 3.0, 5.0)]
    assert [task.number for task in line.tasks] == [0, 3]


def test_a_task_that_says_no_end():
    line = timeline([(0, 1, MAKE, 0, BEGIN), (1000, 1, MAKE, 0, INPUT), (4000, 2, USE, 0, BEGIN)])
    assert times(line) == [(0, "make", 0, 0.0, 1.0, 1.0), (0, "use", 0, 4.0, 4.0, 4.0)]


@pytest.mark.parametrize(("version", "layer"), [(0, -1), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_layers_come_from_tags(version, layer):
    [task] = timeline([(0, version, MAKE, 0, BEGIN), (1, version, MAKE, 0, END)]).tasks
    assert task.layer == layer


def test_blocks_that_ran_out_of_room_are_counted():
    line = timeline(ONE, ONE + TWO, capacity=4)
    assert line.truncated == 1
    assert len(line.tasks) == 3


def test_the_table():
    make, use = timeline(ONE, TWO).stages({"make": 6e6}, 1e13)
    assert (make.stage, make.tasks, make.waiting, make.working) == ("make", 1, 1.0, 3.0)
    assert make.share == (1 / 14, 3 / 14)
    # 6 MB in the 1.5 us that two blocks would take if both worked: 4 TB/s of 10.
    assert make.bandwidth == pytest.approx(0.4)
    assert use.bytes is None
    assert use.bandwidth is None


def test_the_lengths_of_layers():
    """Layer 0 ends at 4 in one block, layer 1 at 9; what comes before the first at 1."""
    before = [(0, 0, MAKE, 0, BEGIN), (1000, 0, MAKE, 0, END)]
    first = [(2000, 1, MAKE, 0, BEGIN), (4000, 1, MAKE, 0, END)]
    second = [(3000, 3, USE, 0, BEGIN), (9000, 3, USE, 0, END)]
    assert timeline(before + first, second).layer_lengths()[:2] == [3.0, 5.0]


def test_the_diagnosis_says_for_whom_and_how_long():
    text = timeline(ONE, TWO).diagnosis(PRODUCERS)
    assert text.startswith("use waits longest: 25% of all blocks' time, 3.5 us a task.")
    assert "2.0 of it pass until the last task of make has ended, and 1.5 more until the input is there." in text


def test_nothing_to_diagnose():
    assert timeline([]).diagnosis(PRODUCERS) == "Nothing was stamped."


def test_the_trace(tmp_path):
    line = timeline(ONE, TWO)
    line.write(tmp_path / "trace.json", "a title")
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(s["name"], s["tid"], s["ts"], s["dur"]) for s in slices] == [
        ("make", 0, 0.0, 4.0),
        ("waiting", 0, 0.0, 1.0),
        ("use", 1, 2.0, 5.0),
        ("waiting", 1, 2.0, 3.5),
    ]
    names = {
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] in ("process_name", "thread_name")
    }
    assert names == {"a title", "block 0", "block 1"}


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(RequestError, match="could not be written"):
        timeline(ONE).write(tmp_path / "none" / "trace.json", "")
