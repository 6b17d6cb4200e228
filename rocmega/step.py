"""One decode step's input, the same for every path, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StepBatch:
    """The rows of one decode step: different requests, each at its own position, or successive tokens of one.

    Fields:
        tokens: int32 [rows], the tokens to run.
        positions: int32 [rows], their positions, which are also the numbers of cached tokens before them.
        block_table: int32 [rows, max_pages], page of each PAGE positions; entries past a row's position are not read.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor

    @property
    def rows(self) -> int:
        """How many rows the step has."""
        return self.tokens.shape[0]

    def first_written(self) -> torch.Tensor:
        """The lowest position that the step writes of each row's sequence, int32 [rows].

        A row's own position, unless the row before it is the token before it: then that row's. They are of one sequence
        if they share the page that the row before writes to, since nobody else has that one.
        """
        import torch

        from rocmega.cache import PAGE

        positions = self.positions.tolist()
        first = list(positions)
        for row in range(1, self.rows):
            page = positions[row - 1] // PAGE
            same = bool(self.block_table[row, page] == self.block_table[row - 1, page])
            if same and positions[row] == positions[row - 1] + 1:
                first[row] = first[row - 1]
        return torch.tensor(first, dtype=torch.int32)

    def check(
        self, *, vocab: int, cache_pages: int, max_rows: int | None = None, max_model_len: int | None = None
    ) -> None:
        """Raises RequestError if a row cannot be run: before any kernel sees it. cache_pages: pages of the cache."""
        rows = self.rows
        if (
            rows == 0
            or self.positions.shape != (rows,)
            or self.block_table.dim() != 2
            or self.block_table.shape[0] != rows
        ):
            raise RequestError(
                f"a step wants tokens [rows], positions [rows] and a block table [rows, pages], not "
                f"{list(self.tokens.shape)}, {list(self.positions.shape)} and {list(self.block_table.shape)}."
            )
        if max_rows is not None and rows > max_rows:
            raise RequestError(
                f"the step has {rows} rows and at most {max_rows} are configured: raise max_rows or send fewer."
            )
        check_tokens(self.tokens, vocab)
        last = int(self.positions.max())
        if int(self.positions.min()) < 0:
            raise RequestError(f"position {int(self.positions.min())} is negative: positions count from 0.")
        if max_model_len is not None and last >= max_model_len:
            raise RequestError(
                f"position {last} is past the configured context of {max_model_len} tokens: raise max_model_len."
            )
        from rocmega.cache import PAGE

        pages = self.positions.long() // PAGE + 1
        if int(pages.max()) > self.block_table.shape[1]:
            raise RequestError(
                f"position {last} needs {int(pages.max())} pages and the block table has {self.block_table.shape[1]}."
            )
        usable = (self.block_table >= 0) & (self.block_table < cache_pages)
        written = usable.long().cumprod(dim=1).sum(dim=1)
        if bool((written < pages.to(written.device)).any()):
            row = int((written < pages.to(written.device)).nonzero()[0])
            raise RequestError(
                f"row {row} is at position {int(self.positions[row])} but has no page in the cache: grow it first."
            )


def check_tokens(tokens: torch.Tensor, vocab: int) -> None:
    """Raises RequestError unless all tokens are in the vocabulary."""
    if tokens.numel() == 0:
        raise RequestError("there are no tokens to run: a prompt needs at least one.")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise RequestError(f"token {low if low < 0 else high} is not in the vocabulary: ids go from 0 to {vocab - 1}.")


def check_prompt(
    tokens: torch.Tensor, position0: int, block_table: torch.Tensor, chunk: int, *, vocab: int, longest: int
) -> int:
    """Raises RequestError unless one request's tokens can run at position0 and the next; returns where they end.

    tokens: integers [n]; block_table: int32 [pages] of the request; longest: the model's longest context.
    """
    from rocmega.cache import PAGE

    check_tokens(tokens, vocab)
    end = position0 + tokens.shape[0]
    if end > longest:
        raise RequestError(
            f"{end} tokens are more than the {longest} of the model's longest context: shorten the prompt."
        )
    pages = -(-end // PAGE)
    if position0 < 0 or chunk < 1 or pages > block_table.shape[0] or bool((block_table[:pages] < 0).any()):
        raise RequestError(f"positions {position0} to {end - 1} need {pages} pages: grow the request's block table.")
    return end


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    Fields:
        tokens: int32 [rows] on the CPU, as chosen; without a choice the largest logit (ties to the lowest id).
        logits: f32 [rows, vocab] on the device, or None if they were not asked for; overwritten by the next step.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
