"""Caches in the published formats: their size, their rounding, and a model that runs on them."""

from __future__ import annotations

import pytest
import torch

from rocmega.cache import PAGE, TorchMemory
from rocmega.models.deepseek import reference
from rocmega.models.deepseek.config import from_dict
from rocmega.models.deepseek.presets import preset
from rocmega.models.deepseek.records import Fp4Record, Fp8Record, hadamard, published_records
from rocmega.models.deepseek.standard import StandardPath
from tests.models.deepseek.conftest import FAMILIES, reference_model


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_published_sizes():
    v4 = published_records(from_dict(preset("deepseek-v4-flash")))
    assert {kind: record.bytes for kind, record in v4.items()} == {"window": 584, "entries": 584, "keys": 68}
    v41 = published_records(from_dict(preset("deepseek-v4.1-flash")))
    assert {kind: record.bytes for kind, record in v41.items()} == {"window": 528, "entries": 288, "keys": 68}


def test_published_growth_per_token():
    """890 bytes of V4.1, as its model card says. Of V4, entries of 128 tokens have twice the room that they need."""
    v4, v41 = (from_dict(preset(name)).cache_spec("published") for name in ("deepseek-v4-flash", "deepseek-v4.1-flash"))
    assert v41.page_bytes() / PAGE == 3 * (288 + 68) / 2 + 288 + 68 == 890
    assert v4.page_bytes() / PAGE == 21 / 4 * (584 + 68) + 20 / 64 * 584


def near_published(values: torch.Tensor) -> torch.Tensor:
    """Values of several sizes, and a group of zeros."""
    values = values * torch.tensor([1e-3, 1.0, 30.0])[:, None, None]
    values[1, 0] = 0
    return values


@pytest.mark.parametrize(
    ("record", "rounded"),
    [
        (Fp8Record(64, 32), lambda x: reference._fp8(x, 32)),
        (Fp8Record(64, 16, 16), lambda x: torch.cat([reference._fp8(x[..., :48], 16), x[..., 48:].bfloat16()], -1)),
        (Fp4Record(64, 16, fine=True), lambda x: reference._fp4(x, 16, e4m3_scale=True)),
        (Fp4Record(64, 32), lambda x: reference._fp4(x, 32)),
        (Fp4Record(64, 32, transformed=True), lambda x: reference._fp4(reference._hadamard(x), 32)),
    ],
)
def test_records_round_as_published(record, rounded):
    values = near_published(randn(3, 5, 64))
    stored = record.encode(values)
    assert stored.dtype == torch.uint8
    assert stored.shape == (3, 5, record.bytes)
    expected = rounded(values.double())
    # A sum of the transform may lie at the middle of two codes, and float32 and float64 then differ by a step.
    steps = ((record.decode(stored).double() - expected).abs() > 1e-6 * expected.abs()).float().mean()
    assert steps <= (0.005 if isinstance(record, Fp4Record) else 0)


def test_the_transform_keeps_products():
    a, b = randn(3, 128), randn(3, 128, seed=1)
    torch.testing.assert_close((hadamard(a) * hadamard(b)).sum(-1), (a * b).sum(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_on_published_caches(name, tiny_checkpoint, model, prompt):
    """Within 1e-3 of the reference, which without rounding is 0.04 (V4) and 0.2 (V4.1) away from it.

    Not within 1e-5 at all tokens: a sum of the Hadamard transform may lie at the middle of two codes, where float32 and
    float64 round to different ones.
    """
    told, tokens = reference_model(tiny_checkpoint(name), rounded_caches=True), prompt[:48]
    expected = torch.stack([told.step(token).float() for token in tokens.tolist()])
    subject = model(name)
    plain = torch.stack([subject.decode([("a", int(token), at)])[0] for at, token in enumerate(tokens)])
    subject.cache = subject.config.cache_spec("published").open(20, 16, TorchMemory())
    subject.path = StandardPath(subject.config, subject.weights, subject.cache)
    found = torch.stack([subject.decode([("a", int(token), at)])[0] for at, token in enumerate(tokens)])
    error, without = ((of - expected).norm(dim=1) / expected.norm(dim=1) for of in (found, plain))
    assert error.max() < 1e-3
    assert without.median() > 0.02
    whole = subject.prefill("b", tokens[:40])  # a chunk reads what single steps read
    torch.testing.assert_close(whole, found[39], atol=1e-3, rtol=0)
