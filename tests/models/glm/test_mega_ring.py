"""A launch of many tokens while it runs: read as they come, ended from outside, and what is refused meanwhile."""

from __future__ import annotations

import pytest
import torch

from rocmega.errors import DriverError, RequestError
from rocmega.models.common import mega
from rocmega.step import StepBatch
from tests.models.glm.kit import Bench

NONE = [(), ()]
LONG = 200  # tokens, with room for all of them; nobody waits for the last


@pytest.fixture(scope="module")
def subject(bench) -> Bench:
    return bench("shallow", "f32", (LONG + 30, LONG + 5), blocks=2)


def launch(subject: Bench, tokens: int, stops=NONE):
    batch = StepBatch(torch.tensor([7, 8]).int(), torch.tensor([21, 3]).int(), subject.table)
    return subject.mega.launch_many(batch, tokens, stops)


def visible(started) -> int:
    """Tokens that are in the ring now."""
    slot = started._read
    while slot < started._tokens and started._ring.read(slot, 2, started._tag + slot * started._span):
        slot += 1
    return slot


def test_tokens_come_while_the_kernel_runs_and_cancelling_ends_it(subject):
    subject.reset()
    wanted = list(launch(subject, 4))
    subject.reset()
    started = launch(subject, LONG)
    got = []
    for _ in range(2):
        got.append(started.next())
        assert not started._running.done()  # the host reads beside it: it has far to go
    before = visible(started)
    started.cancel()
    got += list(started)
    assert started.over
    # The token that was being chosen; and one more if it was chosen, and not yet seen, when the host counted.
    assert before <= len(got) <= before + 2
    assert got[: min(4, len(got))] == wanted[: len(got)]
    assert started._running.done()
    assert started.next() is None
    started.cancel()  # of a launch that has ended: nothing
    subject.reset()
    assert list(launch(subject, 4)) == wanted  # nor of the next


def test_one_token(subject):
    subject.reset()
    [first, _] = launch(subject, 2)
    subject.reset()
    assert list(launch(subject, 1)) == [first]


def test_nothing_else_runs_meanwhile(subject):
    subject.reset()
    started = launch(subject, LONG)
    try:
        with pytest.raises(RequestError, match="still runs"):
            subject.mega.decode(subject.batch())
        with pytest.raises(RequestError, match="still runs"):
            launch(subject, 2)
    finally:
        started.cancel()
        list(started)


def test_closing_ends_it(packed):
    subject = Bench(*packed("shallow", "f32"), (LONG + 30, LONG + 5), blocks=2)
    started = launch(subject, LONG)
    subject.close()
    assert started._running.done()


def test_tags_that_begin_anew_do_not_meet_old_tokens(subject, monkeypatch):
    """Epochs start from the beginning in the middle: what lies in the ring would carry the tags of then."""
    subject.reset()
    wanted = list(launch(subject, 3))
    monkeypatch.setattr(mega, "LAST_EPOCH", subject.mega._epoch + 1)
    subject.reset()
    assert list(launch(subject, 3)) == wanted
    assert subject.mega._epoch < mega.LAST_EPOCH


def test_what_fails_in_the_kernel_reaches_the_reader(subject, monkeypatch):
    monkeypatch.setattr(subject.driver, "launch", lambda *_, **__: (_ for _ in ()).throw(DriverError("no more")))
    started = launch(subject, 3)
    with pytest.raises(DriverError, match="no more"):
        started.next()
    assert started.over


def test_the_checks_see_the_ring(bench):
    """Cancelled in the middle, with the memory model on: whoever runs at which speed, all blocks leave together."""
    subject = bench("shallow", "f32", (40, 28), blocks=5)
    for seed in (1, 2):
        subject.reset()
        subject.driver.check, subject.driver.seed = True, seed
        started = launch(subject, 5)
        first = started.next()
        started.cancel()
        assert len([first, *started]) < 5
        assert subject.driver.last_report.reports == 0
    subject.driver.check = False
