"""One layer of DeepSeek as stages: the formulas with the layer's weights, each stage on its own input.

Activations are float32 [..., width]; the leading dimensions are whatever the caller has. Normalized ones are `Normed`.
The kernels' stages are tested against these methods, and the standard path is made of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocmega.models.common.formulas import (
    Normed,
    deferred_rms_norm,
    inverse_rms,
    rms_norm,
    route,
)
from rocmega.models.common.products import Input, Products
from rocmega.models.common.stages import PackedLayer, routed
from rocmega.models.common.weights import Layer
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.formulas import (
    clamped_swiglu,
    engram_gate,
    hash_route,
    overlapping,
    pooled,
    rope_trailing,
    router_scores,
    site_weights,
)

Site = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # collapse [..., S], expand [..., S], mix [..., S, S]


class LayerStages(PackedLayer):
    """A layer's stages, from its packed weights."""

    def __init__(
        self,
        config: DeepseekConfig,
        number: int,
        fields: Layer,
        products: Products,
        resident: bool,
        tp: int = 1,
        rank: int = 0,
        gather: Callable[[torch.Tensor], list[torch.Tensor]] | None = None,
    ):
        """tp, rank: whose part the fields are. gather: every rank's values, where there are several."""
        super().__init__(fields, products, resident)
        self.config, self.number, self.tp, self.rank, self.gather = config, number, tp, rank, gather
        self.compressed = config.compressed[number]
        self.hashed = config.hash_layers[number]
        # What a layer is, without its number: layers that are alike are compiled once.
        self.makes_entries, self.selects = config.makes_entries(number), config.selects(number)
        self.listed = self.compressed is not None and self.compressed.selector is not None
        bound = config.candidates
        self.chooses_candidates = bound is not None and number == bound.source
        self.bound = bound is not None and number > bound.source and self.selects

    # Streams.

    def site(self, name: str, streams: torch.Tensor) -> Site:
        """The mixing weights of a site, "attention" or "mlp", from streams [..., S, hidden]."""
        c, flat = self.config, streams.flatten(-2)
        mixes = self.products.island(Normed(flat, inverse_rms(flat, c.rms_norm_eps)), self.vector(f"{name}_mix"))
        scale, base = self.vector(f"{name}_mix_scale"), self.vector(f"{name}_mix_base")
        return site_weights(mixes, scale, base, c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps)

    def norm(self, name: str, x: torch.Tensor) -> Normed:
        """A sublayer's collapsed input [..., hidden] as it sees it; name as in `site`."""
        return deferred_rms_norm(x, self.vector(f"{name}_norm"), self.config.rms_norm_eps)

    # Attention.

    def query_norm(self, x: Input) -> Normed:
        """The low-rank query [..., q_lora] of normalized x [..., hidden]: queries and index queries are made of it."""
        return deferred_rms_norm(self.linear(x, "q_a"), self.vector("q_a_norm"), self.config.rms_norm_eps)

    def queries(self, q: Input, angles: torch.Tensor) -> torch.Tensor:
        """From normalized q [..., q_lora] to rotated queries [..., heads, head_dim], rounded as scoring wants them."""
        c = self.config
        heads = self.linear(q, "q_b").unflatten(-1, (-1, c.head_dim))
        if c.head_norm:
            heads = heads * inverse_rms(heads, c.rms_norm_eps)
        return self.products.round(rope_trailing(heads, angles[..., None, :, :]))

    def window_entry(self, x: Input, angles: torch.Tensor) -> torch.Tensor:
        """A token's key and value [..., head_dim] of normalized x [..., hidden]. Float32; the cache rounds it."""
        kv = rms_norm(self.linear(x, "kv"), self.vector("kv_norm"), self.config.rms_norm_eps)
        return rope_trailing(kv, angles)

    def output_projection(self, heads: torch.Tensor, backward: torch.Tensor) -> torch.Tensor:
        """Attention's outputs [..., heads, head_dim], turned back by their own position's angles, to [..., hidden].

        Neighbouring heads are a group with a matrix of its own; one matrix then takes the groups' results together. Of
        ranks, each has some heads and groups, and its share of the result.
        """
        count = self.config.o_groups // self.tp
        groups = rope_trailing(heads, backward[..., None, :, :]).unflatten(-2, (count, -1)).flatten(-2)
        parts = [self.linear(groups[..., group, :], "o_a", None if count == 1 else group) for group in range(count)]
        return self.linear(torch.cat(parts, dim=-1), "o_b")

    def sinks(self) -> torch.Tensor:
        """Of this rank's heads."""
        heads = self.config.num_attention_heads // self.tp
        return self.vector("sinks")[self.rank * heads : (self.rank + 1) * heads]

    # Compression. `field` is "entry" or "key": of the entries, or of V4's index keys.

    def pending(self, x: Input, field: str, positions: torch.Tensor) -> torch.Tensor:
        """What a compressor keeps of normalized x [..., hidden] at integer positions [...]: values and gates.

        [..., 2, width], width that of an entry, or twice that with overlap.
        """
        assert self.compressed is not None
        values = self.products.island(x, self.matrix(f"{field}_kv"))
        gates = self.products.island(x, self.matrix(f"{field}_gate"))
        if f"{field}_ape" in self.fields:
            gates = gates + self.vector(f"{field}_ape")[positions % self.compressed.ratio]
        return torch.stack([values, gates], dim=-2)

    def pool(self, pending: torch.Tensor, known: torch.Tensor, field: str) -> torch.Tensor:
        """Finished entries [F, width], normalized and not rotated, of what was pending: [F, T, 2, width], known [F, T].

        T is `ratio` tokens, or with overlap as many again before them.
        """
        assert self.compressed is not None
        values, gates = pending.unbind(-2)
        if self.compressed.overlap:
            values, gates = overlapping(values), overlapping(gates)
        return self.entry_norm(pooled(values, gates, known), field)

    def single(self, x: Input) -> torch.Tensor:
        """Entries of one token each, [..., head_dim], normalized and not rotated: nothing is pending."""
        return self.entry_norm(self.products.island(x, self.matrix("entry_kv")), "entry")

    def entry_norm(self, entry: torch.Tensor, field: str) -> torch.Tensor:
        """A compressor's norm of [..., width]."""
        return rms_norm(entry, self.vector(f"{field}_norm"), self.config.rms_norm_eps)

    def key_of_entry(self, entry: torch.Tensor) -> torch.Tensor:
        """V4.1's index key [..., index_dim] of an entry before its rotation, [..., head_dim]; not rotated either."""
        return self.entry_norm(self.products.island(entry, self.matrix("key_of_entry")), "key")

    # Selection.

    def index_queries(self, q: Input, angles: torch.Tensor) -> torch.Tensor:
        """From normalized q [..., q_lora] to rotated [..., index_heads, index_dim]."""
        heads = self.linear(q, "index_q").unflatten(-1, (self.config.index_n_heads, self.config.index_head_dim))
        return self.products.round(rope_trailing(heads, angles[..., None, :, :]))

    def index_head_weights(self, x: Input) -> torch.Tensor:
        """The index heads' weights [..., index_heads] of normalized x [..., hidden]."""
        return self.products.island(x, self.matrix("index_weights")) * self.config.index_weight_scale

    # Experts.

    def expert(self, y: Input, index: int, weight: torch.Tensor) -> torch.Tensor:
        """Routed expert `index` on y [..., hidden], times weight [..., 1], which goes in before `down`."""
        gate, up = (self.linear(y, "gate_up", 2 * index + part) for part in (0, 1))
        return self.linear(self._gate(gate, up) * weight, "down", index)

    def shared_expert(self, y: Input) -> torch.Tensor:
        """The expert that every token has, [..., hidden]."""
        gate, up = (self.linear(y, "shared_gate_up", part) for part in (0, 1))
        return self.linear(self._gate(gate, up), "shared_down")

    def _gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu(gate, up, self.config.swiglu_limit)

    def expert_scores(self, y: Input) -> torch.Tensor:
        """The router's scores of normalized y [T, hidden]: float32 [T, experts]."""
        return router_scores(self.products.island(y, self.matrix("router")))

    def route(self, scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 [T, topk], ascending, and weights float32 [T, topk] of scores [T, experts] and tokens [T]."""
        c = self.config
        if self.hashed:
            return hash_route(scores, self.vector("experts_of_token")[tokens].long(), c.routed_scaling_factor)
        return route(scores, self.vector("router_bias"), c.num_experts_per_tok, c.routed_scaling_factor)

    def mixture(self, y: Normed, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Routed experts and the shared one of y [T, hidden]; arguments as `route` gives them."""
        if self.gathers(experts):
            return self.gathered(self._gate, y, experts, weights) + self.shared_expert(y)
        return routed(self.expert, self.config.n_routed_experts, y, experts, weights) + self.shared_expert(y)

    # Engram.

    def _of_all(self, part: torch.Tensor) -> torch.Tensor:
        """What all ranks have of [..., hidden]."""
        if self.gather is not None:
            return torch.cat(self.gather(part), dim=-1)
        assert self.config.engram is not None
        return torch.cat([part] * self.config.engram.copies, dim=-1)

    def engram(self, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Streams [..., S, hidden] with what was looked up added, [..., columns * head_dim] float32."""
        c = self.config
        *keys, value = (self._of_all(self.linear(rows, "engram_kv", part)) for part in range(c.hc_mult + 1))
        query_weight, key_weight = self.vector("engram_q_weight"), self.vector("engram_k_weight")
        gate = engram_gate(streams, torch.stack(keys, dim=-2), query_weight, key_weight, c.rms_norm_eps)
        return streams + gate[..., None] * value[..., None, :]
