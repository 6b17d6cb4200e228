"""The standard path against transformers, and against itself in every way it can be cut up."""

from __future__ import annotations

import pytest
import torch

from rocmega.cache import PAGE
from rocmega.errors import RequestError
from rocmega.models.common import formulas as shared
from rocmega.models.glm import formulas, stages, standard
from rocmega.step import StepBatch
from tests.models.driven import recorded, routing_again

FAMILIES = ("glm-5-tiny", "glm-5.2-tiny")


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_64_greedy_tokens_equal_transformers(name, model, reference, prompt):
    tokens, logits = reference(name)
    ours, rows = model(name).greedy("a", prompt, len(tokens))
    assert ours == tokens
    assert (rows - logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "mxfp4"])
def test_dequantized_checkpoint_equals_transformers(dtype, model, reference, prompt):
    tokens, logits = reference("glm-5.2-tiny", dtype, dequantized=True)
    ours, rows = model("glm-5.2-tiny", dtype, dequantized=True).greedy("a", prompt, len(tokens))
    assert ours == tokens
    assert (rows - logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("dtype", "activations", "bound"),
    [*((dtype, "bf16", 2e-2) for dtype in ("bf16", "fp8", "mxfp4")), ("fp8", "fp8", 0.2), ("mxfp4", "fp8", 0.2)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_rounded_logits_are_near_float32(name, dtype, activations, bound, model, prompt, monkeypatch):
    """On the choices of the float32 twin, which is transformers' model (above).

    Random weights make positions and experts nearly tie, and a flipped choice is another result, not a rounding error.

    The bound for fp8: e4m3 rounds a number by 2.5 % in the mean square, and three products in a row, gate and up and
    then down, by b = 4.3 %. Sixteen such branches of equal size make the residual stream; branch n adds its own b^2 and
    the e^2 that its input was off already, of which the sum keeps one n-th: e^2 = b^2 (1 + 1/1 + ... + 1/16), 9e-2.
    Twice that is the bound, for rows that have worse luck. Measured: 1e-1 in the mean, 1.6e-1 at most.
    """
    twin = model(name, dtype, dequantized=True)
    selections, routes = [], []
    monkeypatch.setattr(standard, "select", recorded(formulas.select, selections))
    monkeypatch.setattr(stages, "route", recorded(formulas.route, routes))
    tokens, expected = twin.greedy("a", prompt, 24)

    monkeypatch.setattr(standard, "select", lambda *_: selections.pop(0))
    monkeypatch.setattr(stages, "route", routing_again(routes))
    subject = model(name, dtype)
    subject.path = standard.StandardPath(subject.config, subject.weights, subject.cache, activations=activations)
    rows = subject.follow("a", prompt, tokens)
    assert not selections
    assert not routes
    errors = (rows - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < bound
    if activations == "fp8":
        assert errors.min() > 2e-2  # they were rounded


@pytest.mark.parametrize("chunk", [1, 13, 24, 64])
def test_chunked_prefill_equals_unchunked(chunk, model, prompt):
    whole, cut = model(), model()
    expected, logits = whole.prefill("a", prompt), cut.prefill("a", prompt, chunk=chunk)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    for ours, theirs in zip(_entries(cut, "a", 75), _entries(whole, "a", 75), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_prefill_continues_where_it_left_off(model, prompt):
    whole, parts = model(), model()
    expected = whole.prefill("a", prompt)
    parts.prefill("a", prompt[:20])
    parts.prefill("a", prompt[20:41], position=20)
    torch.testing.assert_close(parts.prefill("a", prompt[41:], position=41), expected, atol=1e-4, rtol=0)


def test_blocks_of_any_size_give_the_same(model, prompt, monkeypatch):
    expected, _ = model().greedy("a", prompt, 4)
    monkeypatch.setattr(standard, "_BLOCK_VALUES", 5000)
    monkeypatch.setattr(shared, "KEY_BLOCK", 7)
    assert model().greedy("a", prompt, 4)[0] == expected


def test_matrices_need_not_stay(packed, prompt, model):
    resident = model("glm-5.2-tiny", "fp8")
    lazy = model("glm-5.2-tiny", "fp8")
    lazy.path = standard.StandardPath(lazy.config, lazy.weights, lazy.cache, resident=False)
    assert torch.equal(lazy.prefill("a", prompt), resident.prefill("a", prompt))
    assert not any(layer._kept for layer in lazy.path.layers)


def test_rows_at_different_positions_equal_rows_alone(model, prompt):
    lengths = {"short": 3, "page": PAGE, "selecting": 70, "long": 75}
    together, alone = model(), model()
    expected = {}
    for request, length in lengths.items():
        together.prefill(request, prompt[:length])
        alone.prefill(request, prompt[:length])
    for step in range(3):
        for request, length in lengths.items():
            expected[request] = alone.decode([(request, 7 + step, length + step)])[0]
        rows = together.decode([(request, 7 + step, length + step) for request, length in lengths.items()])
        for request, row in zip(lengths, rows, strict=True):
            torch.testing.assert_close(row, expected[request], atol=1e-4, rtol=0)


def test_requests_interleave_in_pages(model, prompt):
    """A request whose pages are scattered and out of order decodes as one whose pages are in order."""
    straight, mixed = model(), model()
    for number in range(6):
        mixed.cache.grow(f"filler {number}", 1)
    mixed.cache.release("filler 1")
    mixed.cache.release("filler 4")
    mixed.prefill("a", prompt[:64])
    mixed.prefill("b", prompt[:30])
    mixed.cache.release("filler 0")
    assert mixed.cache.grow("a", 75) == [4, 0]
    expected = straight.prefill("a", prompt)
    torch.testing.assert_close(mixed.prefill("a", prompt[64:], position=64), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_only_the_written_slots_change(dtype, model, prompt):
    subject = model("glm-5.2-tiny", dtype)
    pools = [pool for pool in (*subject.cache.latent, *subject.cache.index) if pool is not None]
    for pool in pools:
        pool.view(torch.uint8).fill_(0x5A)
    subject.prefill("a", prompt[:65])
    subject.prefill("b", prompt[:10])
    before = [pool.clone() for pool in pools]
    subject.decode([("a", 1, 65), ("b", 2, 10)])
    written = torch.zeros(subject.pages, PAGE, dtype=torch.bool)
    pages_a, pages_b = subject.cache.grow("a", 66), subject.cache.grow("b", 11)
    written[pages_a[1], 1] = written[pages_b[0], 10] = True
    for old, new in zip(before, pools, strict=True):
        assert torch.equal(old[~written].view(torch.uint8), new[~written].view(torch.uint8))
        assert (old[written] != new[written]).any(dim=-1).all()


def test_shared_layers_have_no_index_cache(model):
    subject = model()
    assert [pool is not None for pool in subject.cache.index] == list(subject.config.full_index)
    assert subject.cache.index_address(3) == 0


def _entries(subject, request: str, length: int) -> list[torch.Tensor]:
    pages = subject.cache.grow(request, length)
    pools = [pool for pool in (*subject.cache.latent, *subject.cache.index) if pool is not None]
    return [pool[pages].flatten(0, 1)[:length] for pool in pools]


@pytest.mark.parametrize(
    ("tokens", "positions", "table", "message"),
    [
        ([512], [0], [[0]], r"token 512 .* 0 to 511"),
        ([-1], [0], [[0]], r"token -1"),
        ([1], [-1], [[0]], r"negative"),
        ([1], [64], [[0]], r"needs 2 pages"),
        ([1, 1], [0, 64], [[0, -1], [1, -1]], r"row 1 .* no page"),
        ([1], [4096], [list(range(65))], r"context of 4096"),
        ([], [], [], r"tokens"),
    ],
)
def test_impossible_steps_are_refused(tokens, positions, table, message, model):
    batch = StepBatch(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
    )
    with pytest.raises(RequestError, match=message):
        model().path.decode(batch)


def test_impossible_prefills_are_refused(model, prompt):
    subject = model()
    table = subject.cache.block_table(["a"], max_pages=2)[0]
    with pytest.raises(RequestError, match="pages"):
        subject.path.prefill(prompt, 0, table)
    with pytest.raises(RequestError, match="at least one"):
        subject.path.prefill(prompt[:0], 0, table)
    with pytest.raises(RequestError, match="longest context"):
        subject.path.prefill(prompt, 4090, table)
