"""Launches of many tokens on a real GPU: the tokens of single ones, read while the kernel runs, ended by the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rocmega.drivers.select import kind_for
from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice
from tests.gpu.test_glm import CONTEXT, Model, prompt_of

pytestmark = pytest.mark.skipif(kind_for() == "host", reason="needs a GPU")

LENGTHS = [1, 23, 64, 75, 200]
NONE: list[tuple[int, ...]] = [()] * len(LENGTHS)
TOKENS = 24


@pytest.fixture(scope="module", params=["f32", "fp8"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Model:
    made = Model.load(tiny_checkpoint("glm-5.2-tiny", request.param), "auto")
    for row, length in enumerate(LENGTHS):
        made.prefill(row, prompt_of(length, row))
    return made


def batch(model: Model, tokens: list[int], step: int = 0):
    return model.batch(list(range(len(LENGTHS))), tokens, [length + step for length in LENGTHS])


def choices(step: int) -> list[Choice | None]:
    sampling = SamplingParams(temperature=1.3, top_p=0.9)
    return [None if row % 2 else Choice(sampling, row, step) for row in range(len(LENGTHS))]


@pytest.mark.parametrize("drawn", [False, True])
def test_the_tokens_of_single_launches(model: Model, drawn: bool) -> None:
    path = model.mega()
    first = tokens = [7, 8, 9, 10, 11]
    wanted = []
    for step in range(TOKENS):
        result = path.decode(batch(model, tokens, step), logits=False, choices=choices(step) if drawn else None)
        tokens = result.tokens.tolist()
        wanted.append(tokens)
    for _ in range(50):
        assert list(path.launch_many(batch(model, first), TOKENS, NONE, choices(0) if drawn else None)) == wanted
    path.close()


def test_the_host_reads_and_ends_a_launch_that_runs(model: Model) -> None:
    path = model.mega()
    most = CONTEXT - max(LENGTHS) - 1
    whole = list(path.launch_many(batch(model, [7, 8, 9, 10, 11]), min(most, 256), NONE))
    for wait in range(20):
        launch = path.launch_many(batch(model, [7, 8, 9, 10, 11]), min(most, 256), NONE)
        got = [launch.next() for _ in range(1 + wait)]
        assert not launch._running.done()
        launch.cancel()
        began = time.monotonic()
        got += list(launch)
        assert time.monotonic() - began < 1
        assert len(got) < len(whole)
        assert got == whole[: len(got)]
    path.close()
