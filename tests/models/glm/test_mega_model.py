"""The mega-task as a model: what it generates, and what it makes of steps that cannot be run or that failed."""

from __future__ import annotations

import pytest
import torch

from rocmega.errors import RequestError, StepError
from rocmega.models.glm import mega
from rocmega.models.glm.mega import MegaPath
from rocmega.step import StepBatch
from tests.models.glm.kit import Bench, Outcome


@pytest.mark.parametrize("name", ["glm-5-tiny", "glm-5.2-tiny"])
def test_64_greedy_tokens_equal_transformers(name, server, reference, prompt):
    tokens, logits = reference(name)
    subject = server(name)
    subject.begin("a", prompt)
    for _ in range(64):
        subject.step("a")
    assert subject.tokens["a"] == tokens
    assert (torch.stack(subject.logits["a"]) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["f32", "fp8"])
def test_requests_come_and_go(dtype, server, prompt):
    """One binary and one set of regions for any number of rows: what a request gets does not depend on the others."""
    lengths = {"a": 75, "b": 20, "c": 62, "d": 1}
    crowd = server(dtype=dtype)
    for request, length in lengths.items():
        crowd.begin(request, prompt[:length])
    for rows in ("a", "abcd", "db", "dcba", "c", "ca"):
        crowd.step(*rows)
    alone = server(dtype=dtype)
    for request, length in lengths.items():
        alone.begin(request, prompt[:length])
        for _ in crowd.logits[request][1:]:
            alone.step(request)
        assert torch.equal(torch.stack(alone.logits[request]), torch.stack(crowd.logits[request]))


@pytest.fixture(scope="module")
def subject(bench) -> Bench:
    return bench("glm-5.2-tiny", "f32", (70, 3))


@pytest.fixture(scope="module")
def expected(subject) -> Outcome:
    return subject.step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [512, 0]}, r"token 512 .* 0 to 511"),
        ({"tokens": [0, -1]}, r"token -1"),
        ({"positions": [70, -1]}, r"position -1 is negative"),
        ({"positions": [71, 3]}, r"position 71 is past the configured context of 71"),
        ({"block_table": [[0], [1]]}, r"position 70 needs 2 pages and the block table has 1"),
        ({"block_table": [[0, -1], [1, -1]]}, r"row 0 is at position 70 but has no page"),
        ({"tokens": [1], "positions": [70]}, r"a step wants tokens \[rows\]"),
        ({"tokens": [], "positions": [], "block_table": [[]]}, r"a step wants"),
        ({"tokens": [0] * 17, "positions": [0] * 17, "block_table": [[0]] * 17}, r"17 rows and at most 16"),
    ],
)
def test_steps_that_cannot_run_are_refused_before_a_launch(change, message, subject, monkeypatch):
    batch = subject.batch()
    fields = {name: torch.tensor(change[name], dtype=torch.int32) if name in change else getattr(batch, name)
              for name in ("tokens", "positions", "block_table")}  # fmt: skip
    monkeypatch.setattr(subject.driver, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(RequestError, match=message):
        subject.mega.decode(StepBatch(**fields))


def test_fewer_rows_or_mega_tasks_than_none(packed, subject):
    for options, message in (
        ({"max_rows": 17}, "1 to 16"),
        ({"mega_tasks": 9}, "1 to 8"),
        ({"mega_tasks": 0}, "1 to 8"),
    ):
        with pytest.raises(RequestError, match=message):
            MegaPath(*packed(), subject.cache, subject.driver, max_model_len=71, **options)


def test_logits_only_if_wanted(subject, expected):
    subject.reset()
    result = subject.mega.decode(subject.batch(), logits=False)
    assert result.logits is None
    assert torch.equal(result.tokens, expected.tokens)


def test_a_failed_step_leaves_the_path_usable(subject, expected, monkeypatch):
    """Given up by the kernel itself: the host's watch for waits that never end is off."""
    monkeypatch.setattr(subject.mega._args, "poll_limit", 1)
    with pytest.raises(StepError, match=r"on rank 0, block \d+ waited in stage [a-z_]+, task \d+, for tag") as failed:
        subject.step()
    assert failed.value.expected > failed.value.seen
    monkeypatch.undo()
    assert subject.mega._args.poll_limit == mega.POLL_LIMIT
    assert subject.step().same_bits(expected)


def test_epochs_begin_anew_before_they_wrap(subject, expected):
    subject.mega._epoch = mega.LAST_EPOCH - 100
    epochs = []
    for _ in range(6):
        assert subject.step().same_bits(expected)
        epochs.append(subject.mega._epoch)
    assert epochs[3] < mega.LAST_EPOCH
    assert epochs[4:] == [18, 36]  # a step's tags are two a layer, and two more
