"""Whole steps of the fused path in Triton's interpreter (or on a GPU, in tests/gpu) against the standard path."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rocmega.errors import ConfigError, RequestError
from rocmega.models.glm.fused import FusedPath
from rocmega.models.glm.picks import Picks
from tests.fused.small import Pair, small_model

# Positions around index_topk = 24 and page borders. 256 selects nothing: attention in splits over the block table.
CASES = {"one row, all": ([150], 256), "rows, selected": ([23, 129], 24)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_f32_equals_the_standard_path(case: str) -> None:
    positions, topk = CASES[case]
    pair = Pair.of(*small_model("f32", index_topk=topk), positions, 192)
    records = [path.record() for path in (pair.standard, pair.fused)]
    wanted, got = (
        path.run(*path.place(pair.batch), record)
        for path, record in zip((pair.standard, pair.fused), records, strict=True)
    )
    assert (got - wanted).norm() < 1e-6 * wanted.norm()  # sums in another order, nothing else
    assert same(*(record.read() for record in records))
    assert pair.changed() < 1e-5


def same(mine: Picks, other: Picks) -> bool:
    """Experts, and the positions that count."""
    assert len(mine.experts) == len(other.experts) > 0
    experts = zip(mine.experts, other.experts, strict=True)
    positions = zip(mine.positions, other.positions, strict=True)
    return all(torch.equal(a, b) for a, b in experts) and all(
        a is b is None or (torch.equal(a[1], b[1]) and torch.equal(a[0][a[1]], b[0][b[1]])) for a, b in positions
    )


@pytest.mark.parametrize(("format", "positions"), [("fp8", [30]), ("mxfp4", [2]), ("mxfp4", [9, 70])])
def test_quantized_equals_the_standard_path(format: str, positions: list[int]) -> None:
    """Rounded at the same places; a sum that rounds to bf16's neighbour is 2^-9 off, a handful of times a layer."""
    sizes = {"index_topk": 256, "num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
    pair = Pair.of(*small_model(format, **sizes), positions, 128)
    wanted, got = pair.standard.decode(pair.batch), pair.fused.decode(pair.batch)
    assert (got - wanted).norm() < 1e-2 * wanted.norm()
    assert pair.changed() < 2**-5


def test_refusals() -> None:
    config, weights = small_model("f32", index_head_dim=48, qk_nope_head_dim=24, qk_head_dim=40)
    with pytest.raises(ConfigError, match=r"index_head_dim 48 is no power.*qk_nope_head_dim 24 is no multiple"):
        FusedPath(config, weights, None, max_model_len=64)  # type: ignore[arg-type]
    pair = Pair.of(*small_model("f32"), [30], 64)
    pair.fused.max_model_len = 30
    with pytest.raises(RequestError, match="position 30"):
        pair.fused.decode(pair.batch)
