"""Two GPUs of one host: the demo, the sum alone and how long it takes, launches of many tokens, ranks that fail."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rocmega import LLM, SamplingParams
from rocmega.drivers import pick
from rocmega.models.glm import kernel
from rocmega.models.glm.config import from_dir
from rocmega.models.glm.weights import Formats
from rocmega.toolchain import compile
from tests.parallel import chain
from tests.parallel.processes import end, ends, start

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STEPS = 10_000
SECONDS = 10.0  # from the failure of a rank to the other's exit
Ended = tuple[list[tuple[int, str, str]], float]


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> str:
    """A tiny model. All kernels are built before any rank waits for another."""
    arch, config, f32 = pick("auto").arch, from_dir(tiny), Formats("f32", "f32")
    units = [
        kernel.unit(config, f32, arch, tp=tp, many=many, one_row=one_row)
        for tp, many in ((1, False), (2, False), (2, True))
        for one_row in (False, True)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit: compile(unit, arch), [chain.unit(2), *units]))
    return str(tiny)


@pytest.fixture
def ranks(checkpoint: str) -> Iterator[Callable[..., Ended]]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, seconds: float = 60, **options: str) -> Ended:
        started.extend(start(2, *arguments, **options))
        return ends(started, seconds)

    yield run
    end(started)


def test_the_demo(ranks: Callable[..., Ended]) -> None:
    """Every rank by the mega-task and by PyTorch with NCCL or RCCL, and one rank alone."""
    ended, _ = ranks("--json", "--tokens", "64", module="rocmega.demo", seconds=240)
    assert [code for code, _, _ in ended] == [0, 0], ended
    report = json.loads(ended[0][1])
    print(json.dumps(report))
    assert report["agree"] is True
    assert report["launches_per_token"] == 1
    assert report["standard_path_sums_by"] == "NCCL or RCCL"


def test_ten_thousand_steps_of_the_sum(ranks: Callable[..., Ended]) -> None:
    """Each compared with float64, and all of them to the bit between the ranks."""
    ended, _ = ranks("steps", "auto", str(STEPS), seconds=200)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]
    assert ended[0][1].startswith("bits ")


def test_how_long_the_sum_takes(ranks: Callable[..., Ended]) -> None:
    """In the three ways that shares can travel, beside all-reduce in a graph. Prints the table."""
    ended, _ = ranks(module="tests.parallel.latency", seconds=300)
    assert [code for code, _, _ in ended] == [0, 0], ended
    lines = ended[0][1].splitlines()
    print("\n".join(lines))
    assert sum("2 ranks, us a hop: PUSH" in line and "by all_reduce in a graph" in line for line in lines) == 6


def test_many_tokens_a_launch(ranks: Callable[..., Ended], checkpoint: str) -> None:
    ended, _ = ranks("launches", "auto", checkpoint)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]
    seen = json.loads(ended[0][1])
    print(json.dumps(seen))
    with LLM(checkpoint, path="standard", max_model_len=128) as llm:
        greedy = [SamplingParams(max_tokens=count) for count in (3, 5, 3, 3)]
        alone = llm.generate([[3, 1, 4], [3, 1, 4], [9], [8, 8]], greedy)
    assert seen["answers"][:4] == [output.outputs[0].token_ids for output in alone]
    assert seen["launches_of_several_steps"] >= 3
    assert seen["tokens"]["mega"] < 300  # the stream could have had a thousand, and was in its first launch


@pytest.mark.parametrize("how", ["die", "lost launch"])
def test_a_killed_rank_is_named_by_the_other(how: str, ranks: Callable[..., Ended], checkpoint: str) -> None:
    """Between two steps, and in a launch of many tokens."""
    ended, seconds = ranks(how, "auto", *([checkpoint] if how == "lost launch" else []))
    assert ended[1][0] == -9
    code, out, errors = ended[0]
    assert (code, out) == (2, "")
    assert "StepError" in errors
    assert "for rank 1 and tag" in errors
    assert seconds < SECONDS


def test_a_rank_that_stalls_is_named_by_the_other(ranks: Callable[..., Ended]) -> None:
    ended, _ = ranks("stall", "auto")
    code, out, errors = ended[0]
    assert (code, out) == (2, "")
    assert "for rank 1 and tag" in errors
    assert "Nothing was heard of rank 1" in errors
    assert ended[1][0] == 2  # awake again, it is told, and leaves
    assert "StepError" in ended[1][2]
