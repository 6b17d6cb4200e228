"""Engram's stages, and the functions of activations.h, against the formulas of models/deepseek."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocmega.checkpoint.quantize import quantize_mxfp8
from rocmega.models.deepseek import formulas
from rocmega.models.deepseek.config import Engram
from rocmega.models.deepseek.engram import Table, multipliers, primes
from tests.stages.kit import Region, function, run

SOURCE = Path(__file__).with_name("engram.hip")
STAGES = ("load", "look_up", "dots", "add")
STREAMS, EPS, SLOTS, VOCAB = 4, 1e-20, 20, 64
ENGRAM = Engram((1, 4), (0, 0), 4, 2, 32, 97, 2, 40)
POSITIONS = (0, 1, 2, 3, 4, 100, 7, 5, 0, 1, 2, 3, 63, 64, 9, 11)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def sizes(hidden: int) -> str:
    return f"constexpr int ROWS = 16, STREAMS = {STREAMS}, HIDDEN = {hidden}, NGRAM = 4, HASH_HEADS = 2, DIM = 32;"


def step(hidden: int, rows: int, quantized: bool, *, blocks: int = 3, seed: int | None = None) -> tuple[dict, dict]:
    """What went in, and what the stages left."""
    heights = torch.tensor(primes(2, 4, 2, 97)[1], dtype=torch.int32)
    table = randn(int(heights.sum()), ENGRAM.head_dim, seed=1)
    codes, scales = quantize_mxfp8(table) if quantized else (table, None)
    given = {
        "streams": randn(16, STREAMS, hidden, seed=2)[:rows].contiguous(),
        "mapped": randn(16, STREAMS + 1, hidden, seed=3)[:rows].contiguous(),
        "q_weight": 1 + 0.1 * randn(STREAMS, hidden, seed=4),
        "k_weight": 1 + 0.1 * randn(STREAMS, hidden, seed=5),
        "multipliers": torch.tensor(multipliers(4, ENGRAM)),
        "heights": heights,
        "ids": integers(40, VOCAB, seed=6),
        "tokens": integers(VOCAB, 16, seed=7)[:rows].contiguous(),
        "positions": torch.tensor(POSITIONS[:rows], dtype=torch.int32),
        "slots": torch.randperm(SLOTS, generator=torch.Generator().manual_seed(8))[:rows].to(torch.int32),
        "table": codes,
        "scales": scales,
    }
    recent = integers(VOCAB, SLOTS, 4, seed=9)
    columns = 6 * ENGRAM.head_dim
    pieces = -(-hidden // 512)
    regions = {
        "recent": Region(recent.numel(), torch.int32, before=recent),
        "h": Region(rows * STREAMS * hidden, pairs=True),
        "kv": Region(rows * (STREAMS + 1) * hidden, pairs=True),
        "rows_out": Region(rows * columns, pairs=True),
        "dots": Region(rows * pieces * 3 * STREAMS, pairs=True),
        "next": Region(rows * STREAMS * hidden, pairs=True),
    }
    numbers = {"rows": rows, "epoch": 3, "poll_limit": 10**6, "padding": 2, "eps": EPS}
    of = function(SOURCE, "engram", sizes(hidden), STAGES)
    left = run(of, {**numbers, **given, **regions}, blocks=blocks, seed=seed)
    return {**given, "before": recent}, {
        "rows": left["rows_out"].view(rows, columns),
        "recent": left["recent"].view(SLOTS, 4),
        "next": left["next"].view(rows, STREAMS, hidden),
    }


@pytest.mark.parametrize("quantized", [False, True])
def test_rows_are_looked_up(quantized):
    given, found = step(48, 16, quantized)
    history = []
    for row, position in enumerate(POSITIONS):
        back = [
            int(given["before"][given["slots"][row], (position - k) % 4]) if k <= position else 2 for k in range(1, 4)
        ]
        history.append([int(given["tokens"][row]), *back])
    expected = Table(ENGRAM, 4, given["table"], given["scales"]).look_up(given["ids"][torch.tensor(history)].long())
    assert torch.equal(found["rows"], expected)
    recent = given["before"].clone()
    recent[given["slots"].long(), given["positions"].long() % 4] = given["tokens"]
    assert torch.equal(found["recent"], recent)


@pytest.mark.parametrize("hidden", [48, 1280])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_gate(hidden, rows):
    """Within 1e-5 of values of a few units: sums of up to 1280 products in another order."""
    given, found = step(hidden, rows, True)
    keys, value = given["mapped"][:, :STREAMS], given["mapped"][:, STREAMS]
    gate = formulas.engram_gate(given["streams"], keys, given["q_weight"], given["k_weight"], EPS)
    expected = given["streams"] + gate[..., None] * value[:, None]
    torch.testing.assert_close(found["next"], expected, atol=1e-5, rtol=0)


def test_bits_depend_on_nothing_but_the_row():
    _, whole = step(1280, 16, True, blocks=1)
    for rows, blocks, seed in ((16, 11, 1), (3, 4, 2)):
        _, found = step(1280, rows, True, blocks=blocks, seed=seed)
        assert torch.equal(found["next"], whole["next"][:rows])
        assert torch.equal(found["rows"], whole["rows"][:rows])


def test_router_score_and_clamped_gate():
    """Relative error 1e-6 over the range of logits, against float64."""
    x = torch.cat([torch.linspace(-80, 80, 4001), torch.tensor([0.0, -1e-8, 1e-8, -87.0, 12.0, -12.0])])
    y = x.flip(0) * 0.9
    of = function(SOURCE, "functions", sizes(48), STAGES)
    numbers = {"count": len(x), "limit": 10.0}
    left = run(of, {**numbers, "x": x, "y": y, "score": Region(len(x)), "gated": Region(len(x))}, blocks=1)
    torch.testing.assert_close(left["score"].double(), formulas.router_scores(x.double()), atol=0, rtol=1e-6)
    gated = formulas.clamped_swiglu(x.double(), y.double(), 10.0)
    torch.testing.assert_close(left["gated"].double(), gated, atol=1e-30, rtol=2e-6)
