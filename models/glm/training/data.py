"""Puzzles as training sequences and as examination papers. A token is a character's ASCII code."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from rocmega.eval.puzzles import TASKS, Puzzle, puzzles

END = 3  # ASCII's "end of text"
VOCAB = 128
IGNORED = -100  # what cross_entropy leaves out


def encode(text: str) -> list[int]:
    """ASCII text as tokens."""
    return list(text.encode("ascii"))


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of training sequences: puzzles of all tasks one after the other. Batch i is a function of seed and i.

    Puzzles see those before them, which they do not need: so the indexer has something to leave out everywhere. Only
    answers and their ends are to be predicted, for questions cannot be. An item is tokens int64 [rows, length] and
    targets of the same shape, IGNORED where there is none.
    """

    def __init__(self, batches: int, rows: int, length: int, seed: int) -> None:
        self.batches, self.rows, self.length, self.seed = batches, rows, length, seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = f"{self.seed}#{batch}"
        draw, sources = random.Random(key), {task: puzzles(task, key, held_out=False) for task in TASKS}
        names = list(TASKS)
        tokens = torch.full((self.rows, self.length + 1), END)
        targets = torch.full((self.rows, self.length + 1), IGNORED)
        for row in range(self.rows):
            at = 0
            while (puzzle := next(sources[draw.choice(names)])) and (end := at + length_of(puzzle)) <= self.length + 1:
                _put(puzzle, tokens[row], targets[row], at)
                at = end
        return tokens[:, :-1], targets[:, 1:]


def length_of(puzzle: Puzzle) -> int:
    """Its tokens, the end among them."""
    return len(puzzle.prompt) + len(puzzle.answer) + 1


def _put(puzzle: Puzzle, tokens: torch.Tensor, targets: torch.Tensor, at: int) -> None:
    answer = at + len(puzzle.prompt)
    ids = torch.tensor([*encode(puzzle.prompt + puzzle.answer), END])
    tokens[at : at + len(ids)] = ids
    targets[answer : at + len(ids)] = ids[len(puzzle.prompt) :]


def papers(of: Sequence[Puzzle]) -> tuple[torch.Tensor, torch.Tensor]:
    """Puzzles with their answers, one a row: tokens and targets as of `Sequences`, as long as the longest puzzle."""
    longest = max(map(length_of, of))
    tokens, targets = torch.full((len(of), longest), END), torch.full((len(of), longest), IGNORED)
    for row, puzzle in enumerate(of):
        _put(puzzle, tokens[row], targets[row], 0)
    return tokens[:, :-1], targets[:, 1:]


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and its configuration: characters to ASCII codes, the end a special token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {chr(code) if code != END else "<end>": code for code in range(1, VOCAB)} | {"<unknown>": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<unknown>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    config |= {"model_max_length": 1024, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
