"""The residual streams' stages against the formulas of models/deepseek."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocmega.models.common.formulas import inverse_rms
from rocmega.models.deepseek import formulas
from tests.stages.kit import Region, function, run

SOURCE = Path(__file__).with_name("streams.hip")
STAGES = ("load", "mix", "site", "collapse", "expand")
STREAMS, ROUNDS, NORM_EPS, EPS = 4, 20, 1e-6, 1e-6
OUT = (2 + STREAMS) * STREAMS


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def site(hidden: int, rows: int, *, blocks: int, seed: int | None = None, rounds: int = ROUNDS) -> dict:
    """What the stages leave, and what went in."""
    streams = randn(16, STREAMS, hidden, seed=1)[:rows].contiguous()
    weights = randn(OUT, STREAMS * hidden, seed=2) / (STREAMS * hidden) ** 0.5
    scale, base = 1 + 0.2 * randn(3, seed=3), 0.5 * randn(OUT, seed=4)
    of = function(SOURCE, "streams", f"constexpr int ROWS = 16, STREAMS = {STREAMS}, HIDDEN = {hidden};", STAGES)
    width = STREAMS * hidden
    slices = 1 if width % 512 else width // 512
    shapes = {"h": width, "products": slices * (OUT + 1), "site": OUT, "x": hidden, "next": width, "next_x": hidden}
    regions = {name: Region(rows * count, pairs=True) for name, count in shapes.items()}
    inputs = {"streams": streams, "weights": weights, "scale": scale, "base": base}
    numbers = {"rows": rows, "epoch": 5, "poll_limit": 10**6, "rounds": rounds, "norm_eps": NORM_EPS, "eps": EPS}
    left = run(of, {**numbers, **inputs, **regions}, blocks=blocks, seed=seed)
    return {**inputs, **{name: left[name].view(rows, -1) for name in shapes}}


def expected(inputs: dict, rounds: int = ROUNDS) -> tuple[torch.Tensor, ...]:
    flat = inputs["streams"].flatten(1)
    mixes = (flat * inverse_rms(flat, NORM_EPS)) @ inputs["weights"].T
    return formulas.site_weights(mixes, inputs["scale"], inputs["base"], STREAMS, rounds, EPS)


@pytest.mark.parametrize("hidden", [256, 1024, 48])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_stages_compute_the_formulas(hidden, rows):
    """Within 2e-6 of values around 1, float32 sums in another order; streams are sums of four products."""
    found = site(hidden, rows, blocks=3)
    collapse, spread, mix = expected(found)
    weights = torch.cat([collapse, spread, mix.flatten(1)], dim=1)
    torch.testing.assert_close(found["site"], weights, atol=5e-6, rtol=0)
    x = formulas.collapse(found["streams"], collapse)
    torch.testing.assert_close(found["x"], x, atol=2e-5, rtol=0)
    after = formulas.expand(found["streams"], 2 * x, spread, mix)
    torch.testing.assert_close(found["next"], after.flatten(1), atol=5e-5, rtol=0)
    torch.testing.assert_close(found["next_x"], formulas.collapse(after, collapse), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds_are_counted(rounds):
    found = site(256, 2, blocks=2, rounds=rounds)
    _, _, mix = expected(found, rounds)
    torch.testing.assert_close(found["site"][:, 2 * STREAMS :], mix.flatten(1), atol=5e-6, rtol=0)
    assert (expected(found, rounds + 1)[2] - mix).abs().max() > 1e-4


def test_bits_depend_on_nothing_but_the_row():
    first = site(1024, 16, blocks=1)
    for rows, blocks, seed in ((16, 5, 1), (16, 40, 2), (3, 7, 3)):
        again = site(1024, rows, blocks=blocks, seed=seed)
        for name in ("site", "x", "next", "next_x"):
            assert torch.equal(again[name], first[name][:rows]), (name, blocks)
