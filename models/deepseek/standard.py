"""The standard path: DeepSeek in ordinary PyTorch, on the same packed weights and caches as kernels.

It does prefill, it is what decode falls back to, and it says what every kernel stage should give (formulas.py,
stages.py). Read `StandardPath.forward` and `_layer` for the model from top to bottom, `compress.py` for how entries
come into the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocmega.cache import PAGE
from rocmega.models.common.formulas import (
    Normed,
    attention_partial,
    deferred_rms_norm,
    index_scores,
    inverse_rms,
    pair_angles,
    select,
)
from rocmega.models.common.products import Products
from rocmega.models.common.stages import PackedLayer
from rocmega.models.deepseek.activations import choose
from rocmega.models.deepseek.cache import HybridCache
from rocmega.models.deepseek.compress import Selection, Span, add_entries, entries_of, remember, window_of
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.formulas import (
    Partial,
    backward,
    candidate_mask,
    collapse,
    expand,
    frequencies,
    stream_gates,
    with_sinks,
)
from rocmega.models.deepseek.stages import LayerStages
from rocmega.models.deepseek.weights import DeepseekWeights
from rocmega.step import StepBatch, check_prompt

if TYPE_CHECKING:
    from rocmega.parallel import Group

# Scores or gathered cache values that one block of attention may hold: 256 MB in float32.
_BLOCK_VALUES = 1 << 26


class StandardPath:
    """Runs a model's prefill and decode in PyTorch.

    weights and cache must be on one device, Engram's tables on it or on the host. resident: keep dequantized matrices;
    by default on a CPU only, where memory is plenty and time is not. activations: what weights meet, see
    activations.py. group: the ranks that share the model, of which `weights` are one's part.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        weights: DeepseekWeights,
        cache: HybridCache,
        resident: bool | None = None,
        activations: str = "auto",
        group: Group | None = None,
    ):
        self.config, self.weights, self.cache, self.group = config, weights, cache, group
        device = weights.device()
        activations = choose(weights.formats) if activations == "auto" else activations
        self.products = Products(weights.formats, device, activations)
        resident = device.type == "cpu" if resident is None else resident
        whose = (weights.tp, weights.rank, None if group is None else group.all_gather)
        self.layers = [
            LayerStages(config, number, fields, self.products, resident, *whose)
            for number, fields in enumerate(weights.layers)
        ]
        self._end = PackedLayer(weights.end, self.products, resident)
        dim = config.qk_rope_head_dim
        self._plain = frequencies(dim, config.rope_theta, None, device)
        self._stretched = frequencies(dim, config.compress_rope_theta, config.yarn, device)
        self._head = weights.head.dequantize(self._head_dtype()) if resident else None

    @property
    def device(self) -> torch.device:
        """Where the path runs."""
        return self.weights.device()

    # What callers use.

    @torch.no_grad()
    def prefill(
        self, tokens: torch.Tensor, position0: int, block_table: torch.Tensor, chunk: int = 512
    ) -> torch.Tensor:
        """Runs one request's tokens at positions position0, position0 + 1, ..., `chunk` at a time.

        tokens: integers [n]; block_table: int32 [pages], the request's pages, with room for all of them. What was
        before position0 must be in the cache, and it must be the last thing that this request ran. Returns the last
        token's logits, float32 [vocab]. Raises RequestError for a token out of range or a table too short.
        """
        c = self.config
        end = check_prompt(tokens, position0, block_table, chunk, vocab=c.vocab_size, longest=c.max_position_embeddings)
        for start in range(position0, end, chunk):
            positions = torch.arange(start, min(start + chunk, end))
            span = self._span(tokens[positions - position0][None], positions[None], block_table[None])
            streams, weights = self.forward(span)
        return self.head(streams[0, -1], weights[0, -1])

    @torch.no_grad()
    def decode(self, batch: StepBatch) -> torch.Tensor:
        """Runs one token of each row: logits, float32 [rows, vocab].

        Several rows of a request are its successive tokens, and run one after the other: each needs the state that the
        one before leaves. Raises RequestError as `StepBatch.check` does.
        """
        limit = self.config.max_position_embeddings
        batch.check(vocab=self.config.vocab_size, cache_pages=self.cache.pages, max_model_len=limit)
        first = batch.block_table[:, 0]
        order = torch.tensor([int((first[:row] == page).sum()) for row, page in enumerate(first)])
        logits = torch.empty(batch.rows, self.config.vocab_size, device=self.device)
        for turn in range(int(order.max()) + 1):
            rows = (order == turn).nonzero()[:, 0]
            part = StepBatch(batch.tokens[rows], batch.positions[rows], batch.block_table[rows])
            logits[rows.to(self.device)] = self._decode_rows(part)
        return logits

    def _decode_rows(self, batch: StepBatch) -> torch.Tensor:
        """Rows of different requests: logits, float32 [rows, vocab]."""
        streams, weights = self.forward(self._span(batch.tokens[:, None], batch.positions[:, None], batch.block_table))
        return self.head(streams[:, 0], weights[:, 0])

    # The model.

    def forward(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """A span's tokens through all layers, the caches written.

        Returns streams float32 [B, Q, S, hidden], and the weights [B, Q, S] that the last sublayer computed to collapse
        them with.
        """
        streams = self.embed(span.tokens)
        weights = torch.zeros_like(streams[..., 0])
        weights[..., 0] = 1  # what a delayed model's first sublayer reads: one stream
        selection = Selection()
        looked_up = self._look_up(span)
        for number, layer in enumerate(self.layers):
            if number in looked_up:
                streams = layer.engram(streams, looked_up[number])
            streams, weights = self._layer(layer, streams, weights, span, selection)
        return streams, weights

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The streams of tokens [...], all alike: float32 [..., S, hidden]."""
        rows = self.weights.embedding[tokens.to(self.device, torch.int64)].to(torch.float32)
        return rows[..., None, :].expand(*rows.shape[:-1], self.config.hc_mult, -1)

    def head(self, streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The stack's end: streams [..., S, hidden] collapsed, norm, LM head: logits float32 [..., vocab].

        weights [..., S]: the last sublayer's, used by a delayed model; others have some of their own.
        """
        c = self.config
        if not c.delayed:
            end, flat = self._end, streams.flatten(-2)
            mixes = self.products.island(Normed(flat, inverse_rms(flat, c.rms_norm_eps)), end.vector("end_mix"))
            weights = stream_gates(mixes, end.vector("end_mix_scale"), end.vector("end_mix_base")) + c.hc_eps
        normed = deferred_rms_norm(collapse(streams, weights)[None], self.weights.final_norm, c.rms_norm_eps)
        head = self.weights.head.dequantize(self._head_dtype()) if self._head is None else self._head
        logits = self.products.head(normed, head)[0]
        return logits if self.group is None else torch.cat(self.group.all_gather(logits), dim=-1)

    def _sum(self, share: torch.Tensor) -> torch.Tensor:
        """What all ranks' shares add up to."""
        return share if self.group is None else self.group.all_reduce(share)

    def _layer(
        self, layer: LayerStages, streams: torch.Tensor, before: torch.Tensor, span: Span, selection: Selection
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """before: the collapse weights that the sublayer before this layer computed."""
        own, spread, mix = layer.site("attention", streams)
        x = layer.norm("attention", collapse(streams, before if self.config.delayed else own))
        streams = expand(streams, self._sum(self._attention(layer, x, span, selection)), spread, mix)
        before = own
        own, spread, mix = layer.site("mlp", streams)
        y = layer.norm("mlp", collapse(streams, before if self.config.delayed else own))
        return expand(streams, self._sum(layer.mlp(y, span.tokens)), spread, mix), own

    def _attention(self, layer: LayerStages, x: Normed, span: Span, selection: Selection) -> torch.Tensor:
        kind, angles = layer.compressed, span.plain if layer.compressed is None else span.stretched
        q = layer.query_norm(x)
        window = window_of(self.cache, layer.number, span, layer.window_entry(x, angles))
        if kind is not None and kind.source == layer.number:
            add_entries(layer, self.cache, span, x, self._stretched)
        if kind is not None and kind.selector == layer.number:
            self._select(layer, q, x, span, selection)
        out = self._attend(layer, layer.queries(q, angles), window, span, selection)
        return layer.output_projection(out, backward(angles))

    def _select(self, layer: LayerStages, q: Normed, x: Normed, span: Span, selection: Selection) -> None:
        """Leaves the layer's selection in `selection`: nothing where it is everything."""
        c, kind = self.config, layer.compressed
        assert kind is not None
        counts, length = span.counts(kind.ratio), span.length // kind.ratio
        bound = c.candidates if c.candidates and layer.number >= c.candidates.source else None
        selection.clear(keep_candidates=bound is not None)
        if length <= c.index_topk:
            return
        name = f"keys.{kind.source}"
        keys, heads = entries_of(self.cache, name, kind.ratio, span), layer.index_head_weights(x)
        queries = layer.index_queries(q, span.stretched)
        if self.cache.spec.record("keys") is not None:  # queries are rounded as what they meet
            queries = self.cache.decode(name, self.cache.encode(name, queries))
        for block in _blocks(queries.shape[1], queries.shape[0] * length * 4):
            scores = index_scores(queries[:, block], keys, heads[:, block], c.index_scale, self.products.matmul)
            seen = counts[:, block]
            if bound is not None and layer.number == bound.source:
                selection.candidates.append(candidate_mask(scores, seen, bound.blocks, bound.block_size))
            elif bound is not None:
                mask = torch.cat(selection.candidates, dim=1)[:, block]
                scores = scores.masked_fill(~mask, float("-inf"))
            places, valid = select(scores, seen - 1, c.index_topk)
            selection.add(places, valid & (scores.gather(-1, places) > float("-inf")))

    def _attend(
        self,
        layer: LayerStages,
        query: torch.Tensor,
        window: tuple[torch.Tensor, torch.Tensor],
        span: Span,
        selection: Selection,
    ) -> torch.Tensor:
        """Attention of queries [B, Q, heads, D] over window and compressed entries: [B, Q, heads, D]."""
        kind = layer.compressed
        parts = [self._shared(query, *window)]
        if kind is not None and span.length >= kind.ratio:
            entries = entries_of(self.cache, f"entries.{kind.source}", kind.ratio, span)
            chosen = selection.chosen() if kind.selector is not None else None
            if chosen is None:
                seen = torch.arange(entries.shape[1], device=self.device) < span.counts(kind.ratio)[..., None]
                parts.append(self._shared(query, entries, seen))
            else:
                parts.append(self._own(query, entries, *chosen))
        return with_sinks(parts, layer.sinks())

    def _shared(self, query: torch.Tensor, entries: torch.Tensor, seen: torch.Tensor) -> Partial:
        """Attention of queries [B, Q, H, D] over their sequence's entries [B, K, D], seen bool [B, Q, K]."""
        batch, tokens, heads, _ = query.shape
        parts = []
        for block in _blocks(tokens, batch * heads * entries.shape[1]):
            allowed = seen[:, block].repeat_interleave(heads, dim=1)
            partial = self._partial(query[:, block].flatten(1, 2), entries, allowed)
            parts.append(tuple(of.unflatten(1, (-1, heads)) for of in partial))
        return _joined(parts)

    def _own(self, query: torch.Tensor, entries: torch.Tensor, places: torch.Tensor, valid: torch.Tensor) -> Partial:
        """The same over entries of each token's own: those at its places [B, Q, K], of which `valid` count."""
        batch, tokens, heads, width = query.shape
        rows = torch.arange(batch, device=self.device)[:, None, None]
        parts = []
        for block in _blocks(tokens, batch * places.shape[-1] * (width + heads)):
            gathered = entries[rows, places[:, block]].flatten(0, 1)
            partial = self._partial(query[:, block].flatten(0, 1), gathered, valid[:, block].flatten(0, 1)[:, None])
            parts.append(tuple(of.unflatten(0, (batch, -1)) for of in partial))
        return _joined(parts)

    def _partial(self, query: torch.Tensor, entries: torch.Tensor, allowed: torch.Tensor) -> Partial:
        scale, matmul = self.config.softmax_scale, self.products.matmul
        return attention_partial(query, entries, allowed, scale, query.shape[-1], matmul)

    # Engram.

    def _look_up(self, span: Span) -> dict[int, torch.Tensor]:
        """Layer -> what its table holds for each token, float32 [B, Q, columns * head_dim]."""
        engram = self.config.engram
        if engram is None:
            return {}
        history = remember(self.cache, span, engram.max_ngram_size, engram.pad_token_id)
        ids = self.weights.compressed_ids(history)
        return {layer: self.weights.tables[layer].look_up(ids).to(self.device) for layer in engram.layers}

    def _span(self, tokens: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor) -> Span:
        """Tokens and positions [B, Q] and block tables [B, pages], on the CPU or here, as a Span here."""
        length = int(positions.max()) + 1
        slots = self.cache.slots(block_table[:, 0]).to(self.device)
        table = block_table[:, : -(-length // PAGE)].to(self.device, torch.int64).clamp_min(0)
        positions = positions.to(self.device, torch.int64)
        plain, stretched = (pair_angles(positions, of) for of in (self._plain, self._stretched))
        return Span(tokens.to(self.device, torch.int64), positions, table, slots, length, plain, stretched)

    def _head_dtype(self) -> torch.dtype:
        return self.products.weight_dtype if self.weights.formats.island == "bf16" else torch.float32


def _joined(parts: list[tuple[torch.Tensor, ...]]) -> Partial:
    """Partial attentions of blocks of tokens as one, along the tokens."""
    out, maximum, total = (torch.cat(of, dim=1) for of in zip(*parts, strict=True))
    return out, maximum, total


def _blocks(tokens: int, values_per_token: int) -> list[slice]:
    """Cuts a sequence's tokens so that one block handles at most _BLOCK_VALUES values."""
    size = max(1, _BLOCK_VALUES // values_per_token)
    return [slice(start, start + size) for start in range(0, tokens, size)]
