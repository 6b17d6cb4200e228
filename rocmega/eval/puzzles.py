"""Puzzles with one right answer each: what the small model is trained on, and what it is examined with.

A puzzle is a line of ASCII: `add 347+85=` wants `432`. Which puzzles are kept for the examination is a matter of their
text alone, so that no training, of whatever seed and length, has seen one of them.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LONGEST_ANSWER = 12  # characters
LONGEST_PROMPT = 300
RECALL_PAIRS = (4, 47)  # of six characters each: up to 300 positions, of which the model attends to index_topk
_HELD_OUT = 8  # one puzzle of so many is for the examination


@dataclass(frozen=True)
class Puzzle:
    """task: a name of TASKS. prompt ends with "="; answer is what must follow, exactly."""

    task: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether it is kept for the examination."""
        return zlib.crc32(self.prompt.encode()) % _HELD_OUT == 0


def _add(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(1000), draw.randrange(1000)
    return f"{a}+{b}", str(a + b)


def _subtract(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(1000), draw.randrange(1000)
    return f"{a}-{b}", str(a - b)


def _multiply(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(1000), draw.randrange(10)
    return f"{a}*{b}", str(a * b)


def _letters(draw: random.Random, least: int = 3) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(least, LONGEST_ANSWER)))


def _copy(draw: random.Random) -> tuple[str, str]:
    text = _letters(draw)
    return text, text


def _reverse(draw: random.Random) -> tuple[str, str]:
    text = _letters(draw)
    return text, text[::-1]


def _sort(draw: random.Random) -> tuple[str, str]:
    text = _letters(draw)
    return text, "".join(sorted(text))


def _count(draw: random.Random) -> tuple[str, str]:
    text = "".join(draw.choices("abcd", k=draw.randint(4, 20)))
    letter = draw.choice("abcd")
    return f"{letter} {text}", str(text.count(letter))


def _largest(draw: random.Random) -> tuple[str, str]:
    numbers = draw.sample(range(1000), k=draw.randint(2, 6))
    return ",".join(map(str, numbers)), str(max(numbers))


def _recall(draw: random.Random) -> tuple[str, str]:
    """One of many pairs of a key and a number, by its key."""
    pairs = draw.randint(*RECALL_PAIRS)
    keys = [a + b for a, b in zip(*[iter(draw.choices(string.ascii_lowercase, k=4 * pairs))] * 2, strict=True)]
    keys = list(dict.fromkeys(keys))[:pairs]
    values = [f"{draw.randrange(100):02}" for _ in keys]
    asked = draw.randrange(len(keys))
    told = "".join(f"{key}:{value} " for key, value in zip(keys, values, strict=True))
    return f"{told}{keys[asked]}", values[asked]


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "count": _count,
    "largest": _largest,
    "recall": _recall,
}


def puzzles(task: str, seed: int | str, *, held_out: bool) -> Iterator[Puzzle]:
    """Puzzles of a task without end, the same ones for the same seed: those of the examination, or all others."""
    draw = random.Random(f"{task}#{seed}")
    while True:
        question, answer = TASKS[task](draw)
        puzzle = Puzzle(task, f"{task} {question}=", answer)
        if puzzle.held_out == held_out:
            yield puzzle


def examination(each: int, seed: int = 0) -> list[Puzzle]:
    """`each` different puzzles of every task, none of which any training has seen."""
    chosen: list[Puzzle] = []
    for task in TASKS:
        found: dict[str, Puzzle] = {}
        for puzzle in puzzles(task, seed, held_out=True):
            found.setdefault(puzzle.prompt, puzzle)
            if len(found) == each:
                break
        chosen += found.values()
    return chosen
