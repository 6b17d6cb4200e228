"""Ranks as processes: the same bits on all, and a rank that dies, stalls or refuses is named by all others, soon."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rocmega import LLM, SamplingParams
from rocmega.models.glm import kernel
from rocmega.models.glm.config import from_dir
from rocmega.models.glm.weights import Formats
from rocmega.toolchain import compile
from tests.parallel.processes import end, ends, start

SECONDS = 10.0  # from the failure to the last exit
READY = 45.0  # Python and torch, on a busy machine


def files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def ranks():
    """ranks(3, "die"): how so many processes of program.py end; see `ends`."""
    started: list[subprocess.Popen[str]] = []

    def run(count: int, *how: str) -> tuple[list[tuple[int, str, str]], float]:
        started.extend(start(count, *how))
        return ends(started, READY)

    yield run
    end(started)


def test_delays_change_nothing(ranks):
    """30 steps; every rank a process with another order of threads, late by up to 20 ms now and then."""
    ended, _ = ranks(4, "delays")
    assert [code for code, _, _ in ended] == [0] * 4, ended
    assert len({out for _, out, _ in ended}) == 1
    assert ended[0][1].startswith("bits ")


def test_a_rank_that_dies_is_named(ranks):
    before = files()
    ended, seconds = ranks(3, "die")
    assert ended[1][0] == -9
    for code, out, errors in (ended[0], ended[2]):
        assert code == 2
        assert "bits" not in out
        assert "StepError" in errors
        assert "waited in stage reduce" in errors
        assert "for rank 1 and tag" in errors
    assert seconds < SECONDS
    assert files() <= before


def test_a_rank_that_stalls_is_named(ranks):
    ended, _ = ranks(2, "stall")
    code, out, errors = ended[0]
    assert (code, out) == (2, "")
    assert "waited in stage reduce" in errors
    assert "for rank 1 and tag" in errors
    assert "Nothing was heard of rank 1" in errors
    assert ended[1][0] == 2  # awake again, it is told, and leaves
    assert "StepError" in ended[1][2]


def test_a_rank_that_fails_in_python_says_why(ranks):
    """Its kernel is missing on the others, who leave theirs."""
    ended, seconds = ranks(2, "raise")
    assert "the device fell off the bus" in ended[1][2]
    assert "for rank 1 and tag" in ended[0][2]
    assert seconds < SECONDS


def test_a_rank_that_refuses_in_the_set_up_is_quoted(ranks):
    ended, seconds = ranks(3, "refuse")
    assert [code for code, _, _ in ended] == [2, 2, 2]
    assert "DriverError no memory for peers here" in ended[1][2]
    for _, _, errors in (ended[0], ended[2]):
        assert "PeerError rank 1 could not make the chain: no memory for peers here" in errors
    assert seconds < SECONDS


def test_a_node_that_dies_is_named_by_the_next(ranks):
    """After borders that arrived whole."""
    ended, seconds = ranks(2, "borders")
    assert ended[0][0] == -9
    assert ended[1][0] == 2
    assert "PeerError rank 0 of node 0 cannot be reached any more" in ended[1][2]
    assert seconds < SECONDS


@pytest.fixture(scope="module")
def two_ranks(tiny) -> str:
    """A checkpoint, with the kernels of two ranks built before anybody waits for them."""
    for many in (False, True):
        compile(kernel.unit(from_dir(tiny), Formats("f32", "f32"), "host", tp=2, many=many), "host")
    return str(tiny)


def test_many_tokens_a_launch_on_ranks(ranks, two_ranks):
    """Those of one rank, and not one more or less on any rank; what draws goes step by step, and it is said why."""
    ended, _ = ranks(2, "launches", "host", two_ranks)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]
    seen = json.loads(ended[0][1])
    with LLM(two_ranks, path="standard", device="host", max_model_len=128) as llm:
        drawn = SamplingParams(max_tokens=3, temperature=1.0, seed=4)
        samplings = [*[SamplingParams(max_tokens=count) for count in (3, 5, 3, 3)], drawn]
        alone = llm.generate([[3, 1, 4], [3, 1, 4], [9], [8, 8], [3, 1, 4]], samplings)
    assert seen["answers"] == [output.outputs[0].token_ids for output in alone]
    assert seen["launches_of_several_steps"] >= 3
    assert seen["tokens"]["mega"] < 60  # of the hundred that the stream could have had, few
    assert seen["single_step_reasons"] == {"ranks draw from the logits of all, when a step's launch is over": 2}


def test_a_rank_that_dies_in_a_launch_of_many_tokens_is_named(ranks, two_ranks):
    ended, seconds = ranks(2, "lost launch", "host", two_ranks)
    assert ended[1][0] == -9
    code, out, errors = ended[0]
    assert (code, out) == (2, "")
    assert "for rank 1 and tag" in errors
    assert seconds < SECONDS
