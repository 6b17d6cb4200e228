"""The arms: ways to run one and the same decode step.

A new arm is a function that prepares a step, and a line in ARMS. What it returns has to give the same step whenever it
is enqueued, on torch's current stream, without waiting for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rocmega.errors import DriverError, RequestError

if TYPE_CHECKING:
    import torch

    from rocmega.compare.subject import Subject
    from rocmega.step import StepBatch


class Step(Protocol):
    """An arm that is ready to run a batch."""

    def place(self, tokens: torch.Tensor) -> None:
        """Other tokens, int32 [rows] on the CPU, for the same rows."""

    def enqueue(self) -> None:
        """Launches the step. Waits for nothing, if its arm can do without."""

    def logits(self) -> torch.Tensor:
        """Runs the step and gives its logits, float32 [rows, vocab]."""

    def picks(self) -> Any:
        """What the last step whose logits were asked for chose: `Picks` of the family."""

    def tokens(self) -> list[int]:
        """Waits for the last step: each row's greedy token."""


@dataclass(frozen=True)
class Arm:
    """Fields:
    title: for people.
    prepare: whatever it raises is the reason why the arm has no latency.
    standard: it is an opponent of the mega-task.
    on_cpu: it is measured on the CPU target too, if nobody chose arms: others mean nothing there, or take minutes.
    of_ranks: it is something else than another arm only where ranks share the model.
    tokens: that a step gives each row.
    """

    title: str
    prepare: Callable[[Subject, StepBatch], Step]
    standard: bool = True
    on_cpu: bool = False
    of_ranks: bool = False
    tokens: int = 1


class StandardStep:
    """The standard path's step, inputs on the device, logits and greedy tokens staying there."""

    def __init__(self, path: Any, batch: StepBatch) -> None:
        self.path = path
        self.input = path.place(batch)
        self.output: Any = None
        self.best: Any = None
        self.record: Any = None

    def place(self, tokens: torch.Tensor) -> None:
        self.input[0].copy_(tokens)

    def enqueue(self) -> None:
        self.record = self.path.record()
        self.output = self.path.run(*self.input, self.record)
        self.best = self.output.argmax(-1)

    def logits(self) -> torch.Tensor:
        self.enqueue()
        return self.output

    def picks(self) -> Any:
        return self.record.read()

    def tokens(self) -> list[int]:
        return self.best.tolist()


class Captured:
    """Another step in a CUDA or HIP graph."""

    def __init__(self, step: StandardStep) -> None:
        import torch

        self.step = step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # first runs allocate and choose algorithms, which a capture cannot hold
            for _ in range(2):
                step.enqueue()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step.enqueue()

    def place(self, tokens: torch.Tensor) -> None:
        self.step.place(tokens)

    def enqueue(self) -> None:
        self.graph.replay()

    def logits(self) -> torch.Tensor:
        self.enqueue()
        return self.step.output

    def picks(self) -> Any:
        return self.step.picks()  # the graph's memory, which a replay writes again

    def tokens(self) -> list[int]:
        return self.step.tokens()


class MegaStep:
    """One launch."""

    def __init__(self, subject: Subject, batch: StepBatch, *, alone: bool = False) -> None:
        self.path, self.batch, self.vocab = subject.mega(alone=alone), batch, subject.model.config.vocab_size
        self.subject, self.alone = subject, alone
        self.path.place(batch, logits=False)

    def place(self, tokens: torch.Tensor) -> None:
        self.batch = dataclasses.replace(self.batch, tokens=tokens)
        self.path.place(self.batch, logits=False)

    def enqueue(self) -> None:
        self.path.enqueue()

    def logits(self) -> torch.Tensor:
        # A store each, which timed steps do without. Of all ranks' parts of the vocabulary, which are copies, one.
        self.values = self.path.decode(self.batch).logits[:, : self.vocab].clone()
        self.path.place(self.batch, logits=False)
        return self.values

    def picks(self) -> Any:
        picks, logits = self.subject.mega_picks(self.batch, alone=self.alone)
        if not bool((logits[:, : self.vocab] == self.values).all()):
            raise DriverError("launched layer by layer, the mega-task gives other bits than in one launch.")
        return picks

    def tokens(self) -> list[int]:
        return self.path.result().tokens.tolist()


def _eager(subject: Subject, batch: StepBatch) -> Step:
    return StandardStep(subject.standard(), batch)


def _graph(subject: Subject, batch: StepBatch) -> Step:
    if subject.device.type == "cpu":
        raise RequestError("a CPU has no graphs.")
    return Captured(StandardStep(subject.standard(), batch))


def _compiled(subject: Subject, batch: StepBatch) -> Step:
    """Each layer by torch.compile, all layers of a kind by one compilation; on a GPU in a graph of ours."""
    import torch

    path = subject.standard()
    torch._dynamo.reset()  # or shapes that were measured before count against the limit of compilations
    path._layer = torch.compile(path._layer, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs")
    step = StandardStep(path, batch)
    return step if subject.device.type == "cpu" else Captured(step)


def _fused(subject: Subject, batch: StepBatch) -> Step:
    """What an engine would run, sized for this context."""
    if subject.device.type == "cpu":
        raise RequestError("Triton kernels need a GPU.")
    return Captured(StandardStep(subject.fused(int(batch.positions.max()) + 1), batch))


def _mega(subject: Subject, batch: StepBatch) -> Step:
    return MegaStep(subject, batch)


def _mega_alone(subject: Subject, batch: StepBatch) -> Step:
    """Without the hand-offs between ranks, as the other arms are: what those cost."""
    if subject.options.tp == 1:
        raise RequestError("one rank has no hand-offs between ranks: it is the mega arm.")
    return MegaStep(subject, batch, alone=True)


ARMS: dict[str, Arm] = {
    "standard": Arm("standard path, eager", _eager, on_cpu=True),
    "graph": Arm("standard path, graph", _graph),
    "compiled": Arm("standard path, torch.compile and graph", _compiled),
    "fused": Arm("standard path, fused Triton kernels, graph", _fused),
    "mega": Arm("mega-task, one launch a token", _mega, standard=False, on_cpu=True),
    "mega-alone": Arm("mega-task without the hand-offs between ranks", _mega_alone, standard=False, of_ranks=True),
}


def default_arms(on_cpu: bool, tp: int) -> tuple[str, ...]:
    """The arms that are measured if nobody chose."""
    return tuple(name for name, arm in ARMS.items() if (arm.on_cpu or not on_cpu) and (tp > 1 or not arm.of_ranks))
