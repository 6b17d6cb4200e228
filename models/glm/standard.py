"""The standard path: GLM in ordinary PyTorch, on the same packed weights and the same paged cache as the kernel.

It does prefill, it is what decode falls back to, and it says what every kernel stage should give (formulas.py,
stages.py). Read `StandardPath.forward` and `_layer` for the model from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocmega.cache import PAGE, PagedCache
from rocmega.models.common.products import Products
from rocmega.models.glm.activations import choose
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.formulas import Normed, attention, deferred_rms_norm, index_scores, rope_angles, select
from rocmega.models.glm.picks import Picks
from rocmega.models.glm.shard import rank_config
from rocmega.models.glm.stages import LayerStages
from rocmega.models.glm.weights import GlmWeights
from rocmega.step import StepBatch, check_prompt

if TYPE_CHECKING:
    from rocmega.parallel import Group, Pipeline

# Scores or gathered cache values that one block of attention may hold: 256 MB in float32.
_BLOCK_VALUES = 1 << 26


@dataclass(frozen=True)
class Span:
    """The tokens of one forward: B sequences of Q tokens, all at known positions.

    Fields:
        positions: int64 [B, Q].
        table: int64 [B, P], the sequences' pages for positions 0 to length - 1; unused entries are 0.
        length: positions that the longest sequence has in the cache once these tokens are written.
        slots: int64 [B, Q], where the tokens' own cache entries go, in units of entries.
        angles: float32 [B, Q, rope / 2, 2].
    """

    positions: torch.Tensor
    table: torch.Tensor
    length: int
    slots: torch.Tensor
    angles: torch.Tensor

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Cache slots of positions [B, ...], each in its own sequence."""
        pages = self.table.gather(1, (positions // PAGE).flatten(1)).view_as(positions)
        return pages * PAGE + positions % PAGE

    def entries(self, pool: torch.Tensor) -> torch.Tensor:
        """Everything the sequences have in a pool [pages, PAGE, D]: [B, length, D]."""
        return pool[self.table].flatten(1, 2)[:, : self.length]


@dataclass(frozen=True)
class Selection:
    """Which positions each token attends to, shared by a full-index layer and those that follow it.

    Fields:
        positions: int64 [B, Q, K], ascending.
        valid: bool [B, Q, K], which of them count.
        slots: int64 [B, Q, K], where they are in every layer's latent cache.
    """

    positions: torch.Tensor
    valid: torch.Tensor
    slots: torch.Tensor


class StandardPath:
    """Runs a model's prefill and decode in PyTorch.

    weights and cache must be on one device. resident: keep dequantized matrices; by default on a CPU only, where
    memory is plenty and time is not. activations: what weights meet, see activations.py; "f32" rounds
    none here, whatever the absorbed matrices and the cache are in. matrix_units: see `Products`. pipeline: the other
    nodes, where `weights` are of one node's layers: all nodes are given the same tokens.
    """

    def __init__(
        self,
        config: GlmConfig,
        weights: GlmWeights,
        cache: PagedCache,
        resident: bool | None = None,
        activations: str = "auto",
        matrix_units: bool | None = None,
        group: Group | None = None,
        pipeline: Pipeline | None = None,
    ):
        self.config, self.weights, self.cache, self.group, self.pipeline = config, weights, cache, group, pipeline
        mine = rank_config(config, weights.tp)
        device = weights.device()
        activations = choose(weights.formats) if activations == "auto" else activations
        self.products = Products(weights.formats, device, activations, matrix_units)
        resident = device.type == "cpu" if resident is None else resident
        self._resident = resident
        self._head: torch.Tensor | None = None  # once it is wanted, where dequantized matrices are kept
        self.layers = [
            LayerStages(mine, number, weights.layers[number], self.products, resident) for number in weights.section
        ]

    @property
    def device(self) -> torch.device:
        """Where the path runs."""
        return self.weights.device()

    # What callers use.

    @torch.no_grad()
    def prefill(
        self,
        tokens: torch.Tensor,
        position0: int,
        block_table: torch.Tensor,
        chunk: int = 512,
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Runs one request's tokens at positions position0, position0 + 1, ..., `chunk` at a time.

        tokens: integers [n]; block_table: int32 [pages], the request's pages, with room for all of them. Positions
        before position0 must be in the cache. observe: given the residual stream that the layers leave, float32
        [tokens, hidden], of each chunk. Returns the last token's logits, float32 [vocab]. Raises RequestError for a
        token out of range or a table too short.
        """
        c = self.config
        end = check_prompt(tokens, position0, block_table, chunk, vocab=c.vocab_size, longest=c.max_position_embeddings)
        for start in range(position0, end, chunk):
            positions = torch.arange(start, min(start + chunk, end))
            hidden = self.forward(tokens[positions - position0][None], self.span(positions[None], block_table[None]))
            if observe is not None:
                observe(hidden[0])
        return self.head(hidden[0, -1])

    @torch.no_grad()
    def decode(self, batch: StepBatch) -> torch.Tensor:
        """Runs one token of each row: logits, float32 [rows, vocab].

        Raises RequestError as `StepBatch.check` does.
        """
        return self.run(*self.place(batch))

    @torch.no_grad()
    def decode_with_residual(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the residual stream that the layers leave, float32 [rows, hidden]."""
        tokens, span = self.place(batch)
        x = self.forward(tokens[:, None], span)[:, 0]
        return self.head(x), x

    def place(self, batch: StepBatch) -> tuple[torch.Tensor, Span]:
        """What `run` wants of a step: its tokens int64 [rows] and its span, on the path's device.

        Raises RequestError as `StepBatch.check` does.
        """
        limit = self.config.max_position_embeddings
        batch.check(vocab=self.config.vocab_size, cache_pages=self.cache.pages, max_model_len=limit)
        tokens = batch.tokens.to(self.device, torch.int64)
        return tokens, self.span(batch.positions[:, None], batch.block_table)

    def record(self) -> Picks:
        """Something for `run` to leave its choices in."""
        return Picks()

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, span: Span, picks: Picks | None = None) -> torch.Tensor:
        """The step itself: logits float32 [rows, vocab]. On a GPU none of it waits for the host: graphs can hold it.

        picks: is given what the layers choose.
        """
        return self.head(self.forward(tokens[:, None], span, picks)[:, 0])

    # The model.

    def forward(self, tokens: torch.Tensor, span: Span, picks: Picks | None = None) -> torch.Tensor:
        """Tokens [B, Q] through the layers that are here, their cache entries written: float32 [B, Q, hidden].

        That is the residual stream, which the first node's embedding begins and every other one's is sent.
        """
        section = self.weights.section
        if self.pipeline is not None and section[0] > 0:
            x = torch.empty(*tokens.shape, self.config.hidden_size, device=self.device)
            self.pipeline.receive(x)
        else:
            x = self.embed(tokens)
        x = self.through_layers(x, span, picks)
        if self.pipeline is not None and section[-1] + 1 < self.config.num_hidden_layers:
            self.pipeline.send(x)
        return x

    def through_layers(self, x: torch.Tensor, span: Span, picks: Picks | None = None) -> torch.Tensor:
        """The residual stream x [B, Q, hidden] of tokens, from before the first layer here to after the last."""
        selection: Selection | None = None
        for number, layer in enumerate(self.layers, self.weights.section[0]):
            latents, keys = self.cache.latent[number], self.cache.index[number]
            x, selection, experts = self._layer(layer, latents, keys, x, span, selection)
            if picks is not None:
                picks.add(layer.full_index, selection, experts)
        return x

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream of tokens [...]: float32 [..., hidden]."""
        return self.weights.embedding[tokens.to(self.device, torch.int64)].to(torch.float32)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head of the residual stream [..., hidden]: logits float32 [..., vocab].

        Of several nodes, the last one's on all of them.
        """
        if self.pipeline is None:
            return self._logits(x)
        here = self.pipeline.node + 1 == self.pipeline.nodes
        logits = self._logits(x) if here else torch.empty(*x.shape[:-1], self.config.vocab_size, device=self.device)
        return self.pipeline.from_last(logits)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = deferred_rms_norm(x[None], self.weights.final_norm, self.config.rms_norm_eps)
        logits = self.products.head(normed, self.head_matrix())[0]
        return logits if self.group is None else torch.cat(self.group.all_gather(logits), dim=-1)

    def head_matrix(self) -> torch.Tensor:
        """The head's values, [vocab, hidden]."""
        if self._head is not None:
            return self._head
        values = self.weights.head.dequantize(self._head_dtype())
        if self._resident:
            self._head = values
        return values

    def _sum(self, share: torch.Tensor) -> torch.Tensor:
        """A block's output, of which each rank has a share."""
        return share if self.group is None else self.group.all_reduce(share)

    def _layer(
        self,
        layer: LayerStages,
        latents: torch.Tensor,
        keys: torch.Tensor | None,
        x: torch.Tensor,
        span: Span,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, Selection | None, torch.Tensor | None]:
        """One layer over its pools of latents and index keys.

        Returns the new residual stream, the selection in force, and a mixture's experts int64 [B * Q, topk].
        """
        normed = layer.attention_norm(x)
        q_a, kv_a, index_k, index_weights = layer.down_projections(normed)
        q = layer.query_norm(q_a)
        _write(latents, span.slots, layer.latent_entry(kv_a, span.angles))
        if index_k is not None and index_weights is not None:
            assert keys is not None
            _write(keys, span.slots, layer.index_entry(index_k, span.angles))
            selection = self._select(layer, q, index_weights, keys, span)
        nope, rope = layer.queries(q, span.angles)
        query = layer.attention_query(layer.latent_query(nope), rope)
        latent = self._attend(query, latents, span, selection)
        x = x + self._sum(layer.output_projection(layer.value_up(latent)))
        y = layer.mlp_norm(x)
        if layer.dense:
            return x + self._sum(layer.expert(y)), selection, None
        experts, weights = self._route(layer, y)
        return x + self._sum(layer.mixture(y, experts, weights)), selection, experts

    def _route(self, layer: LayerStages, y: Normed) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each token of y, int64 [B * Q, topk], ascending, and their weights."""
        return layer.route(layer.router_logits(y.rows()))

    def _select(
        self, layer: LayerStages, q: Normed, index_weights: torch.Tensor, pool: torch.Tensor, span: Span
    ) -> Selection | None:
        """Each token's selection, or None where it is everything: then attention reads the cache as it lies."""
        if span.length <= self.config.index_topk:
            return None
        keys, queries = span.entries(pool), self.products.round(layer.index_queries(q, span.angles))
        heads = layer.index_head_weights(index_weights)
        parts = []
        # Scores, and what select makes of them.
        for block in _blocks(queries.shape[1], queries.shape[0] * span.length * 4):
            scores = index_scores(
                queries[:, block], keys, heads[:, block], self.config.index_scale, self.products.matmul
            )
            parts.append(self._take(scores, span.positions[:, block]))
        positions, valid = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return Selection(positions, valid, span.slots_of(positions))

    def _take(self, scores: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `select` gives for index scores [B, Q, L] of tokens at positions [B, Q]."""
        return select(scores, positions, self.config.index_topk)

    def _attend(self, query: torch.Tensor, pool: torch.Tensor, span: Span, selection: Selection | None) -> torch.Tensor:
        """Attention of queries [B, Q, heads, kv_lora + rope] over a pool: latents [B, Q, heads, kv_lora]."""
        if selection is None:
            return self._attend_all(query, span.entries(pool), span.positions)
        return self._attend_selected(query, pool.flatten(0, 1), selection)

    def _attend_all(self, query: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A sequence's tokens see the same entries [B, length, D], up to their own: one group per sequence."""
        batch, tokens, heads, _ = query.shape
        at = torch.arange(entries.shape[1], device=self.device)
        parts = []
        for block in _blocks(tokens, batch * heads * entries.shape[1]):
            seen = (at <= positions[:, block, None]).repeat_interleave(heads, dim=1)
            out = self._attention(query[:, block].flatten(1, 2), entries, seen)
            parts.append(out.unflatten(1, (-1, heads)))
        return torch.cat(parts, dim=1)

    def _attend_selected(self, query: torch.Tensor, pool: torch.Tensor, selection: Selection) -> torch.Tensor:
        """Every token sees its own entries of a pool [slots, D]: one group per token."""
        batch, tokens, heads, width = query.shape
        parts = []
        for block in _blocks(tokens, batch * selection.slots.shape[-1] * (width + heads)):
            entries = pool[selection.slots[:, block].flatten(0, 1)]
            seen = selection.valid[:, block].flatten(0, 1)[:, None]
            out = self._attention(query[:, block].flatten(0, 1), entries, seen)
            parts.append(out.unflatten(0, (batch, -1)))
        return torch.cat(parts, dim=1)

    def _attention(self, query: torch.Tensor, entries: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        c = self.config
        return attention(query, entries, seen, c.softmax_scale, c.kv_lora_rank, self.products.matmul)

    def span(self, positions: torch.Tensor, block_table: torch.Tensor) -> Span:
        """Positions [B, Q] and block tables [B, pages], on the CPU or here, as a Span here."""
        length = int(positions.max()) + 1
        positions = positions.to(self.device, torch.int64)
        table = block_table[:, : -(-length // PAGE)].to(self.device, torch.int64).clamp_min(0)
        pages = table.gather(1, positions // PAGE)
        angles = rope_angles(positions, self.config.rope_theta, self.config.qk_rope_head_dim)
        return Span(positions, table, length, pages * PAGE + positions % PAGE, angles)

    def _head_dtype(self) -> torch.dtype:
        return self.products.weight_dtype if self.weights.formats.island == "bf16" else torch.float32


def _write(pool: torch.Tensor, slots: torch.Tensor, entries: torch.Tensor) -> None:
    """Puts entries [B, Q, D] into the slots [B, Q] of a pool [pages, PAGE, D], rounded to its dtype."""
    pool.flatten(0, 1)[slots.flatten()] = entries.flatten(0, 1).to(pool.dtype)


def _blocks(tokens: int, values_per_token: int) -> list[slice]:
    """Cuts a sequence's tokens so that one block handles at most _BLOCK_VALUES values."""
    size = max(1, _BLOCK_VALUES // values_per_token)
    return [slice(start, start + size) for start in range(0, tokens, size)]
