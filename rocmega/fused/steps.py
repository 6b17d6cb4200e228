"""The fused path as the engine runs it: a graph for each number of rows and range of contexts.

A graph's grids and buffers are sized for a longest context, so one for all would make short contexts pay for long
ones: there is one for each power of two, captured when a step first needs it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rocmega.cache import PAGE
from rocmega.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from rocmega.step import StepBatch

SHORTEST = 1024  # tokens that the smallest graph is sized for


class FusedSteps:
    """Decode steps by a family's `FusedPath`, captured as graphs on a GPU.

    module: the family's module with the path. Its other arguments are the path's. Raises ConfigError, as a sentence
    without a subject, if Triton is not there or the model has dimensions that the kernels do not take.
    """

    def __init__(self, module: Any, config: Any, weights: Any, cache: Any, max_model_len: int) -> None:
        self._open = lambda length: module().FusedPath(config, weights, cache, max_model_len=length)
        self.max_model_len = max_model_len
        if find_spec("triton") is None:
            raise ConfigError("Triton is not installed")
        self._steps: dict[int, Any] = {}  # by the longest context
        self._step(SHORTEST)

    def decode(self, batch: StepBatch) -> torch.Tensor:
        """One token of each row: logits, float32 [rows, vocab], overwritten by a later step.

        Raises RequestError as `StepBatch.check` does.
        """
        length = self.length_for(int(batch.positions.max()) + 1)
        table = batch.block_table[:, : -(-length // PAGE)]
        logits: torch.Tensor = self._step(length).decode(replace(batch, block_table=table))
        return logits

    def length_for(self, context: int) -> int:
        """The context that a step of this one is sized for."""
        return min(self.max_model_len, max(SHORTEST, 1 << (context - 1).bit_length()))

    def _step(self, length: int) -> Any:
        length = min(length, self.max_model_len)
        if length not in self._steps:
            path = self._open(length)
            self._steps[length] = path if path.device.type == "cpu" else _captured(path, length)
        return self._steps[length]


def _captured(path: Any, length: int) -> Any:
    from rocmega.graph import GraphStep

    return GraphStep(path, -(-length // PAGE))
