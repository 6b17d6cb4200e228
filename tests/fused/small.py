"""A GLM so small that Triton's interpreter runs a step in seconds, with every kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rocmega.cache import PAGE, PagedCache, TorchMemory
from rocmega.models.common.random_weights import random_fields
from rocmega.models.glm.config import GlmConfig, from_dict
from rocmega.models.glm.fused import FusedPath
from rocmega.models.glm.plan import plan
from rocmega.models.glm.presets import preset
from rocmega.models.glm.published import Formats
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.weights import GlmWeights, assemble
from rocmega.step import StepBatch

_SIZES = {
    "hidden_size": 64, "vocab_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16,
    "index_n_heads": 16, "index_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "indexer_types": ["full", "full", "shared"],
}  # fmt: skip


def small_model(format: str, **changes: Any) -> tuple[GlmConfig, GlmWeights]:
    config = from_dict({**preset("glm-5.2-tiny"), **_SIZES, **changes})
    formats = Formats("fp8" if format == "mxfp4" else format, "f32" if format == "f32" else "bf16", format)
    todo = plan(config, formats)
    return config, assemble(todo.formats, config, random_fields(todo, config.num_hidden_layers))


@dataclass
class Pair:
    """Both paths; noise where the rows have been, elsewhere zeros for the standard path and NaN for the fused."""

    standard: StandardPath
    fused: FusedPath
    caches: list[PagedCache]
    batch: StepBatch

    @classmethod
    def of(cls, config: GlmConfig, weights: GlmWeights, positions: Sequence[int], max_model_len: int) -> Pair:
        random = torch.Generator().manual_seed(5)
        counts = [position // PAGE + 1 for position in positions]
        pages = torch.randperm(sum(counts) + 2, generator=random).to(torch.int32)  # two are nobody's
        table = torch.full((len(counts), -(-max_model_len // PAGE)), -1, dtype=torch.int32)
        for row, own in enumerate(pages[:-2].split(counts)):
            table[row, : len(own)] = own
        tokens = torch.randint(0, config.vocab_size, (len(counts),), generator=random).to(torch.int32)
        caches = [PagedCache(config.cache_spec(weights.formats.cache), len(pages), TorchMemory()) for _ in range(2)]
        for pools in zip(*([*cache.latent, *cache.index] for cache in caches), strict=True):
            if pools[0] is not None and pools[1] is not None:
                pools[1].fill_(float("nan"))
                for row, position in enumerate(positions):
                    at = torch.arange(position)
                    noise = torch.randn(position, pools[0].shape[-1], generator=random)
                    for pool in pools:
                        pool[table[row, at // PAGE].long(), at % PAGE] = noise.to(pool.dtype)
        standard = StandardPath(config, weights, caches[0], activations="bf16")
        fused = FusedPath(config, weights, caches[1], max_model_len=max_model_len)
        return cls(standard, fused, caches, StepBatch(tokens, torch.tensor(positions).int(), table))

    def changed(self) -> float:
        """The largest difference between the caches' entries, of which both must have the same."""
        largest = 0.0
        for mine, other in zip(*([*cache.latent, *cache.index] for cache in self.caches), strict=True):
            if mine is not None and other is not None:
                assert torch.equal(mine == 0, other.isnan())
                largest = max(largest, float((mine.float() - other.float()).nan_to_num(0).abs().max()))
        return largest
