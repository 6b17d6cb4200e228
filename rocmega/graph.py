"""A decode step captured as a CUDA or HIP graph: one launch replays all of its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from rocmega.step import StepBatch

Placed = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]  # tokens, positions, block table, all int32


class GraphPath(Protocol):
    """What can be captured: shapes that depend on its inputs' alone, and a `run` that waits for nothing."""

    def place(self, batch: StepBatch) -> Placed: ...

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor: ...


class GraphStep:
    """A path's steps as graphs, one for each number of rows, captured when it is first needed.

    max_pages: width of the block tables that kernels see; narrower ones fit too. The path's weights and cache must stay
    where they are.
    """

    def __init__(self, path: GraphPath, max_pages: int):
        self.path, self.max_pages = path, max_pages
        self._steps: dict[int, tuple[Placed, Any, torch.Tensor]] = {}  # by rows: what the graph reads, it, its logits

    def decode(self, batch: StepBatch) -> torch.Tensor:
        """One step: logits, float32 [rows, vocab], overwritten by the next step. Raises as the path's `place` does."""
        placed = self.path.place(batch)
        if batch.rows not in self._steps:
            self._steps[batch.rows] = self._capture(placed)
        inputs, graph, logits = self._steps[batch.rows]
        for into, value in zip(inputs[:2], placed[:2], strict=True):
            into.copy_(value)
        inputs[2][:, : placed[2].shape[1]].copy_(placed[2])
        graph.replay()
        return logits

    def _capture(self, placed: Placed) -> tuple[Placed, Any, torch.Tensor]:
        """Runs the step once, so that all kernels are compiled and loaded, and then records it."""
        import torch

        tokens, positions, narrow = placed
        table = narrow.new_zeros(narrow.shape[0], self.max_pages)
        table[:, : narrow.shape[1]] = narrow
        inputs = (tokens.clone(), positions.clone(), table)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.path.run(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.path.run(*inputs)
        return inputs, graph, logits
