"""The fused path behind the engine: what its graphs are sized for, and that the size changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rocmega.errors import ConfigError
from rocmega.fused.steps import FusedSteps
from tests.fused.small import Pair, small_model


def test_a_step_is_sized_for_its_context() -> None:
    opened = []

    def path(*_: object, max_model_len: int) -> SimpleNamespace:
        opened.append(max_model_len)
        return SimpleNamespace(device=torch.device("cpu"), decode=lambda batch: batch.block_table.shape[1])

    steps = FusedSteps(lambda: SimpleNamespace(FusedPath=path), None, None, None, max_model_len=5000)
    assert [steps.length_for(context) for context in (1, 1024, 1025, 4096, 4097, 5000)] == [
        1024, 1024, 2048, 4096, 5000, 5000,
    ]  # fmt: skip
    pair = Pair.of(*small_model("f32"), [30], 5000)
    for position, pages in ((30, 16), (1023, 16), (1024, 32), (30, 16)):
        moved = pair.batch.__class__(pair.batch.tokens, torch.tensor([position]), pair.batch.block_table)
        assert steps.decode(moved) == pages  # of the table, the part that the step is sized for
    assert opened == [1024, 2048]


def test_a_wider_table_changes_nothing() -> None:
    config, weights = small_model("f32", index_topk=256, num_hidden_layers=2, indexer_types=["full", "shared"])
    pair = Pair.of(config, weights, [30], 2048)
    from rocmega.models.glm import fused

    steps = FusedSteps(lambda: fused, config, weights, pair.caches[1], max_model_len=64)
    got = steps.decode(pair.batch.__class__(pair.batch.tokens, pair.batch.positions, pair.batch.block_table))
    wanted = pair.standard.decode(pair.batch)
    assert (got - wanted).norm() < 1e-6 * wanted.norm()


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocmega.fused.steps.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        FusedSteps(lambda: None, None, None, None, max_model_len=64)
