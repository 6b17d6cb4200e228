"""How likely given continuations are, by the decode steps that would have generated them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocmega.errors import RequestError
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.runner import CachedSequence, Runner, Step


@dataclass
class Score:
    """Of a continuation: each token's log-probability after those before it, and whether all are the likeliest ones.

    by_path: how many of its tokens each path gave the logits of.
    """

    logprobs: list[float] = field(default_factory=list)
    greedy: bool = True
    by_path: dict[str, int] = field(default_factory=dict)


@dataclass
class _Row:
    """A sequence that is told its tokens, one a step."""

    score: Score
    sequence: CachedSequence
    tokens: list[int]

    @property
    def input(self) -> int:
        return self.tokens[self.sequence.length]

    @property
    def done(self) -> bool:
        return self.sequence.length == len(self.tokens) - 1

    def take(self, step: Step, row: int) -> None:
        """The step has read an input; what it says of the next token."""
        assert step.logits is not None
        wanted, path = self.tokens[self.sequence.length], step.decision.path
        self.score.logprobs.append(float(step.logits[row].float().log_softmax(-1)[wanted]))
        self.score.greedy &= step.tokens[row] == wanted
        self.score.by_path[path] = self.score.by_path.get(path, 0) + 1


def score(
    runner: Runner, pairs: Sequence[tuple[list[int], list[int]]], path: str = "auto", progress: Progress = silent
) -> list[Score]:
    """Scores continuations, each after its context: pairs of token ids, neither empty.

    A context but for its last token is prefilled; every token of a continuation is scored by a decode step whose input
    is the right token before it (teacher forcing), up to `runner.max_rows` continuations at a time. So what is measured
    is decoding, not prefill. Raises RequestError for a pair that is too long or empty, before anything has run.
    """
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation or len(context) + len(continuation) - 1 > runner.max_model_len:
            raise RequestError(
                f"Pair {number} has {len(context)} tokens of context and {len(continuation)} to score: neither may be "
                f"empty, and all but the last have to fit into max_model_len={runner.max_model_len}."
            )
    scores = [Score() for _ in pairs]
    waiting, running = deque(zip(scores, pairs, strict=True)), list[_Row]()
    total, done = sum(len(continuation) for _, continuation in pairs), 0
    try:
        while waiting or running:
            while waiting and len(running) < runner.max_rows:
                mine, (context, continuation) = waiting.popleft()
                running.append(_Row(mine, runner.sequence(), [*context, *continuation]))
                runner.prefill(running[-1].sequence, context[:-1])
            step = runner.step([(row.sequence, row.input) for row in running], path, logits=True)
            for at, row in enumerate(running):
                row.take(step, at)
            done += len(running)
            progress("scoring", done, total)
            for row in [row for row in running if row.done]:
                row.sequence.close()
                running.remove(row)
    finally:
        for row in running:
            row.sequence.close()
    return scores
