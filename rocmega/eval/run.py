"""`rocmega eval`: both paths, and it may be other formats of the same weights, answer the same questions."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.eval.puzzles import LONGEST_ANSWER, TASKS, Puzzle, examination
from rocmega.eval.statistics import Answer, Pairing, pair, wilson
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    import torch

PATHS = ("standard", "mega")  # the first is what the others are compared with
TITLES = {"standard": "standard path", "mega": "mega-task", "fused": "fused path"}
STORED = "as stored"  # the checkpoint itself, among formats


@dataclass
class Arm:
    """One way to answer: a format of the weights and a path."""

    format: str
    path: str
    where: str
    activations: str
    answers: list[Answer]
    coverage: float | None  # share of tokens by the mega-task

    @property
    def name(self) -> str:
        title = TITLES[self.path]
        return title if self.format == STORED else f"{self.format}, {title}"

    @property
    def right(self) -> int:
        return sum(answer.right for answer in self.answers)


@dataclass
class Report:
    """What came out. pairs: each format's paths beside the first path, then each path's formats beside the first."""

    model: str
    seed: int
    puzzles: list[Puzzle]
    arms: list[Arm] = field(default_factory=list)
    pairs: list[Pairing] = field(default_factory=list)

    def right_by_task(self, arm: Arm) -> dict[str, int]:
        """How many puzzles of each task an arm answered right."""
        of = zip(self.puzzles, arm.answers, strict=True)
        right = Counter(puzzle.task for puzzle, answer in of if answer.right)
        return {task: right[task] for task in dict.fromkeys(puzzle.task for puzzle in self.puzzles)}

    def to_json(self) -> dict[str, Any]:
        arms = [
            {
                "format": arm.format,
                "path": arm.path,
                "where": arm.where,
                "activations": arm.activations,
                "right": arm.right,
                "accuracy": arm.right / len(arm.answers),
                "interval": wilson(arm.right, len(arm.answers)),
                "right_by_task": self.right_by_task(arm),
                "mega_coverage": arm.coverage,
            }
            for arm in self.arms
        ]
        return {
            "model": self.model,
            "seed": self.seed,
            "asked": len(self.puzzles),
            "asked_by_task": dict(Counter(puzzle.task for puzzle in self.puzzles)),
            "arms": arms,
            "pairs": [pairing.to_json() for pairing in self.pairs],
        }


def evaluate(
    model: Path,
    *,
    each: int,
    seed: int = 0,
    tasks: Sequence[str] = tuple(TASKS),
    formats: Sequence[str] = (STORED,),
    paths: Sequence[str] = PATHS,
    progress: Progress = silent,
    **settings: Any,
) -> Report:
    """Asks `each` puzzles of every task and compares.

    formats: STORED, or such as rocmega.eval.formats can make of the checkpoint. settings: of rocmega.LLM. Raises
    RequestError if the model cannot be asked: no tokenizer, no such format.
    """
    from rocmega.eval.formats import convert

    report = Report(str(model), seed, [puzzle for puzzle in examination(each, seed) if puzzle.task in tasks])
    with tempfile.TemporaryDirectory(prefix="rocmega-eval-") as folder:
        for format in formats:
            directory = model if format == STORED else convert(model, Path(folder) / format, format)
            report.arms += [_ask(directory, format, path, report.puzzles, progress, settings) for path in paths]
    first_of = {arm.path: arm for arm in reversed(report.arms)}
    for format in formats:
        mine = [arm for arm in report.arms if arm.format == format]
        report.pairs += [_pair(mine[0], other) for other in mine[1:]]
    for arm in report.arms:
        if arm.format != formats[0]:
            report.pairs.append(_pair(first_of[arm.path], arm))
    return report


def _pair(base: Arm, other: Arm) -> Pairing:
    return pair(base.name, base.answers, other.name, other.answers)


def _ask(
    directory: Path, format: str, path: str, puzzles: list[Puzzle], progress: Progress, settings: dict[str, Any]
) -> Arm:
    import torch

    from rocmega.llm import LLM, SamplingParams

    def show(text: str, done: int = 0, total: int = 0) -> None:
        progress(f"{format}, {path}: {text}", done, total)

    rows: list[list[torch.Tensor]] = [[] for _ in puzzles]
    longest = max(len(puzzle.prompt) for puzzle in puzzles) + LONGEST_ANSWER + 2
    with LLM(directory, path=path, **{"max_model_len": longest, **settings}, progress=show) as llm:
        outputs = llm.generate(
            [llm.tokenizer.encode(puzzle.prompt) for puzzle in puzzles],
            SamplingParams(max_tokens=LONGEST_ANSWER + 1, stop="\n"),
            observer=lambda request, number, row: rows[request].append(row.float().cpu().clone()),
        )
        answers = [
            Answer(found.text, found.token_ids, found.text.strip() == puzzle.answer, torch.stack(logits))
            for puzzle, [found], logits in zip(puzzles, (output.outputs for output in outputs), rows, strict=True)
        ]
        coverage = llm.metrics()["mega_coverage"]
        return Arm(format, path, llm.runner.where, llm.runner.activations, answers, coverage)
