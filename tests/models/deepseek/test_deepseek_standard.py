"""The standard path against transformers and the reference, and against itself in every way it can be cut up."""

from __future__ import annotations

import pytest
import torch

from rocmega.errors import RequestError
from rocmega.models.common import formulas as shared
from rocmega.models.deepseek import formulas, stages, standard
from rocmega.step import StepBatch
from tests.models.deepseek.conftest import FAMILIES, all_logits, reference_model
from tests.models.driven import recorded, routing_again

# Lengths around the window (16), entries of 1, 2, 4 and 16 tokens, the selection (8 entries: 8, 16 and 32 tokens), the
# candidates (5 blocks of 4) and pages (64).
BORDERS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 18, 20, 21, 24, 31, 32, 33, 36, 37, 47, 48, 49, 63, 64, 65, 74)

# Ours is float32, and so is transformers; the reference is float64. Logits are about 4, sums are of up to 1024 numbers.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_64_greedy_tokens_equal_the_oracle(name, model, oracle, prompt):
    tokens, logits = oracle(name)
    ours, rows = model(name).greedy("a", prompt, len(tokens))
    assert ours == tokens
    assert (rows - logits).abs().max() < TOLERANCE


def test_the_reference_equals_transformers(tiny_checkpoint, oracle, prompt):
    """Else what the reference says of V4.1 would mean little."""
    tokens, logits = oracle("deepseek-v4-flash-tiny")
    ours, rows = reference_model(tiny_checkpoint("deepseek-v4-flash-tiny")).greedy(prompt.tolist(), 16)
    assert ours == tokens[:16]
    assert (rows - logits[:16]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_decode_from_the_first_token_on(name, model, everywhere, prompt):
    """Every context up to the prompt's length: all borders, one token at a time."""
    subject = model(name)
    rows = [subject.decode([("a", token, position)])[0] for position, token in enumerate(prompt.tolist())]
    assert (torch.stack(rows) - everywhere(name)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_up_to_every_border_and_decode_across_it(name, model, everywhere, prompt):
    for length in BORDERS:
        subject = model(name)
        rows = subject.follow("a", prompt[:length], prompt[length:].tolist()[:1] * 2)
        assert (rows[0] - everywhere(name)[length - 1]).abs().max() < TOLERANCE, length
        assert (rows[1] - everywhere(name)[length]).abs().max() < TOLERANCE, length


@pytest.mark.parametrize("count", [1, 3, 8, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_at_different_phases(name, count, model, everywhere, prompt):
    """Rows at all phases of the compressors, windows and selections, whose pages and state grew in turns."""
    lengths = [71, 5, 31, 0, 16, 63, 15, 47, 64, 3, 32, 17, 20, 1, 36, 48][:count]
    subject = model(name, pages=40)
    for length in range(0, 64, 16):
        for request in lengths:
            if length < request:
                subject.prefill(str(request), prompt[length : min(length + 16, request)], position=length)
    subject.prefill("71", prompt[64:71], position=64)
    for step in range(3):
        rows = subject.decode([(str(length), int(prompt[length + step]), length + step) for length in lengths])
        for row, length in zip(rows, lengths, strict=True):
            assert (row - everywhere(name)[length + step]).abs().max() < TOLERANCE, (length, step)


@pytest.mark.parametrize("name", FAMILIES)
def test_successive_rows_of_a_request(name, model, everywhere, prompt):
    subject = model(name)
    subject.prefill("a", prompt[:13])
    subject.prefill("b", prompt[:30])
    rows = [("a", 13), ("a", 14), ("b", 30), ("a", 15), ("a", 16), ("b", 31)]
    logits = subject.decode([(request, int(prompt[at]), at) for request, at in rows])
    for row, (_, at) in zip(logits, rows, strict=True):
        assert (row - everywhere(name)[at]).abs().max() < TOLERANCE, at


@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunked_prefill_equals_unchunked(name, chunk, model, everywhere, prompt):
    logits = model(name).prefill("a", prompt, chunk=chunk)
    assert (logits - everywhere(name)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_state_and_pages_of_a_request_serve_the_next(name, model, everywhere, prompt):
    subject = model(name, pages=2)
    subject.prefill("a", prompt.flip(0))
    subject.cache.release("a")
    assert (subject.prefill("b", prompt) - everywhere(name)[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_any_size_give_the_same(name, model, prompt, monkeypatch):
    expected = model(name).prefill("a", prompt)
    monkeypatch.setattr(standard, "_BLOCK_VALUES", 3000)
    monkeypatch.setattr(shared, "KEY_BLOCK", 7)
    torch.testing.assert_close(model(name).prefill("a", prompt), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_need_not_stay(name, packed, prompt, model):
    resident, lazy = model(name, "mxfp4"), model(name, "mxfp4")
    lazy.path = standard.StandardPath(lazy.config, lazy.weights, lazy.cache, resident=False)
    tokens = prompt[:40]  # of fewer, experts would be gathered, and sums be in another order
    assert torch.equal(lazy.prefill("a", tokens), resident.prefill("a", tokens))
    assert not any(layer._kept for layer in lazy.path.layers)


# Quantized checkpoints.


@pytest.mark.parametrize("name", FAMILIES)
def test_dequantized_checkpoint_equals_the_oracle(name, tiny_checkpoint, model, prompt):
    logits = all_logits(tiny_checkpoint(name, "mxfp4", dequantized=True), prompt[:40])
    rows = model(name, "mxfp4", dequantized=True).follow("a", prompt[:36], prompt[36:40].tolist())
    assert (rows - logits[35:39]).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["bf16", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rounded_logits_are_near_float32(name, dtype, model, prompt, monkeypatch):
    """Within 3e-2 of the float32 twin on the twin's choices: bf16 has 8 bits, and streams are mixed 24 times.

    Random weights make entries and experts nearly tie, and a flipped choice is another result, not a rounding error.
    """
    twin = model(name, dtype, dequantized=True)
    blocks, selections, routes = [], [], []
    monkeypatch.setattr(standard, "candidate_blocks", recorded(formulas.candidate_blocks, blocks))
    monkeypatch.setattr(standard, "select", recorded(shared.select, selections))
    monkeypatch.setattr(stages, "route", recorded(shared.route, routes))
    tokens, expected = twin.greedy("a", prompt, 12)

    monkeypatch.setattr(standard, "candidate_blocks", lambda *_: blocks.pop(0))
    monkeypatch.setattr(standard, "select", lambda *_: selections.pop(0))
    monkeypatch.setattr(stages, "route", routing_again(routes))
    rows = model(name, dtype).follow("a", prompt, tokens)
    assert not any((blocks, selections, routes))
    errors = (rows - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 3e-2


# What cannot be run.


@pytest.mark.parametrize(
    ("tokens", "positions", "table", "message"),
    [
        ([512], [0], [[0]], r"token 512 .* 0 to 511"),
        ([1], [64], [[0]], r"needs 2 pages"),
        ([1], [4096], [list(range(65))], r"context of 4096"),
        ([1], [0], [[1]], r"page 1 is not the first of any request"),
    ],
)
def test_impossible_steps_are_refused(tokens, positions, table, message, model):
    subject = model("deepseek-v4-flash-tiny")
    assert subject.cache.grow("a", 1) == [0]
    batch = StepBatch(*(torch.tensor(of, dtype=torch.int32) for of in (tokens, positions, table)))
    with pytest.raises(RequestError, match=message):
        subject.path.decode(batch)


def test_impossible_prefills_are_refused(model, prompt):
    subject = model("deepseek-v4-flash-tiny")
    subject.cache.grow("a", 64)
    table = subject.cache.block_table(["a"], max_pages=2)[0]
    with pytest.raises(RequestError, match="pages"):
        subject.path.prefill(prompt, 0, table)
    with pytest.raises(RequestError, match="at least one"):
        subject.path.prefill(prompt[:0], 0, table)
    with pytest.raises(RequestError, match="longest context"):
        subject.path.prefill(prompt, 4090, table)
