"""Formulas that are easy to get subtly wrong, against slower ones written another way and published numbers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.errors import CheckpointError
from rocmega.models.common.formulas import attention_partial
from rocmega.models.deepseek import formulas
from rocmega.models.deepseek.config import Yarn, from_dict
from rocmega.models.deepseek.engram import NgramHash, multipliers, primes, token_map
from rocmega.models.deepseek.presets import preset


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    square = formulas.sinkhorn(randn(5, 4, 4), 20, 1e-6)
    torch.testing.assert_close(square.sum(-1), torch.ones(5, 4), atol=1e-3, rtol=0)
    torch.testing.assert_close(square.sum(-2), torch.ones(5, 4), atol=1e-5, rtol=0)


def test_expanding_sums_over_the_first_stream():
    streams, y, spread, mix = randn(3, 4, 8), randn(3, 8, seed=1), randn(3, 4, seed=2), randn(3, 4, 4, seed=3)
    out = formulas.expand(streams, y, spread, mix)
    for row in range(3):
        for to in range(4):
            mixed = sum(mix[row, stream, to] * streams[row, stream] for stream in range(4))
            torch.testing.assert_close(out[row, to], spread[row, to] * y[row] + mixed)


def test_yarn_keeps_quick_pairs_and_slows_slow_ones():
    """At the published numbers the ramp goes from pair 15 to pair 25 of 32."""
    plain, slowed = (formulas.frequencies(64, 160000, yarn) for yarn in (None, Yarn(16, 32, 1, 65536)))
    assert torch.equal(slowed[:16], plain[:16])
    torch.testing.assert_close(slowed[25:], plain[25:] / 16)
    between = slowed[16:25] / plain[16:25]
    assert (between.diff() < 0).all()
    assert between.max() < 1
    assert between.min() > 1 / 16


def test_turning_back_undoes_a_rotation():
    x, angles = randn(3, 32), torch.stack([torch.tensor([0.3, 2.0]).cos(), torch.tensor([0.3, 2.0]).sin()], -1)
    turned = formulas.rope_trailing(x, angles)
    assert torch.equal(turned[:, :28], x[:, :28])
    torch.testing.assert_close(formulas.rope_trailing(turned, formulas.backward(angles)), x)


def test_pooling_leaves_out_what_does_not_exist():
    values, gates = randn(2, 4, 6), randn(2, 4, 6, seed=1)
    known = torch.tensor([[True] * 4, [False, False, True, True]])
    out = formulas.pooled(values, gates, known)
    for at, tokens in ((0, slice(0, 4)), (1, slice(2, 4))):
        weights = gates[at, tokens].exp() / gates[at, tokens].exp().sum(0)
        torch.testing.assert_close(out[at], (values[at, tokens] * weights).sum(0))


def test_overlap_takes_the_first_half_of_earlier_tokens():
    values = torch.arange(4 * 6).view(1, 4, 6)
    assert formulas.overlapping(values).tolist() == [[[0, 1, 2], [6, 7, 8], [15, 16, 17], [21, 22, 23]]]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_candidates_are_the_best_blocks_and_the_newest(data):
    length, size, blocks = (data.draw(st.integers(1, top)) for top in (30, 5, 5))
    scores = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5]), min_size=length, max_size=length))
    count = data.draw(st.integers(1, length))
    counts = torch.tensor([[count]])
    chosen = formulas.candidate_blocks(
        formulas.block_scores(torch.tensor([[scores]]), counts, size), counts, blocks, size
    )
    mask = formulas.candidate_mask(*chosen, size, length)[0, 0]
    newest = (count - 1) // size
    best = {block: max(scores[block * size : min((block + 1) * size, count)]) for block in range(newest + 1)}
    ranked = sorted(best, key=lambda block: (block != newest, -best[block], block))[:blocks]
    assert mask[:count].tolist() == [at // size in ranked for at in range(count)]


def test_sinks_take_part_in_the_softmax_alone():
    query, entries, sinks = randn(1, 3, 8), randn(1, 5, 8, seed=1), randn(3, seed=2)
    seen = torch.ones(1, 1, 5, dtype=torch.bool)
    parts = [attention_partial(query, entries[:, of], seen[..., of], 0.5, 8) for of in (slice(0, 2), slice(2, 5))]
    scores = torch.cat([query @ entries.mT * 0.5, sinks[None, :, None]], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(formulas.with_sinks(parts, sinks), scores @ entries)


def test_nothing_seen_is_nothing():
    query, entries = randn(1, 3, 8), randn(1, 5, 8, seed=1)
    none = attention_partial(query, entries, torch.zeros(1, 1, 5, dtype=torch.bool), 0.5, 8)
    assert formulas.with_sinks([none], randn(3, seed=2)).eq(0).all()


def test_clamps():
    gate, up = torch.tensor([-20.0, 20.0, 1.0]), torch.tensor([-20.0, 20.0, 1.0])
    silu = [-20 / (1 + math.exp(20)), 10 / (1 + math.exp(-10)), 1 / (1 + math.exp(-1))]
    expected = torch.tensor([silu[0] * -10, silu[1] * 10, silu[2]])
    torch.testing.assert_close(formulas.clamped_swiglu(gate, up, 10.0), expected)


# Engram: numbers of the published model.


def test_published_primes_and_multipliers():
    heights = primes(2, 4, 8, 16_000_000)
    assert heights[0][:3] == (16000057, 16000079, 16000081)
    assert heights[1][-1] == 16000889
    engram = from_dict(preset("deepseek-v4.1-flash")).engram
    assert multipliers(1, engram) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert multipliers(14, engram) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_rows_are_hashes_of_ngrams():
    engram = from_dict(preset("deepseek-v4.1-flash-tiny")).engram
    ids = torch.tensor([[299, 1, 2, 3], [0, 299, 299, 7]])
    rows = NgramHash(engram, 4, torch.device("cpu")).rows(ids)
    factors, heights = multipliers(4, engram), primes(2, 4, 2, 97)[1]
    for of, found in zip(ids.tolist(), rows.tolist(), strict=True):
        rolled, offset, expected = of[0] * factors[0], 0, []
        for back in (1, 2, 3):
            rolled ^= of[back] * factors[back]
            for height in heights[2 * back - 2 : 2 * back]:
                expected.append(offset + rolled % height)
                offset += height
        assert found == expected
    assert rows.max() < engram.rows[1]


def test_tokens_of_the_same_text_share_an_id(tmp_path):
    pytest.importorskip("tokenizers")
    words = ["a", "A", "à", "Ａ", "b", " ", "\t", "b ", "B", "ab", "\u00e9"]
    model = {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)}, "unk_token": "a"}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert token_map(file, len(words)).tolist() == [0, 0, 0, 0, 1, 2, 2, 1, 1, 3, 4]
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        token_map(tmp_path / "broken.json", 3)
