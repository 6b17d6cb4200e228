"""Whole models on the device: the mega-task against float32, its bits, and a step whose blocks never finish."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from rocmega.compare import Options
from rocmega.compare.accuracy import Judge
from rocmega.compare.arms import ARMS
from rocmega.compare.subject import Subject
from rocmega.errors import RocmegaError, StepError
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.step import StepBatch

NOTICED = 2.0  # seconds in which a GPU's lost layer has to be an error
HOST_POLLS = 2000
WAIT = (
    0.2 * NOTICED
)  # that a wait is given: with all blocks polling, polls take longer than one block's, which are known


class ModelError(RocmegaError):
    """The mega-task did not compute the model, or not twice the same."""


def judge(subject: Subject) -> dict[str, Any]:
    """Steps of each of the subject's rows and contexts, as `rocmega compare` judges the arm. Raises ModelError."""
    judge, worst, bound = Judge(subject), 0.0, 0.0
    for rows in subject.options.rows:
        for context in subject.contexts:
            batch = subject.batch(rows, context)
            verdict = judge.judge(ARMS["mega"].prepare(subject, batch), judge.expect(batch))
            if verdict.reason is not None:
                raise ModelError(f"{_named(subject)}, {rows} rows, context {context}: {verdict.reason}.")
            worst, bound = max((worst, bound), (verdict.worst or 0.0, verdict.bound))
    return {"worst_error": worst, "bound": bound}


def same_bits(subject: Subject) -> dict[str, Any]:
    """One step by several numbers of blocks and launches, three times each. Raises ModelError where a bit differs."""
    batch = subject.batch(max(subject.options.rows), max(subject.contexts))
    units = subject.driver.facts().compute_units if subject.driver.arch != "host" else 5
    ways: list[dict[str, Any]] = [{"blocks": blocks} for blocks in (units, 1, 3, 4, 33) if blocks <= units]
    ways.append({"mega_tasks": 2})
    first: Any = None
    for way in ways:
        mega = subject.make_mega(**way)
        try:
            for again in range(3):
                logits = mega.decode(batch).logits.clone()
                first = logits if first is None else first
                _compare(subject, batch, first, logits, f"with {_words(way)}, run {again + 1}")
        finally:
            mega.close()
    return {"ways": [_words(way) for way in ways]}


def lost_layer(subject: Subject) -> dict[str, Any]:
    """A step of which a layer never runs is a named error in time; the next one is right again. Raises ModelError."""
    batch, mega = subject.batch(max(subject.options.rows), max(subject.contexts)), subject.make_mega()
    host = subject.driver.arch == "host"
    polls = HOST_POLLS if host else int(WAIT * subject.driver.polls_per_second)
    layer = subject.layers // 2
    try:
        before = mega.decode(batch).logits.clone()
        with mega.lost_layer(layer, polls):
            start = time.perf_counter()
            said = _error_of(mega, batch)
            seconds = time.perf_counter() - start
        if said is None:
            raise ModelError(f"{_named(subject)}: layer {layer} was left out, and the step ended without an error.")
        if seconds > NOTICED and not host:
            raise ModelError(f"a lost layer was noticed after {seconds:.1f} s instead of within {NOTICED:.0f}: {said}")
        _compare(subject, batch, before, mega.decode(batch).logits, "in the step after one that was given up")
    finally:
        mega.close()
    return {"said": said, "seconds": round(seconds, 3)}


def _error_of(mega: Any, batch: StepBatch) -> str | None:
    try:
        mega.decode(batch)
    except StepError as error:
        return str(error)
    return None


def _compare(subject: Subject, batch: StepBatch, first: Any, logits: Any, when: str) -> None:
    different = (first != logits).nonzero()
    if len(different):
        row, token = different[0].tolist()
        raise ModelError(
            f"{_named(subject)}, {batch.rows} rows: {when} {len(different)} of {logits.numel()} logits have other "
            f"bits, the first that of row {row} and token {token}: {float(first[row, token])!r} became "
            f"{float(logits[row, token])!r}."
        )


def _named(subject: Subject) -> str:
    return f"{subject.options.model} in {subject.model.weights.formats.label}, {subject.layers} layers"


def _words(way: dict[str, int]) -> str:
    [(name, number)] = way.items()
    return f"{number} {name.replace('_', '-')}"


def open_subject(model: str, format: str, driver: str, *, quick: bool, progress: Progress = silent) -> Subject:
    """A model with random weights. quick: four layers and three rows, for a CPU."""
    options = Options(model, format=format, rows=(1, 3, 16), contexts=(20, 300), device=driver)
    if quick:
        options = dataclasses.replace(options, layers=4, rows=(3,), contexts=(70,))
    return Subject.open(options, progress)
