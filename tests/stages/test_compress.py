"""Compressed cache entries against the formulas of models/deepseek."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rocmega.cache import PAGE
from rocmega.models.common.formulas import pair_angles, rms_norm
from rocmega.models.deepseek import formulas
from rocmega.models.deepseek.cache import places
from tests.stages.kit import Region, function, run

SOURCE = Path(__file__).with_name("compress.hip")
ROPE, EPS, SLOTS, MAX_PAGES = 16, 1e-6, 20, 5
STALE = 1e4
# First entries, last tokens of entries and others, pages' ends; of ratio 128 the first entry ends at 127.
POSITIONS = (7, 0, 3, 4, 63, 64, 126, 127, 255, 1, 15, 16, 31, 130, 191, 2)


@dataclass(frozen=True)
class Kind:
    """A compressor as some layer has it."""

    width: int
    ratio: int
    pooling: str
    ape: bool
    latent: bool
    format: str = "F32"

    @property
    def twice(self) -> int:
        return 2 if self.pooling == "OVERLAP" else 1

    @property
    def span(self) -> int:
        return self.twice * self.ratio

    @property
    def values(self) -> int:
        return self.width if self.pooling == "NONE" else 2 * self.twice * self.width


KINDS = {
    "V4 ratio 4": Kind(64, 4, "OVERLAP", ape=True, latent=False),
    "V4 ratio 4, wide, bf16": Kind(1024, 4, "OVERLAP", ape=True, latent=False, format="Bf16"),
    "V4 ratio 128": Kind(64, 128, "OWN", ape=True, latent=False),
    "V4.1 ratio 2": Kind(64, 2, "OWN", ape=False, latent=True),
    "V4.1 ratio 1": Kind(64, 1, "NONE", ape=False, latent=True),
    "V4.1 keys of ratio 2": Kind(32, 2, "NONE", ape=False, latent=False),
}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Bench:
    """Requests at POSITIONS, their state random, pages scattered and full of stale values."""

    def __init__(self, kind: Kind, rows: int = 16):
        self.kind, self.rows = kind, rows
        wide = kind.twice * kind.width
        self.positions = torch.tensor(POSITIONS[:rows], dtype=torch.int32)
        order = torch.Generator().manual_seed(7)
        self.slots = torch.randperm(SLOTS, generator=order)[:rows].to(torch.int32)
        self.table = torch.randperm(rows * MAX_PAGES, generator=order).view(rows, MAX_PAGES).to(torch.int32)
        self.given = randn(16, kind.values, seed=1)[:rows].contiguous()
        self.ape = randn(kind.ratio, wide, seed=2) if kind.ape else None
        self.norm = 1 + 0.1 * randn(kind.width, seed=3)
        self.frequencies = formulas.frequencies(ROPE, 10000.0, None)
        self.pending = randn(SLOTS, kind.span, 2, wide, seed=4)
        dtype = torch.float32 if kind.format == "F32" else torch.bfloat16
        self.entries = torch.full((rows * MAX_PAGES, places(kind.ratio), kind.width), STALE, dtype=dtype)

    def run(self, blocks: int = 3, seed: int | None = None) -> dict[str, torch.Tensor]:
        kind, rows = self.kind, self.rows
        sizes = (
            f"constexpr int ROWS = 16, PAGE = {PAGE}, D = {kind.width}, ROPE = {ROPE}, RATIO = {kind.ratio};\n"
            f"#define TESTED_POOLING Pooling::{kind.pooling}\n#define TESTED_FORMAT {kind.format}"
        )
        of = function(SOURCE, "compress", sizes, ("load", "compress"))
        rope = pair_angles(torch.arange(256), self.frequencies).contiguous()
        left = run(
            of,
            {
                "rows": rows, "epoch": 9, "poll_limit": 10**6, "max_pages": MAX_PAGES, "eps": EPS,
                "given": self.given, "ape": self.ape, "norm": self.norm, "rope": rope,
                "positions": self.positions, "slots": self.slots, "table": self.table.contiguous(),
                "products": Region(rows * kind.values, pairs=True),
                "pending": Region(self.pending.numel(), before=self.pending),
                "entries": Region(self.entries.numel(), self.entries.dtype, before=self.entries),
                "latent": Region(rows * kind.width, pairs=True) if kind.latent else None,
                "flags": Region(rows, pairs=True),
            },
            blocks=blocks,
            seed=seed,
        )  # fmt: skip
        shapes = {"pending": self.pending.shape, "entries": self.entries.shape, "latent": (rows, kind.width)}
        return {name: left[name].view(shape) for name, shape in shapes.items() if name in left}

    def expected(self) -> dict[str, torch.Tensor]:
        kind, pending, entries = self.kind, self.pending.clone(), self.entries.clone()
        latent = torch.zeros(self.rows, kind.width)
        for row, (position, slot) in enumerate(zip(self.positions.tolist(), self.slots.tolist(), strict=True)):
            entry = self.given[row]
            if kind.pooling != "NONE":
                values, gates = entry.view(2, -1)
                gates = gates + self.ape[position % kind.ratio] if kind.ape else gates
                pending[slot, position % kind.span] = torch.stack([values, gates])
                before = torch.arange(position - kind.span + 1, position + 1)
                tokens = pending[slot, before % kind.span][None].unbind(2)
                if kind.pooling == "OVERLAP":
                    tokens = [formulas.overlapping(of) for of in tokens]
                entry = formulas.pooled(*tokens, (before >= 0)[None])[0]
            if (position + 1) % kind.ratio:
                continue
            latent[row] = rms_norm(entry, self.norm, EPS)
            angles = pair_angles(torch.tensor(position + 1 - kind.ratio), self.frequencies)
            page = int(self.table[row, position // PAGE])
            at = position // kind.ratio % places(kind.ratio)
            entries[page, at] = formulas.rope_trailing(latent[row], angles).to(entries.dtype)
        return {"pending": pending, "entries": entries, "latent": latent}


@pytest.mark.parametrize("name", KINDS)
def test_entries_and_state(name):
    """Entries within 5e-6 of values around 1 (bf16: a bit of 8), what else the memory held untouched."""
    bench = Bench(KINDS[name])
    found, expected = bench.run(), bench.expected()
    for what, values in found.items():
        near = 2**-7 if values.dtype == torch.bfloat16 else 5e-6
        torch.testing.assert_close(values.float(), expected[what].float(), atol=near, rtol=near)
        if what == "entries":
            assert torch.equal(values == STALE, expected[what] == STALE)
    assert torch.equal(found["pending"] == bench.pending, expected["pending"] == bench.pending)


def test_bits_depend_on_nothing_but_the_row():
    kind = KINDS["V4 ratio 4"]
    whole = Bench(kind).run(blocks=1)
    for rows, blocks, seed in ((16, 9, 1), (5, 2, 2)):
        bench = Bench(kind, rows)
        found = bench.run(blocks=blocks, seed=seed)
        for row in range(rows):
            position, slot = POSITIONS[row], int(bench.slots[row])
            assert torch.equal(found["pending"][slot], whole["pending"][int(Bench(kind).slots[row])])
            if (position + 1) % kind.ratio == 0:
                at = position // kind.ratio % places(kind.ratio)
                mine = found["entries"][int(bench.table[row, position // PAGE]), at]
                theirs = whole["entries"][int(Bench(kind).table[row, position // PAGE]), at]
                assert torch.equal(mine, theirs)
