"""GLM's forward over whole sequences, with gradients: the third writing of its mathematics, after kernel and PyTorch.

The mathematics is that of formulas.py. What training adds is what the checkpoints' makers published for this
architecture: the indexer learns to predict where attention looks (DeepSeek-V3.2, "DeepSeek Sparse Attention": KL
divergence from the heads' mean attention, with its inputs detached), first beside full attention and then beside the
selection it makes itself; and the router's bias balances the experts without a loss (DeepSeek-V3, section 2.1.2).
Shapes: B sequences of T tokens, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.formulas import layer_norm, rms_norm, rope_adjacent, rope_angles, rope_leading, route, swiglu
from rocmega.models.glm.published import expected_tensors

_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Outcome:
    """What a forward gave.

    Fields:
        logits: [B, T, vocab].
        index_loss: how far the indexers' scores are from attention, mean KL divergence in nats, float32 scalar.
        loads: per mixture layer, how many tokens each expert got, float32 [E].
    """

    logits: torch.Tensor
    index_loss: torch.Tensor
    loads: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Choice:
    """Where the tokens of some layers attend: bool [B, T, T], with the index scores [B, T, T] it was made from."""

    allowed: torch.Tensor
    scores: torch.Tensor
    attention: list[torch.Tensor] = field(default_factory=list)  # each sharing layer's mean over heads, [B, T, T]

    def loss(self) -> torch.Tensor:
        target = torch.stack(self.attention).mean(0)
        predicted = self.scores.masked_fill(~self.allowed, float("-inf")).log_softmax(-1)
        divergence = torch.where(target > 0, target * (target.clamp_min(1e-20).log() - predicted), 0.0)
        return divergence.sum(-1).mean()


class Trainable:
    """A model's weights as float32 tensors with gradients, by their published names, and its forward.

    A layer's routed experts are one tensor for each of their three matrices, [E, n, k]; `tensor` takes them apart.
    The router's biases are in `biases`, by layer: no gradient moves them.
    """

    def __init__(self, config: GlmConfig, seed: int, device: torch.device | str) -> None:
        self.config, self.device = config, torch.device(device)
        self.weights: dict[str, torch.Tensor] = {}
        self.biases: dict[int, torch.Tensor] = {}
        random = torch.Generator().manual_seed(seed)
        for name, (shape, _) in expected_tensors(config).items():
            layer, _, expert = name.partition(".mlp.experts.")
            if name.endswith("e_score_correction_bias"):
                self.biases[int(name.split(".")[2])] = torch.zeros(shape, device=device)
            elif not expert:
                self._add(name, self._initial(name, shape, random))
            elif expert.startswith("0."):
                stacked = (config.n_routed_experts, *shape)
                self._add(f"{layer}.mlp.experts.{expert.split('.')[1]}", self._initial(name, stacked, random))

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.weights[name] = value.to(self.device).requires_grad_()

    def _initial(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """Products keep the size of their input; what layers add to the residual stream sums up to about its size."""
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        gain = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            gain /= math.sqrt(2 * self.config.num_hidden_layers)
        return torch.randn(shape, generator=random) * gain

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the published checkpoint: float32, on the CPU, detached."""
        layer, _, expert = name.partition(".mlp.experts.")
        if name.endswith("e_score_correction_bias"):
            value = self.biases[int(name.split(".")[2])]
        elif expert:
            number, part, _ = expert.split(".")
            value = self.weights[f"{layer}.mlp.experts.{part}"][int(number)]
        else:
            value = self.weights[name]
        return value.detach().cpu().contiguous()

    def forward(self, tokens: torch.Tensor, sparse: bool) -> Outcome:
        """Tokens int64 [B, T]. sparse: attend to the indexers' choice, not to everything."""
        c = self.config
        length = tokens.shape[1]
        at = torch.arange(length, device=self.device)
        angles, seen = rope_angles(at, c.rope_theta, c.qk_rope_head_dim), at <= at[:, None]
        outcome = Outcome(torch.empty(0), torch.zeros((), device=self.device))
        choices: list[_Choice] = []
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(c.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = rms_norm(x, self.weights[f"{prefix}input_layernorm.weight"], c.rms_norm_eps)
            x = x + self._attention(f"{prefix}self_attn.", normed, angles, seen, choices, sparse)
            normed = rms_norm(x, self.weights[f"{prefix}post_attention_layernorm.weight"], c.rms_norm_eps)
            x = x + self._mlp(layer, f"{prefix}mlp.", normed, outcome.loads)
        outcome.index_loss = torch.stack([choice.loss() for choice in choices]).mean()
        outcome.logits = self._linear(rms_norm(x, self.weights["model.norm.weight"], c.rms_norm_eps), "lm_head")
        return outcome

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _attention(
        self,
        prefix: str,
        x: torch.Tensor,
        angles: torch.Tensor,
        seen: torch.Tensor,
        choices: list[_Choice],
        sparse: bool,
    ) -> torch.Tensor:
        """MLA, not absorbed: keys and values of every head are made from the latents."""
        c, heads = self.config, (self.config.num_attention_heads, -1)
        q_a = self._linear(x, f"{prefix}q_a_proj")
        q_a = rms_norm(q_a, self.weights[f"{prefix}q_a_layernorm.weight"], c.latent_norm_eps)
        if f"{prefix}indexer.wk.weight" in self.weights:
            choices.append(self._choose(f"{prefix}indexer.", x.detach(), q_a.detach(), angles, seen, sparse))
        q_nope, q_rope = (
            self._linear(q_a, f"{prefix}q_b_proj")
            .unflatten(-1, heads)
            .split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        )
        latent, k_rope = self._linear(x, f"{prefix}kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent = rms_norm(latent, self.weights[f"{prefix}kv_a_layernorm.weight"], c.latent_norm_eps)
        k_nope, value = (
            self._linear(latent, f"{prefix}kv_b_proj")
            .unflatten(-1, heads)
            .split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        )
        k_rope = rope_adjacent(k_rope, angles)[..., None, :].expand(*k_nope.shape[:-1], -1)
        query = torch.cat([q_nope, rope_adjacent(q_rope, angles[:, None])], dim=-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, torch.cat([k_nope, k_rope], dim=-1)) * c.softmax_scale
        probabilities = scores.float().masked_fill(~choices[-1].allowed[:, None], float("-inf")).softmax(-1)
        choices[-1].attention.append(probabilities.detach().mean(1))
        out = torch.einsum("bhqk,bkhd->bqhd", probabilities.to(value.dtype), value)
        return self._linear(out.flatten(-2), f"{prefix}o_proj")

    def _choose(
        self,
        prefix: str,
        x: torch.Tensor,
        q_a: torch.Tensor,
        angles: torch.Tensor,
        seen: torch.Tensor,
        sparse: bool,
    ) -> _Choice:
        """Index scores sum_h weight[h] * relu(query[h] . key / sqrt(D)) / sqrt(heads), and what they select."""
        c = self.config
        queries = self._linear(q_a, f"{prefix}wq_b").unflatten(-1, (c.index_n_heads, c.index_head_dim))
        queries = rope_leading(queries, angles[:, None])
        norm = self.weights[f"{prefix}k_norm.weight"], self.weights[f"{prefix}k_norm.bias"]
        keys = rope_leading(layer_norm(self._linear(x, f"{prefix}wk").float(), *norm, c.index_norm_eps), angles)
        head_weights = self._linear(x, f"{prefix}weights_proj") * (c.index_weight_scale * c.index_scale)
        products = F.relu(torch.einsum("bqhd,bkd->bqhk", queries, keys))
        with torch.autocast(x.device.type, enabled=False):  # in bf16 too many scores would be equal
            scores = torch.einsum("bqh,bqhk->bqk", head_weights.float(), products.float())
        if not sparse or scores.shape[-1] <= c.index_topk:
            return _Choice(seen.expand_as(scores), scores)
        masked = scores.detach().masked_fill(~seen, float("-inf"))
        least = masked.topk(c.index_topk, dim=-1).values[..., -1:]
        return _Choice((masked >= least) & seen, scores)

    def _mlp(self, layer: int, prefix: str, y: torch.Tensor, loads: dict[int, torch.Tensor]) -> torch.Tensor:
        if layer not in self.biases:
            return self._gated(prefix, y)
        return self._routed(layer, prefix, y.flatten(0, 1), loads).view_as(y) + self._gated(
            f"{prefix}shared_experts.", y
        )

    def _gated(self, prefix: str, y: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(y, f"{prefix}{part}") for part in _EXPERTS[:2])
        return self._linear(swiglu(gate, up), f"{prefix}down_proj")

    def _routed(self, layer: int, prefix: str, y: torch.Tensor, loads: dict[int, torch.Tensor]) -> torch.Tensor:
        """All experts on all tokens [n, hidden], times weights that are mostly 0: with few experts that is fastest."""
        c = self.config
        with torch.autocast(y.device.type, enabled=False):
            logits = F.linear(y.float(), self.weights[f"{prefix}gate.weight"])
            experts, weights = route(
                logits.sigmoid(), self.biases[layer], c.num_experts_per_tok, c.routed_scaling_factor
            )
        factors = torch.zeros_like(logits).scatter(1, experts, weights)
        loads[layer] = (factors.detach() > 0).sum(0).float()
        gate, up, down = (self.weights[f"{prefix}experts.{part}"] for part in _EXPERTS)
        middle = swiglu(F.linear(y, gate.flatten(0, 1)), F.linear(y, up.flatten(0, 1))).unflatten(1, gate.shape[:2])
        return (middle * factors[..., None].to(middle.dtype)).flatten(1) @ down.transpose(1, 2).flatten(0, 1)
