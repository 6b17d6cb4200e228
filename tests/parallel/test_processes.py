"""Ranks as processes: the same bits on all, and a rank that dies, stalls or refuses is named by all others, soon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10.0  # from the failure to the last exit
READY = 45.0  # Python and torch, on a busy machine


def start(ranks: int, how: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.parallel.program", how],
                cwd=ROOT,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def ranks():
    """ranks(3, "die"): each one's exit code, output and errors, and the seconds from the first end to the last."""
    started: list[subprocess.Popen[str]] = []

    def run(count: int, how: str) -> tuple[list[tuple[int, str, str]], float]:
        started.extend(start(count, how))
        deadline = time.monotonic() + READY
        while all(process.poll() is None for process in started) and time.monotonic() < deadline:
            time.sleep(0.05)
        first = time.monotonic()
        ended = [(p.wait(timeout=READY) if p.poll() is None else p.returncode, *p.communicate()) for p in started]
        return ended, time.monotonic() - first

    yield run
    for process in started:
        process.kill()
        process.wait()


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
