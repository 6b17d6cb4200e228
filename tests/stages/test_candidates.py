"""Candidates, and selections that are bound to them, against the formulas of models/deepseek."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocmega.cache import PAGE
from rocmega.models.common.formulas import select
from rocmega.models.deepseek import formulas
from tests.stages.kit import Region, function, run

SOURCE = Path(__file__).with_name("candidates.hip")
STAGES = ("scores", "later_scores", "candidates", "select")
BLOCKS, SIZE, TOPK, MAX_PAGES = 5, 4, 8, 3
# Nothing to select; all blocks are candidates; one more than that; pages' borders; the last block not full.
POSITIONS = (3, 8, 19, 20, 21, 62, 63, 64, 100, 127, 128, 150, 189, 191, 0, 40)


def given(rows: int, ties: bool) -> dict[str, torch.Tensor]:
    """Scores of two layers; ties: of few different values."""
    source = torch.Generator().manual_seed(1)
    first, later = (torch.randn(16, MAX_PAGES * PAGE, generator=source)[:rows] for _ in range(2))
    return {"first": first.round() if ties else first, "later": later.round() if ties else later}


def step(
    rows: int, ratio: int, ties: bool, *, blocks: int = 3, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks are taken [rows, blocks], and what is selected [rows, TOPK]."""
    sizes = (
        f"constexpr int ROWS = 16, PAGE = {PAGE}, BLOCKS = {BLOCKS}, SIZE = {SIZE}, TOPK = {TOPK};\n"
        f"constexpr u32 RATIO = {ratio};\n"
    )
    of = function(SOURCE, "candidates", '#include "platform/types.h"\n' + sizes, STAGES)
    entries = rows * MAX_PAGES * PAGE
    regions = {
        "scores": Region(entries), "later_scores": Region(entries),
        "score_flags": Region(rows * MAX_PAGES, pairs=True), "later_flags": Region(rows * MAX_PAGES, pairs=True),
        "candidate_flags": Region(rows, pairs=True), "selection_flags": Region(rows, pairs=True),
        "taken": Region(entries // SIZE, torch.int32), "selection": Region(rows * TOPK, torch.int32),
    }  # fmt: skip
    numbers = {"rows": rows, "epoch": 5, "poll_limit": 10**6, "max_pages": MAX_PAGES}
    positions = torch.tensor(POSITIONS[:rows], dtype=torch.int32)
    left = run(of, {**numbers, **given(rows, ties), "positions": positions, **regions}, blocks=blocks, seed=seed)
    return left["taken"].view(rows, -1), left["selection"].view(rows, TOPK)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
def test_candidates_and_what_is_selected_from_them(ratio: int, ties: bool) -> None:
    taken, selection = step(16, ratio, ties)
    scores = given(16, ties)
    for row, position in enumerate(POSITIONS):
        count = torch.tensor([[(position + 1) // ratio]])
        made = int(count)
        if made <= TOPK:
            continue
        first, later = (scores[name][row, :made][None, None] for name in ("first", "later"))
        best = formulas.block_scores(first, count, SIZE)
        chosen, valid = formulas.candidate_blocks(best, count, BLOCKS, SIZE)
        if best.shape[-1] > BLOCKS:
            assert taken[row, : best.shape[-1]].nonzero().flatten().tolist() == chosen[valid].tolist()
        mask = formulas.candidate_mask(chosen, valid, SIZE, made)
        places, _ = select(later.masked_fill(~mask, float("-inf")), count - 1, TOPK)
        assert selection[row].tolist() == places[0, 0].tolist()


def test_bits_depend_on_nothing_but_the_row() -> None:
    whole = step(16, 1, False, blocks=1)
    for rows, blocks, seed in ((16, 7, 1), (9, 4, 2)):
        for mine, theirs in zip(step(rows, 1, False, blocks=blocks, seed=seed), whole, strict=True):
            assert torch.equal(mine, theirs[:rows])
