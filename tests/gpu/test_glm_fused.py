"""The fused standard path on a real GPU: against the plain one, at real dimensions, and captured as a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocmega.cache import PAGE, PagedCache, TorchMemory
from rocmega.checkpoint import Checkpoint
from rocmega.compare.accuracy import expect, judge
from rocmega.drivers.select import kind_for
from rocmega.graph import GraphStep
from rocmega.models.glm import config as glm_config
from rocmega.models.glm import weights as glm_weights
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.following import FollowingPath
from rocmega.models.glm.weights import GlmWeights
from rocmega.step import StepBatch
from tests.fused.kit import rank_of_glm52

pytestmark = pytest.mark.skipif(kind_for() == "host", reason="needs a GPU")
fused = pytest.importorskip("rocmega.models.glm.fused", reason="needs Triton")

DRAWS = 5  # tokens that a row is judged on


class Rig:
    """Both paths over caches of the same noise, rows at given positions, pages scattered."""

    def __init__(self, config: GlmConfig, weights: GlmWeights, positions: list[int], max_model_len: int):
        self.config, device = config, weights.device()
        random = torch.Generator().manual_seed(7)
        counts = [position // PAGE + 1 for position in positions]
        pages = torch.randperm(sum(counts), generator=random).to(torch.int32)
        table = torch.zeros(len(counts), -(-max_model_len // PAGE), dtype=torch.int32)
        for row, own in enumerate(pages.split(counts)):
            table[row, : len(own)] = own
        tokens = torch.randint(0, config.vocab_size, (len(counts),), generator=random)
        self.batch = StepBatch(*(part.to(device, torch.int32) for part in (tokens, torch.tensor(positions), table)))
        self.caches = [
            PagedCache(config.cache_spec(weights.formats.cache), len(pages), TorchMemory(str(device))) for _ in range(2)
        ]
        on_device = torch.Generator(device).manual_seed(8)
        for one, other in zip(*([*cache.latent, *cache.index] for cache in self.caches), strict=True):
            if one is not None and other is not None:
                other.copy_(one.normal_(generator=on_device))
        # Nothing rounded, and rounded only where the formats say so: how far apart they are is the formats' own error.
        self.exact = FollowingPath(config, weights, self.caches[0], activations="f32")
        self.rounded = FollowingPath(config, weights, self.caches[0], activations="bf16", matrix_units=False)
        self.fused = fused.FusedPath(config, weights, self.caches[1], max_model_len=max_model_len)

    def judge(self) -> None:
        """Several tokens a row, as `rocmega compare` judges an arm: its choices, and its logits on them."""
        random = torch.Generator().manual_seed(9)
        batches, results = [], []
        for _ in range(DRAWS):
            tokens = torch.randint(0, self.config.vocab_size, (self.batch.rows,), generator=random)
            batches.append(replace(self.batch, tokens=tokens.to(self.batch.tokens)))
            record = self.fused.record()
            results.append((self.fused.run(*self.fused.place(batches[-1]), record), record.read()))
        verdict = judge(self.exact, expect(self.exact, self.rounded, batches), results)
        print(verdict)
        assert verdict.reason is None


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_tiny_model_equals_the_standard_path(tiny_checkpoint: Callable[..., Path], dtype: str, rows: int) -> None:
    checkpoint = tiny_checkpoint("glm-5.2-tiny", dtype)
    config = glm_config.from_dir(checkpoint)
    packed = glm_weights.pack(Checkpoint(checkpoint), config, device="cuda")
    positions = [150, 5, 64, 0, 22, 23, 24, 31, 32, 63, 65, 127, 128, 191, 129, 100][:rows]
    Rig(config, packed, positions, 192).judge()


@pytest.fixture(scope="module", params=["fp8", "bf16", "mxfp4"])
def real(request: pytest.FixtureRequest) -> tuple[GlmConfig, GlmWeights]:
    """Five layers at GLM-5.2's dimensions, as a rank of eight has them: all kinds of layers."""
    return rank_of_glm52(5, request.param, "cuda")


CONTEXTS = [[999], [8100], [60000, 5, 2047, 2048], [3000 + 100 * row for row in range(16)]]


@pytest.mark.parametrize("positions", CONTEXTS, ids=["1K", "8K", "60K and less, 4 rows", "16 rows"])
def test_real_dimensions(real: tuple[GlmConfig, GlmWeights], positions: list[int]) -> None:
    Rig(*real, positions, max(positions) + 1).judge()


def test_graph_replays_what_the_path_computes(real: tuple[GlmConfig, GlmWeights]) -> None:
    rig = Rig(*real, [999, 5000, 17], 8192)
    eager = rig.fused.decode(rig.batch)
    captured = GraphStep(rig.fused, rig.batch.block_table.shape[1])
    for _ in range(3):
        assert torch.equal(captured.decode(rig.batch), eager)
    moved = StepBatch(rig.batch.tokens, rig.batch.positions - 1, rig.batch.block_table)
    replayed = captured.decode(moved).clone()
    assert not torch.equal(replayed, eager)
    assert torch.equal(replayed, rig.fused.decode(moved))
