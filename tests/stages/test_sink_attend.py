"""Attention over window and compressed entries with sinks, against the formulas of models/deepseek."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocmega.cache import PAGE
from rocmega.models.common.formulas import attention_partial, inverse_rms, pair_angles
from rocmega.models.deepseek import formulas
from rocmega.models.deepseek.cache import places
from tests.stages.kit import Region, function, run

SOURCE = Path(__file__).with_name("sink_attend.hip")
HEADS, D, ROPE, WINDOW, SLOTS, MAX_PAGES = 20, 64, 16, 48, 20, 5
SCALE = D**-0.5
POSITIONS = (0, 3, 46, 47, 48, 100, 127, 255, 7, 31, 63, 64, 200, 299, 15, 16)
STALE = 1e4


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Bench:
    """Requests at POSITIONS; ratio 0: no compressed entries; k 0: all of them; normed: queries come without a norm."""

    def __init__(self, ratio: int, k: int, rows: int = 16, format: str = "F32", normed: bool = False):
        self.ratio, self.k, self.rows, self.format, self.normed = ratio, k, rows, format, normed
        self.dtype = torch.float32 if format == "F32" else torch.bfloat16
        order = torch.Generator().manual_seed(7)
        self.positions = torch.tensor(POSITIONS[:rows], dtype=torch.int32)
        self.slots = torch.randperm(SLOTS, generator=order)[:rows].to(torch.int32)
        self.table = torch.randperm(16 * MAX_PAGES, generator=order).view(16, MAX_PAGES)[:rows].to(torch.int32)
        self.given = randn(16, HEADS, D, seed=1)[:rows].to(self.dtype).float().contiguous()
        self.query = self.given * inverse_rms(self.given, 1e-6) if normed else self.given
        self.sinks = randn(HEADS, seed=2)
        self.ring = randn(SLOTS, WINDOW, D, seed=3).to(self.dtype)
        self.entries = randn(16 * MAX_PAGES, places(ratio or 1), D, seed=4).to(self.dtype)
        self.own_window, self.own_entry = (randn(16, D, seed=seed)[:rows].to(self.dtype) for seed in (5, 6))
        self.listed = torch.stack([self._listed(row) for row in range(rows)]).to(torch.int32)
        self.frequencies = formulas.frequencies(ROPE, 10000.0, None)

    def made(self, row: int) -> int:
        return (POSITIONS[row] + 1) // self.ratio if self.ratio else 0

    def _listed(self, row: int) -> torch.Tensor:
        """A selection that has the newest entry in half of the rows."""
        if not self.k or self.made(row) <= self.k:
            return torch.zeros(max(1, self.k))
        chosen = torch.randperm(self.made(row) - 1, generator=torch.Generator().manual_seed(row))[: self.k]
        if row % 2:
            chosen[0] = self.made(row) - 1
        return chosen.sort().values

    def run(self, blocks: int = 3, seed: int | None = None) -> torch.Tensor:
        rows = self.rows
        sizes = (
            f"constexpr int ROWS = 16, PAGE = {PAGE}, HEADS = {HEADS}, D = {D}, ROPE = {ROPE};\n"
            f"#define TESTED_FORMAT {self.format}"
        )
        max_splits = 2 + 10
        flags = Region(rows, pairs=True)
        squares = self.given.square().view(rows, HEADS, -1, 16).sum(-1) if self.normed else None
        left = run(
            function(SOURCE, "sink_attend", sizes, ("load", "attend", "merge")),
            {
                "rows": rows, "epoch": 4, "poll_limit": 10**6, "max_pages": MAX_PAGES, "max_splits": max_splits,
                "window": WINDOW, "ratio": self.ratio, "k": self.k, "scale": SCALE,
                "given": self.given, "squares": squares, "sinks": self.sinks,
                "rope": pair_angles(torch.arange(300), self.frequencies).contiguous(),
                "positions": self.positions, "slots": self.slots, "table": self.table.contiguous(),
                "listed": self.listed.contiguous(), "own_window": self.own_window.contiguous(),
                "own_entry": self.own_entry.contiguous(),
                "query": Region(rows * HEADS * D, pairs=True),
                "query_squares": Region(rows * HEADS * D // 16, pairs=True),
                "window_flags": flags, "entry_flags": flags,
                "selection_flags": flags, "split_flags": Region(rows * max_splits * -(-HEADS // 16), pairs=True),
                "merged": Region(rows * HEADS * D, pairs=True),
                "selection": Region(rows * max(1, self.k), torch.int32),
                "ring": Region(self.ring.numel(), self.dtype, before=self.ring),
                "entries": Region(self.entries.numel(), self.dtype, before=self.entries),
                "out": Region(rows * max_splits * HEADS * D), "stat": Region(rows * max_splits * HEADS * 2),
            },
            blocks=blocks,
            seed=seed,
        )  # fmt: skip
        return left["merged"].view(rows, HEADS, D)

    def expected(self) -> torch.Tensor:
        out = []
        for row, position in enumerate(POSITIONS[: self.rows]):
            ring = self.ring[self.slots[row]].clone()
            ring[position % WINDOW] = self.own_window[row]
            seen = [ring[at % WINDOW] for at in range(max(0, position + 1 - WINDOW), position + 1)]
            made = self.made(row)
            numbers = self.listed[row].tolist() if self.k and made > self.k else range(made)
            for number in numbers:
                page = self.table[row, (self.ratio * (number + 1) - 1) // PAGE]
                own = number == made - 1 and (position + 1) % self.ratio == 0
                seen.append(self.own_entry[row] if own else self.entries[page, number % places(self.ratio)])
            keys = torch.stack(seen)[None].float()
            every = torch.ones(1, 1, len(seen), dtype=torch.bool)
            partial = attention_partial(self.query[row][None], keys, every, SCALE, D)
            angles = formulas.backward(pair_angles(torch.tensor(position), self.frequencies))
            out.append(formulas.rope_trailing(formulas.with_sinks([partial], self.sinks)[0], angles))
        return torch.stack(out)


@pytest.mark.parametrize(
    ("ratio", "k", "format", "normed"),
    [(0, 0, "F32", True), (128, 0, "F32", False), (4, 8, "F32", True), (1, 40, "F32", False), (2, 32, "Bf16", False)],
)
def test_attention(ratio, k, format, normed):
    """Float32 within 5e-6 of values around 1; bf16 entries and queries meet exactly, probabilities are 2^-17 exact."""
    bench = Bench(ratio, k, format=format, normed=normed)
    torch.testing.assert_close(bench.run(), bench.expected(), atol=5e-6 if format == "F32" else 3e-5, rtol=0)


def test_bits_depend_on_nothing_but_the_row():
    whole = Bench(4, 8).run(blocks=1)
    for rows, blocks, seed in ((16, 9, 1), (5, 2, 2)):
        assert torch.equal(Bench(4, 8, rows).run(blocks=blocks, seed=seed), whole[:rows])
