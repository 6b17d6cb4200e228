"""Formulas that are easy to get subtly wrong, against slower ones written another way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.models.common import formulas as shared
from rocmega.models.common.products import Products
from rocmega.models.glm import formulas
from rocmega.models.glm.weights import Formats


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_selection_is_exact_with_ties_to_the_lowest_position(data):
    length, topk = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 24))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5])  # many ties, as sums of ReLUs have
    scores = data.draw(st.lists(values, min_size=length, max_size=length))
    position = data.draw(st.integers(0, length - 1))
    selected, valid = formulas.select(torch.tensor([[scores]]), torch.tensor([[position]]), topk)
    ranked = sorted(range(position + 1), key=lambda at: (-scores[at], at))
    assert selected[valid].tolist() == sorted(ranked[: min(topk, position + 1)])
    assert selected.shape[-1] == min(topk, length)


def test_routing_ties_go_to_the_lowest_expert():
    scores = torch.tensor([[0.5, 0.25, 0.5, 0.5, 0.75]])
    experts, weights = formulas.route(scores, torch.zeros(5), 3, 2.5)
    assert experts.tolist() == [[0, 2, 4]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 0.75]]) / 1.75 * 2.5)


def test_routing_bias_chooses_and_does_not_weigh():
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.8]])
    experts, weights = formulas.route(scores, torch.tensor([0.0, 1.0, 1.0, 0.0]), 2, 1.0)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1 / 3, 2 / 3]]))


def test_rope_turns_adjacent_pairs():
    angles = formulas.rope_angles(torch.tensor([0, 5]), 100.0, 4)
    assert angles.shape == (2, 2, 2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(formulas.rope_adjacent(x, angles[0]), x)
    turned = formulas.rope_adjacent(x, angles[1])
    for pair, angle in enumerate((5.0, 0.5)):
        a, b = float(x[2 * pair]), float(x[2 * pair + 1])
        assert float(turned[2 * pair]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-6)
        assert float(turned[2 * pair + 1]) == pytest.approx(a * math.sin(angle) + b * math.cos(angle), abs=1e-6)
    wide = formulas.rope_leading(torch.cat([x, x]), angles[1])
    assert torch.equal(wide, torch.cat([turned, x]))


def test_index_scores_by_loops(monkeypatch):
    monkeypatch.setattr(shared, "KEY_BLOCK", 3)
    query, keys, weights = randn(2, 3, 4, 8), randn(2, 7, 8, seed=1), randn(2, 3, 4, seed=2)
    scores = formulas.index_scores(query, keys, weights, 0.25)
    for b, t, j in [(0, 0, 0), (1, 2, 6), (0, 1, 3)]:
        expected = sum(float(weights[b, t, h]) * max(0.0, float(query[b, t, h] @ keys[b, j]) * 0.25) for h in range(4))
        assert float(scores[b, t, j]) == pytest.approx(expected, rel=1e-5)


def test_partial_attentions_merge_to_the_whole():
    query, entries = randn(3, 4, 10), randn(3, 12, 10, seed=1)
    allowed = torch.rand(3, 4, 12, generator=torch.Generator().manual_seed(2)) < 0.6
    allowed[..., 0] = True
    allowed[..., 8:] = False  # the last part sees nothing
    whole = formulas.attention(query, entries, allowed, 0.5, 6)
    parts = [
        formulas.attention_partial(query, entries[:, at : at + 4], allowed[..., at : at + 4], 0.5, 6)
        for at in (0, 4, 8)
    ]
    outs, maxima, sums = (torch.stack(part) for part in zip(*parts, strict=True))
    assert not sums[2].any()
    torch.testing.assert_close(formulas.merge_partials(outs, maxima, sums), whole)


def test_norms():
    x, weight, bias = randn(2, 8), randn(8, seed=1), randn(8, seed=2)
    expected = torch.stack([row / math.sqrt(float((row * row).sum() / 8) + 0.1) for row in x]) * weight
    torch.testing.assert_close(formulas.rms_norm(x, weight, 0.1), expected)
    deferred = formulas.deferred_rms_norm(x, weight, 0.1)
    torch.testing.assert_close(deferred.dense(), expected)
    torch.testing.assert_close(deferred[1:].dense(), expected[1:])
    torch.testing.assert_close(deferred[:, None].rows().dense(), expected)
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(formulas.layer_norm(x, weight, bias, 0.1), scaled * weight + bias)


@pytest.mark.parametrize(
    "formats", [Formats("f32", "f32"), Formats("f32", "bf16"), Formats("bf16", "f32"), Formats("fp8", "bf16")]
)
def test_what_is_rounded_where(formats):
    """The values are, the scale of a norm never; islands that decide something see all bits."""
    products = Products(formats, torch.device("cpu"))
    normed, matrix = formulas.deferred_rms_norm(randn(3, 32), randn(32, seed=1), 0.1), randn(8, 32, seed=2)
    values = normed.values
    rounded = values.bfloat16().float()
    for product, rounds in (
        (products.linear, formats.linear != "f32"),
        (products.head, formats.island == "bf16"),
        (products.island, False),
    ):
        expected = (rounded if rounds else values) @ matrix.T
        torch.testing.assert_close(product(values, matrix), expected)
        torch.testing.assert_close(product(normed, matrix), expected * normed.scale)
    expected = rounded if formats.linear != "f32" else values
    assert torch.equal(products.round(values), expected)


@pytest.mark.parametrize("wide_sums", [True, False])
def test_a_gpus_products_are_near_the_formulas(wide_sums, monkeypatch):
    """The route taken on GPUs, walked here with the CPU's product in place of theirs."""
    exact, fast = (Products(Formats("bf16", "bf16"), torch.device("cpu")) for _ in range(2))
    fast.fast, fast._wide_sums = True, wide_sums
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, matrix, heads = randn(2, 3, 4, 32), randn(8, 32, seed=1).bfloat16(), randn(4, 8, 32, seed=2).bfloat16()
    torch.testing.assert_close(fast.linear(x, matrix), exact.linear(x, matrix.float()))
    torch.testing.assert_close(fast.heads(x, heads), exact.heads(x, heads.float()))
    island = exact.island(x, matrix.float())
    torch.testing.assert_close(fast.island(x, matrix), island, rtol=1e-4, atol=1e-4)
    assert not torch.equal(exact.linear(x, matrix.float()), island)
    torch.testing.assert_close(fast.island(x, matrix.float()), island)
    torch.testing.assert_close(fast.head(x, matrix), exact.head(x, matrix.float()))
    normed = formulas.deferred_rms_norm(x, randn(32, seed=3), 0.1)
    torch.testing.assert_close(fast.linear(normed, matrix), exact.linear(normed, matrix.float()))
    a, b = randn(2, 5, 16), randn(2, 16, 6, seed=1)
    torch.testing.assert_close(fast.matmul(a, b), (a.bfloat16().float() @ b.bfloat16().float()))
    torch.testing.assert_close(exact.matmul(a, b), a @ b)
