"""One layer of GLM as stages: the formulas with the layer's weights, each stage on its own input.

Activations are float32 [..., width]; the leading dimensions are whatever the caller has. Normalized ones are `Normed`.
The kernels' stages are tested against these methods, and the standard path is made of them.
"""

from __future__ import annotations

import torch

from rocmega.models.common.products import Input, Products
from rocmega.models.common.stages import PackedLayer, routed
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.formulas import (
    Normed,
    deferred_rms_norm,
    layer_norm,
    rms_norm,
    rope_adjacent,
    rope_leading,
    route,
    swiglu,
)
from rocmega.models.glm.weights import Layer


class LayerStages(PackedLayer):
    """A layer's stages, from its packed weights."""

    def __init__(self, config: GlmConfig, number: int, fields: Layer, products: Products, resident: bool):
        super().__init__(fields, products, resident)
        self.config = config
        self.full_index, self.dense = config.full_index[number], config.dense_layers[number]

    # Attention.

    def attention_norm(self, x: torch.Tensor) -> Normed:
        """The residual stream x [..., hidden] as the attention block sees it, [..., hidden]."""
        return deferred_rms_norm(x, self.vector("attention_norm"), self.config.rms_norm_eps)

    def down_projections(self, x: Input) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """All that is computed from the normalized x [..., hidden].

        Returns q_a [..., q_lora], kv_a [..., kv_lora + rope], index_k [..., index_dim] and index_weights [...,
        index_heads], none of them normalized, rotated or scaled; the last two are None in layers that share a
        selection.
        """
        q_a, kv_a = self.linear(x, "q_a"), self.linear(x, "kv_a")
        if not self.full_index:
            return q_a, kv_a, None, None
        return q_a, kv_a, self.linear(x, "index_k"), self.products.island(x, self.matrix("index_weights"))

    def query_norm(self, q_a: torch.Tensor) -> Normed:
        """q_a [..., q_lora] normalized: what queries and index queries are made of."""
        return deferred_rms_norm(q_a, self.vector("q_a_norm"), self.config.latent_norm_eps)

    def latent_entry(self, kv_a: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The latent cache's entry of kv_a [..., kv_lora + rope]: normalized latent, then rotated rope channels.

        angles float32 [..., rope / 2, 2], as `rope_angles` makes them. Float32; the cache rounds it.
        """
        latent, rope = kv_a.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        normed = rms_norm(latent, self.vector("kv_a_norm"), self.config.latent_norm_eps)
        return torch.cat([normed, rope_adjacent(rope, angles)], dim=-1)

    def index_entry(self, index_k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The index cache's entry of index_k [..., index_dim]: layer norm, then the first channels rotated. Float32."""
        weight, bias = self.vector("index_k_norm")
        return rope_leading(layer_norm(index_k, weight, bias, self.config.index_norm_eps), angles)

    def queries(self, q: Input, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From normalized q [..., q_lora] to [..., heads, nope] and the rotated [..., heads, rope]."""
        c = self.config
        by_head = self.linear(q, "q_b").unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
        nope, rope = by_head.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return nope, rope_adjacent(rope, angles[..., None, :, :])

    def index_queries(self, q: Input, angles: torch.Tensor) -> torch.Tensor:
        """From normalized q [..., q_lora] to rotated [..., index_heads, index_dim]."""
        c = self.config
        by_head = self.linear(q, "index_q").unflatten(-1, (c.index_n_heads, c.index_head_dim))
        return rope_leading(by_head, angles[..., None, :, :])

    def index_head_weights(self, index_weights: torch.Tensor) -> torch.Tensor:
        """The index heads' weights [..., index_heads], scaled."""
        return index_weights * self.config.index_weight_scale

    def latent_query(self, nope: torch.Tensor) -> torch.Tensor:
        """Queries [..., heads, nope] through key_up, to [..., heads, kv_lora]: comparable with cached latents."""
        return self.products.heads(nope, self.matrix("key_up"))

    def attention_query(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Queries [..., heads, kv_lora] and the rotated [..., heads, rope] as one, rounded as scoring wants it."""
        return self.products.round(torch.cat([latent, rope], dim=-1))

    def value_up(self, latent: torch.Tensor) -> torch.Tensor:
        """Attention's latents [..., heads, kv_lora] to the heads' outputs [..., heads, v_dim]."""
        return self.products.heads(latent, self.matrix("value_up"))

    def output_projection(self, heads: torch.Tensor) -> torch.Tensor:
        """The heads' outputs [..., heads, v_dim] to what is added to the residual stream, [..., hidden]."""
        return self.linear(heads.flatten(-2), "o")

    # MLP and experts.

    def mlp_norm(self, x: torch.Tensor) -> Normed:
        """The residual stream x [..., hidden] as the MLP sees it, [..., hidden]."""
        return deferred_rms_norm(x, self.vector("mlp_norm"), self.config.rms_norm_eps)

    def expert(self, y: Input, index: int = 0, weight: torch.Tensor | None = None) -> torch.Tensor:
        """One gated MLP on y [..., hidden], times weight [..., 1]: expert `index`, or the dense layer's only one."""
        return self.expert_down(self.expert_middle(y, index, weight), index)

    def expert_middle(self, y: Input, index: int = 0, weight: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate y) * up y of one expert, [..., width], times weight [..., 1]: before it is rounded for `down`."""
        gate, up = (self.linear(y, "gate_up", 2 * index + part) for part in (0, 1))
        middle = swiglu(gate, up)
        return middle if weight is None else middle * weight

    def expert_down(self, middle: torch.Tensor, index: int = 0) -> torch.Tensor:
        """One expert's output from its `expert_middle`, [..., hidden]."""
        return self.linear(middle, "down", None if self.dense else index)

    def router_logits(self, y: Input) -> torch.Tensor:
        """Router y of y [..., hidden], float32 [..., experts]."""
        return self.products.island(y, self.matrix("router"))

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 [T, topk], ascending, and their weights float32 [T, topk], for router logits [T, experts]."""
        c = self.config
        return route(logits.sigmoid(), self.vector("router_bias"), c.num_experts_per_tok, c.routed_scaling_factor)

    def experts(self, y: Normed, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's routed experts, summed by ascending expert: [T, hidden] for y [T, hidden]."""
        if self.gathers(experts):
            return self.gathered(swiglu, y, experts, weights)
        return routed(self.expert, self.config.n_routed_experts, y, experts, weights)

    def mixture(self, y: Normed, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A mixture's MLP block on the normalized y [..., hidden]: `experts` and the shared one."""
        tokens = y.rows()
        routed = self.experts(tokens, experts, weights) + self.expert(tokens, self.config.n_routed_experts)
        return routed.unflatten(0, y.values.shape[:-1])
