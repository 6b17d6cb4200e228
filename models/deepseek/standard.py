"""The standard path: DeepSeek in ordinary PyTorch, on the same packed weights and caches as kernels.

It does prefill, it is what decode falls back to, and it says what every kernel stage should give (formulas.py,
stages.py). Read `StandardPath.forward` and `_layer` for the model from top to bottom, `compress.py` for how entries
come into the cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rocmega.cache import PAGE
from rocmega.errors import RequestError
from rocmega.models.common.choices import Numbers
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
from rocmega.models.deepseek.cache import HybridCache, LayerCache, Stored
from rocmega.models.deepseek.compress import Selection, Span, add_entries, entries_of, remember, window_of
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.formulas import (
    Partial,
    backward,
    block_scores,
    candidate_blocks,
    candidate_mask,
    collapse,
    expand,
    frequencies,
    stream_gates,
    with_sinks,
)
from rocmega.models.deepseek.picks import Picks
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
    activations.py. matrix_units: see `Products`. group: the ranks that share the model, of which `weights` are one's
    part.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        weights: DeepseekWeights,
        cache: HybridCache,
        resident: bool | None = None,
        activations: str = "auto",
        matrix_units: bool | None = None,
        group: Group | None = None,
    ):
        self.config, self.weights, self.cache, self.group = config, weights, cache, group
        device = weights.device()
        activations = choose(weights.formats) if activations == "auto" else activations
        self.products = Products(weights.formats, device, activations, matrix_units)
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
        self._check(batch)
        first = batch.block_table[:, 0]
        order = torch.tensor([int((first[:row] == page).sum()) for row, page in enumerate(first)])
        logits = torch.empty(batch.rows, self.config.vocab_size, device=self.device)
        for turn in range(int(order.max()) + 1):
            rows = (order == turn).nonzero()[:, 0]
            part = StepBatch(batch.tokens[rows], batch.positions[rows], batch.block_table[rows])
            logits[rows.to(self.device)] = self.run(*self.place(part))
        return logits

    def place(self, batch: StepBatch) -> tuple[torch.Tensor, Span]:
        """What `run` wants of a step of different requests: its tokens int64 [rows] and its span, on the path's device.

        Raises RequestError as `StepBatch.check` does, and for several rows of one request.
        """
        self._check(batch)
        if len(set(batch.block_table[:, 0].tolist())) < batch.rows:
            raise RequestError("several rows of a step are of one request: run them by `decode`, one after the other.")
        span = self._span(batch.tokens[:, None], batch.positions[:, None], batch.block_table)
        return span.tokens[:, 0], span

    def record(self) -> Picks:
        """Something for `run` to leave its choices in."""
        return Picks()

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, span: Span, picks: Picks | None = None) -> torch.Tensor:
        """The step itself: logits float32 [rows, vocab]. On a GPU none of it waits for the host: graphs can hold it.

        picks: is given what the layers choose. Engram's tables must then be on the GPU, too.
        """
        streams, weights = self.forward(replace(span, tokens=tokens[:, None]), picks)
        return self.head(streams[:, 0], weights[:, 0])

    def _check(self, batch: StepBatch) -> None:
        limit = self.config.max_position_embeddings
        batch.check(vocab=self.config.vocab_size, cache_pages=self.cache.pages, max_model_len=limit)

    # The model.

    def forward(self, span: Span, picks: Picks | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A span's tokens through all layers, the caches written.

        Returns streams float32 [B, Q, S, hidden], and the weights [B, Q, S] that the last sublayer computed to collapse
        them with.
        """
        streams = self.embed(span.tokens)
        weights = torch.zeros_like(streams[..., 0])
        weights[..., 0].fill_(1)  # what a delayed model's first sublayer reads: one stream
        selection = Selection()
        looked_up = self._look_up(span)
        for number, layer in enumerate(self.layers):
            if number in looked_up:
                streams = layer.engram(streams, looked_up[number])
            cache = self.cache.of_layer(number)
            streams, weights, experts = self._layer(layer, cache, streams, weights, span, selection)
            if picks is not None:
                picks.add(layer, selection, experts)
        return streams, weights

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The streams of tokens [...], all alike: float32 [..., S, hidden]."""
        rows = self.weights.embedding[tokens.to(self.device, torch.int64)].to(torch.float32)
        return rows[..., None, :].expand(*rows.shape[:-1], self.config.hc_mult, -1).contiguous()

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
        self,
        layer: LayerStages,
        cache: LayerCache,
        streams: torch.Tensor,
        before: torch.Tensor,
        span: Span,
        selection: Selection,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """before: the collapse weights that the sublayer before this layer computed.

        Returns the new streams, the collapse weights that this layer computed last, and experts int64 [B * Q, topk].
        """
        own, spread, mix = layer.site("attention", streams)
        x = layer.norm("attention", collapse(streams, before if self.config.delayed else own))
        streams = expand(streams, self._sum(self._attention(layer, cache, x, span, selection)), spread, mix)
        before = own
        own, spread, mix = layer.site("mlp", streams)
        y = layer.norm("mlp", collapse(streams, before if self.config.delayed else own))
        rows = y.rows()
        experts, weights = self._route(layer, rows, span.tokens.flatten())
        out = layer.mixture(rows, experts, weights).unflatten(0, streams.shape[:2])
        return expand(streams, self._sum(out), spread, mix), own, experts

    def _route(self, layer: LayerStages, y: Normed, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of y [T, hidden], int64 [T, topk], ascending, and their weights."""
        return layer.route(layer.expert_scores(y), tokens)

    def _attention(
        self, layer: LayerStages, cache: LayerCache, x: Normed, span: Span, selection: Selection
    ) -> torch.Tensor:
        angles = span.plain if layer.compressed is None else span.stretched
        q = layer.query_norm(x)
        window = window_of(cache.window, span, layer.window_entry(x, angles))
        if layer.makes_entries:
            add_entries(layer, cache, span, x, self._stretched)
        if layer.selects:
            self._select(layer, cache.keys, q, x, span, selection)
        out = self._attend(layer, cache.entries, layer.queries(q, angles), window, span, selection)
        return layer.output_projection(out, backward(angles))

    def _select(
        self, layer: LayerStages, stored: Stored | None, q: Normed, x: Normed, span: Span, selection: Selection
    ) -> None:
        """Leaves the layer's selection by stored index keys in `selection`: nothing where it is everything."""
        c, kind = self.config, layer.compressed
        assert kind is not None
        assert stored is not None
        counts, length = span.counts(kind.ratio), span.length // kind.ratio
        selection.clear(keep_candidates=layer.bound)
        if length <= c.index_topk:
            return
        keys, heads = entries_of(stored, kind.ratio, span), layer.index_head_weights(x)
        queries = layer.index_queries(q, span.stretched)
        if stored.record is not None:  # queries are rounded as what they meet
            queries = stored.decode(stored.encode(queries))
        candidates = selection.candidates() if layer.bound else None
        for block in _blocks(queries.shape[1], queries.shape[0] * length * 4):
            scores = index_scores(queries[:, block], keys, heads[:, block], c.index_scale, self.products.matmul)
            seen = counts[:, block]
            if layer.chooses_candidates:
                self._bind(scores, seen, selection)
            if candidates is not None:
                assert c.candidates is not None
                chosen, valid = (of[:, block] for of in candidates)
                mask = candidate_mask(chosen, valid, c.candidates.block_size, length)
                scores = scores.masked_fill(~mask, float("-inf"))
            selection.parts.append(self._take(scores, seen))

    def _bind(self, scores: torch.Tensor, counts: torch.Tensor, selection: Selection) -> None:
        """Leaves candidates by scores [B, Q, L], of which tokens see `counts`: nothing where they are everything."""
        bound = self.config.candidates
        assert bound is not None
        if scores.shape[-1] > bound.blocks * bound.block_size:
            best = block_scores(scores, counts, bound.block_size)
            selection.bounds.append(self._candidates(best, counts))

    def _candidates(self, best: torch.Tensor, counts: torch.Tensor) -> Numbers:
        """Candidates by the blocks' scores [B, Q, blocks]."""
        bound = self.config.candidates
        assert bound is not None
        return candidate_blocks(best, counts, bound.blocks, bound.block_size)

    def _take(self, scores: torch.Tensor, counts: torch.Tensor) -> Numbers:
        """The best entries by scores [B, Q, L], of which tokens see `counts`, and what is -inf may not be selected."""
        places, valid = select(scores, counts - 1, self.config.index_topk)
        return places, valid & (scores.gather(-1, places) > float("-inf"))

    def _attend(
        self,
        layer: LayerStages,
        stored: Stored | None,
        query: torch.Tensor,
        window: tuple[torch.Tensor, torch.Tensor],
        span: Span,
        selection: Selection,
    ) -> torch.Tensor:
        """Attention of queries [B, Q, heads, D] over window and stored entries: [B, Q, heads, D]."""
        kind = layer.compressed
        parts = [self._shared(query, *window)]
        if kind is not None and stored is not None and span.length >= kind.ratio:
            entries = entries_of(stored, kind.ratio, span)
            chosen = selection.chosen() if layer.listed else None
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
        history = remember(self.cache.pools["recent"], span, engram.max_ngram_size, engram.pad_token_id)
        self._refuse_capture()
        ids = self.weights.compressed_ids(history)
        return {layer: self.weights.tables[layer].look_up(ids).to(self.device) for layer in engram.layers}

    def _refuse_capture(self) -> None:
        """Raises RequestError if a graph is being captured that would have to hold a look-up by the host."""
        on_host = any(table.rows.device != self.device for table in self.weights.tables.values())
        if on_host and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RequestError("Engram's tables are in host memory, where a graph cannot look anything up.")

    def _span(self, tokens: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor) -> Span:
        """Tokens and positions [B, Q] and block tables [B, pages], on the CPU or here, as a Span here."""
        length = int(positions.max()) + 1
        slots = self.cache.slots(block_table[:, 0]).to(self.device)
        table = block_table[:, : -(-length // PAGE)].to(self.device, torch.int64).clamp_min(0)
        ratios = {kind.ratio for kind in self.config.compressed if kind is not None}
        finished = {ratio: ((positions + 1) % ratio == 0).nonzero().to(self.device) for ratio in ratios}
        positions = positions.to(self.device, torch.int64)
        plain, stretched = (pair_angles(positions, of) for of in (self._plain, self._stretched))
        return Span(tokens.to(self.device, torch.int64), positions, table, slots, length, plain, stretched, finished)

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
