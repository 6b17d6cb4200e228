"""The training loop: AdamW, the indexers' loss beside the model's, experts balanced by the router's bias."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from rocmega.eval.puzzles import TASKS, examination
from rocmega.models.glm.training.data import IGNORED, Sequences, papers
from rocmega.models.glm.training.model import Trainable

_GRADED = 64  # puzzles at a time, of one task: about the same length


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Fields:
        steps, rows, length: batches of rows x length tokens.
        seconds: when to be done, if that is before `steps`: the schedule goes by whichever is further.
        rate: of AdamW, at its highest; it rises over the first `warmup` of the way and falls along a cosine.
        dense: until this part of the way attention sees everything, and the indexers only learn.
        decay: of matrices. balance: what a step adds to the router's bias of experts with too few tokens, and takes
            from others; it falls to 0 along a line.
        workers: processes that make puzzles.
    """

    steps: int = 6000
    rows: int = 128
    length: int = 320
    seconds: float = 200.0
    seed: int = 0
    rate: float = 1.5e-3
    warmup: float = 0.02
    dense: float = 0.5
    decay: float = 0.05
    balance: float = 2e-3
    workers: int = 12


@dataclass(frozen=True)
class Progress:
    """After a step. done: of the way, 0 to 1. loss: nats per answer token; index_loss: see Outcome. Scalar tensors."""

    step: int
    done: float
    loss: torch.Tensor
    index_loss: torch.Tensor


def train(model: Trainable, recipe: Recipe) -> Iterator[Progress]:
    """Trains the model, a step for each item."""
    start, on_gpu = time.monotonic(), model.device.type == "cuda"
    optimizer = _optimizer(model, recipe)
    data = Sequences(recipe.steps, recipe.rows, recipe.length, recipe.seed)
    batches = DataLoader(data, batch_size=None, num_workers=recipe.workers, pin_memory=on_gpu)
    for step, (tokens, targets) in enumerate(batches):
        done = max(step / recipe.steps, (time.monotonic() - start) / recipe.seconds)
        if done >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min((done + 1e-3) / recipe.warmup, 0.5 + 0.5 * math.cos(math.pi * done))
        with torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu):
            outcome = model.forward(tokens.to(model.device, non_blocking=True), sparse=done >= recipe.dense)
            loss = _loss(outcome.logits, targets.to(model.device, non_blocking=True))
        optimizer.zero_grad()
        (loss + outcome.index_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.weights.values(), 1.0)
        optimizer.step()
        for layer, load in outcome.loads.items():
            model.biases[layer] += recipe.balance * (1 - done) * (load.mean() - load).sign()
        yield Progress(step, done, loss.detach(), outcome.index_loss.detach())


def _optimizer(model: Trainable, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.weights.values() if weight.dim() > 1]
    vectors = [weight for weight in model.weights.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=model.device.type == "cuda")


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def grade(model: Trainable, each: int, seed: int = 0) -> dict[str, float]:
    """Share of right answers by task, on `each` puzzles that no training has seen.

    The model is told the right answer and has to find every next token of it: that is as often as greedy decoding
    gives all of it. Selections as in decoding.
    """
    of_task = {task: [puzzle for puzzle in examination(each, seed) if puzzle.task == task] for task in TASKS}
    shares = {}
    for task, asked in of_task.items():
        asked.sort(key=lambda puzzle: len(puzzle.prompt))
        right = 0
        for start in range(0, len(asked), _GRADED):
            tokens, targets = (part.to(model.device) for part in papers(asked[start : start + _GRADED]))
            found = model.forward(tokens, sparse=True).logits.argmax(-1)
            right += int(((found == targets) | (targets == IGNORED)).all(-1).sum())
        shares[task] = right / len(asked)
    return shares
