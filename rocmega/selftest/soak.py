"""A long run: steps of changing rows and contexts, every output equal to its first occurrence, bit for bit.

`rocmega selftest --soak 10000`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from rocmega.cache import PAGE
from rocmega.compare.subject import Subject
from rocmega.progress import Progress, silent
from rocmega.selftest.models import ModelError
from rocmega.step import StepBatch

REQUESTS = 16
ROWS = (1, 1, 2, 3, 4, 5, 8, 16)
CASES = 60


@dataclass(frozen=True)
class Soaked:
    """steps: how many ran; cases: how many different ones; rows: sizes of steps that came."""

    steps: int
    cases: int
    rows: tuple[int, ...]


def soak(subject: Subject, steps: int, *, seed: int = 0, progress: Progress = silent) -> Soaked:
    """Runs `steps` steps of the mega-task. Raises ModelError with the first step and logit that differ.

    A request has one position, from the first to the last of the subject's longest context, and a step writes the cache
    entries that it reads first: so a case is the same whenever it comes.
    """
    order = random.Random(seed)
    cases = [_case(subject, order) for _ in range(CASES)]
    seen: dict[int, torch.Tensor] = {}
    mega = subject.mega()
    for step in range(steps):
        number = order.randrange(CASES)
        logits: Any = mega.decode(cases[number]).logits
        if number not in seen:
            seen[number] = logits.clone()
        elif not torch.equal(logits, seen[number]):
            raise ModelError(_difference(step, cases[number], seen[number], logits))
        progress("steps of changing rows and contexts", step + 1, steps)
    return Soaked(steps, len(seen), tuple(sorted({cases[number].rows for number in seen})))


def _case(subject: Subject, order: random.Random) -> StepBatch:
    longest, pages = max(subject.contexts), subject.cache.pages
    each = -(-longest // PAGE)
    room = min(REQUESTS, pages // each)
    requests = order.sample(range(room), min(order.choice(ROWS), room))
    positions = [(longest - 1) * request // max(1, room - 1) for request in requests]
    table = torch.tensor([[request * each + page for page in range(each)] for request in requests])
    tokens = [order.randrange(subject.model.config.vocab_size) for _ in requests]
    return StepBatch(torch.tensor(tokens).int(), torch.tensor(positions).int(), table.int())


def _difference(step: int, case: StepBatch, first: torch.Tensor, logits: torch.Tensor) -> str:
    different = (first != logits).nonzero()
    row, token = different[0].tolist()
    return (
        f"step {step}, {case.rows} rows: {len(different)} logits differ from the same step's before, the first that of "
        f"row {row} (position {int(case.positions[row])}) and token {token}: {float(first[row, token])!r} became "
        f"{float(logits[row, token])!r}."
    )
