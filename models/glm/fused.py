"""A decode step of GLM as an engine would run it: eleven fused Triton kernels a layer, no host in between.

The same packed weights, cache and mathematics as the standard path, which stays the reference; rounded at the same
places. Every size is fixed by the rows and by `max_model_len`, so a step can be captured as a graph (rocmega/graph.py).
Read `FusedPath.run` and `_layer` for the model from top to bottom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocmega.cache import PAGE
from rocmega.checkpoint.tiles import FORMATS, PackedMatrix, dtype_of
from rocmega.errors import ConfigError
from rocmega.fused import absorbed, attend, embed, experts, index, latents, queries, residual, route
from rocmega.fused.launch import launch
from rocmega.models.glm.formulas import rope_angles
from rocmega.models.glm.picks import Picks, positions_of_slots

if TYPE_CHECKING:
    from rocmega.cache import PagedCache
    from rocmega.models.glm.config import GlmConfig
    from rocmega.models.glm.weights import GlmWeights, Layer
    from rocmega.step import StepBatch

MAX_ROWS = 16  # the width of a matrix unit's tile
ROUTER_PARTS = 8  # of the inputs, in programs of their own: the router alone would fill an eighth of the GPU
CHUNK = 1024  # positions that a program of the selection looks at


@dataclass(frozen=True)
class _Step:
    """One step's inputs and what its kernels leave for each other; all on the device, R rows.

    Fields: tokens, positions int32 [R]; table int32 [R, pages]; x float32 [R, hidden], the residual stream; normed,
    squares: x times the next norm's weight, rounded, and sums of squares of every 16 columns of x.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    x: torch.Tensor
    normed: torch.Tensor
    squares: torch.Tensor

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]


class Record:
    """What the kernels of a run leave of its choices, as they leave it; a graph's replays leave theirs in it, too."""

    def __init__(self, config: GlmConfig) -> None:
        self.config = config
        self.steps: list[_Step] = []
        self.weights: list[torch.Tensor] = []  # of each mixture layer, float32 [rows, experts]: 0 where not chosen
        self.selections: list[torch.Tensor | None] = []  # of each layer with an indexer, if not everything is chosen

    def read(self) -> Picks:
        """Waits for the run, and makes numbers of it."""
        [step] = self.steps
        topk = self.config.num_experts_per_tok
        experts = [weights.argsort(dim=1, descending=True)[:, :topk].sort(dim=1).values for weights in self.weights]
        seen = (step.positions + 1).clamp_max(self.config.index_topk)
        return Picks(experts, [s if s is None else positions_of_slots(s, step.table, seen) for s in self.selections])


class FusedPath:
    """Decode steps of 1 to 16 rows in fused Triton kernels, on a GPU (or a CPU in Triton's interpreter).

    weights, cache: on one device. max_model_len: longest context of a row; grids and buffers are sized for it, so a
    smaller one makes a faster step. Weights of one rank of several give that rank's part of every sum, not reduced.
    Raises ConfigError if the model has dimensions that the kernels do not take.
    """

    def __init__(self, config: GlmConfig, weights: GlmWeights, cache: PagedCache, *, max_model_len: int):
        _check(config)
        self.config, self.weights, self.cache, self.max_model_len = config, weights, cache, max_model_len
        self.device = weights.device()
        self.dtype = dtype_of(weights.formats.cache)  # of activations that meet big matrices
        self.selects = max_model_len > config.index_topk
        self.length = -(-max_model_len // PAGE) * PAGE
        positions = torch.arange(max_model_len, device=self.device)
        self.angles = rope_angles(positions, config.rope_theta, config.qk_rope_head_dim)
        self.heads = _matrix(weights.layers[0], "key_up").count
        norms = [layer["attention_norm"] for layer in weights.layers[1:]]
        self.next_norms = [*norms, weights.final_norm]

    def place(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `run` wants of a step, on the path's device. Raises RequestError as `StepBatch.check` does."""
        batch.check(
            vocab=self.config.vocab_size,
            cache_pages=self.cache.pages,
            max_rows=MAX_ROWS,
            max_model_len=self.max_model_len,
        )
        tokens, positions, table = (
            part.to(self.device, torch.int32).contiguous()
            for part in (batch.tokens, batch.positions, batch.block_table)
        )
        return tokens, positions, table

    def decode(self, batch: StepBatch) -> torch.Tensor:
        """One token of each row: logits, float32 [rows, vocab]. Raises RequestError as `place` does."""
        return self.run(*self.place(batch))

    def record(self) -> Record:
        """Something for `run` to leave its choices in."""
        return Record(self.config)

    @torch.no_grad()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, picks: Record | None = None
    ) -> torch.Tensor:
        """The step itself, on the current stream: nothing of it waits for the host, so graphs can hold it.

        tokens, positions: int32 [rows]; table: int32 [rows, pages], contiguous. picks: is given what layers choose.
        """
        step = self._step(tokens, positions, table)
        if picks is not None:
            picks.steps.append(step)
        self._embed(step)
        selection = step.positions  # of the last layer with an indexer; nobody reads it where everything is chosen
        for number in range(self.config.num_hidden_layers):
            selection = self._layer(number, step, selection, picks)
        return self._head(step)

    def _layer(self, number: int, step: _Step, selection: torch.Tensor, picks: Record | None = None) -> torch.Tensor:
        layer = self.weights.layers[number]
        full = self.config.full_index[number]
        q, squares, kv, key, head_weights = self._latents(layer, step, full)
        nope, query, index_query, counts = self._queries(number, layer, step, full, q, squares, kv, key)
        self._latent_query(layer, nope, query)
        if full and self.selects:
            selection = self._select(number, step, index_query, head_weights, counts)
        latent = self._attend(number, step, query, selection)
        self._output(layer, step, self._value_up(layer, latent))
        if self.config.dense_layers[number]:
            self._dense(number, layer, step)
        else:
            weights = self._experts(number, layer, step)
            if picks is not None:
                picks.weights.append(weights)
        if picks is not None and full:
            picks.selections.append(selection if self.selects else None)
        return selection

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> _Step:
        c, rows = self.config, tokens.shape[0]
        return _Step(
            tokens,
            positions,
            table,
            x=self._new(rows, c.hidden_size),
            normed=self._new(rows, c.hidden_size, dtype=self.dtype),
            squares=self._new(rows, c.hidden_size // 16),
        )

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # Stages, in the order of a step.

    def _embed(self, step: _Step) -> None:
        gain = self.weights.layers[0]["attention_norm"]
        arguments = (step.tokens, self.weights.embedding, gain, step.x, step.normed, step.squares)
        launch(embed.embed, (step.rows,), *arguments, N=self.config.hidden_size, warps=8)

    def _latents(self, layer: Layer, step: _Step, full: bool) -> tuple[torch.Tensor, ...]:
        c, rows = self.config, step.rows
        q_a, kv_a = _matrix(layer, "q_a"), _matrix(layer, "kv_a")
        index_k, index_weights = (_matrix(layer, name if full else "kv_a") for name in ("index_k", "index_weights"))
        q, squares = self._new(rows, q_a.n, dtype=self.dtype), self._new(rows, -(-q_a.n // 16))
        kv, key = self._new(rows, kv_a.n), self._new(rows, c.index_head_dim)
        head_weights = self._new(ROUTER_PARTS, rows, c.index_n_heads)
        index_tasks = index_k.n // 16 + -(-c.index_n_heads // 16) * ROUTER_PARTS if full else 0
        launch(
            latents.latents, (-(-q_a.n // 16) + -(-kv_a.n // 16) + index_tasks,),
            step.x, layer["attention_norm"], step.normed, step.squares, rows,
            *_packed(q_a), *_packed(kv_a), *_packed(index_k), _tiles(index_weights),
            layer["q_a_norm"], q, squares, kv, key, head_weights,
            HIDDEN=c.hidden_size, EPS=c.rms_norm_eps, Q=q_a.n, KV=kv_a.n, KEY=c.index_head_dim,
            INDEX_HEADS=c.index_n_heads, FORMAT=q_a.format, ISLAND=index_weights.format if full else q_a.format,
            PARTS=ROUTER_PARTS, FULL=full, **_shape(rows, q_a),
        )  # fmt: skip
        return q, squares, kv, key, head_weights

    def _queries(
        self, number: int, layer: Layer, step: _Step, full: bool,
        q: torch.Tensor, squares: torch.Tensor, kv: torch.Tensor, key: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        c, rows = self.config, step.rows
        q_b = _matrix(layer, "q_b")
        index_q = _matrix(layer, "index_q") if full else q_b
        nope = self._new(rows, self.heads, c.qk_nope_head_dim, dtype=self.dtype)
        query = self._new(rows, self.heads, c.latent_dim, dtype=self.dtype)
        index_query = self._new(rows, c.index_n_heads, c.index_head_dim, dtype=self.dtype)
        counts = self._new(rows, index.COUNTS, dtype=torch.int32)
        key_pool = self.cache.index[number]
        launch(
            queries.queries, (rows + q_b.n // 16 + (index_q.n // 16 if full else 0),),
            q, squares, rows, step.positions, step.table, step.table.shape[1], self.angles,
            kv, layer["kv_a_norm"], self.cache.latent[number], key, layer["index_k_norm" if full else "kv_a_norm"],
            self.cache.latent[number] if key_pool is None else key_pool, counts,
            *_packed(q_b), *_packed(index_q), nope, query, index_query,
            Q=c.q_lora_rank, Q_EPS=c.latent_norm_eps, HEADS=self.heads, NOPE=c.qk_nope_head_dim,
            ROPE=c.qk_rope_head_dim, LATENT=c.kv_lora_rank, INDEX_HEADS=c.index_n_heads, INDEX=c.index_head_dim,
            KEY_EPS=c.index_norm_eps, COUNTS=index.COUNTS, FORMAT=q_b.format, PAGE=PAGE, FULL=full, **_shape(rows, q_b),
        )  # fmt: skip
        return nope, query, index_query, counts

    def _latent_query(self, layer: Layer, nope: torch.Tensor, query: torch.Tensor) -> None:
        self._absorbed(_matrix(layer, "key_up"), nope, query)

    def _value_up(self, layer: Layer, latent: torch.Tensor) -> torch.Tensor:
        matrices = _matrix(layer, "value_up")
        out = self._new(latent.shape[0], self.heads, matrices.n, dtype=self.dtype)
        self._absorbed(matrices, latent, out)
        return out

    def _absorbed(self, matrices: PackedMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
        launch(
            absorbed.absorbed, (self.heads, -(-matrices.n // 16)), x, _tiles(matrices), out, x.shape[0],
            HEADS=self.heads, N=matrices.n, K=matrices.k, STRIDE=out.shape[2], FORMAT=matrices.format,
            **_shape(x.shape[0], matrices),
        )  # fmt: skip

    def _select(
        self, number: int, step: _Step, query: torch.Tensor, head_weights: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Cache slots int32 [R, index_topk] for this layer and those that share its choice."""
        c, rows, pages = self.config, step.rows, step.table.shape[1]
        chunks = -(-self.length // CHUNK)
        keys = self._new(rows, self.length, dtype=torch.int32)
        taken = self._new(rows, chunks, 2, dtype=torch.int32)
        selection = self._new(rows, c.index_topk, dtype=torch.int32)
        launch(
            index.index_scores, (rows, self.length // PAGE),
            query, self.cache.index[number], step.table, step.positions, head_weights, keys, counts,
            rows, pages, self.length, c.index_scale, c.index_weight_scale,
            HEADS=c.index_n_heads, WIDTH=c.index_head_dim, PARTS=ROUTER_PARTS, PAGE=PAGE,
        )  # fmt: skip
        sizes = {"TOPK": c.index_topk, "CHUNK": CHUNK}
        for digit in (1, 2):
            arguments = (keys, step.positions, counts, self.length)
            launch(index.count_next, (rows, chunks), *arguments, DIGIT=digit, **sizes)
        launch(index.count_taken, (rows, chunks), keys, step.positions, counts, taken, self.length, chunks, **sizes)
        launch(
            index.collect, (rows, chunks),
            keys, step.positions, step.table, counts, taken, selection, self.length, chunks, pages,
            PAGE=PAGE, CHUNKS=_power_of_two(chunks), **sizes,
        )  # fmt: skip
        return selection

    def _attend(self, number: int, step: _Step, query: torch.Tensor, selection: torch.Tensor) -> torch.Tensor:
        c, rows = self.config, step.rows
        split = 32 if rows == 1 else 64
        splits = -(-min(self.max_model_len, c.index_topk) // split)
        partial = self._new(rows, splits, self.heads, c.kv_lora_rank)
        stats = self._new(rows, splits, self.heads, 2)
        latent = self._new(rows, self.heads, c.kv_lora_rank, dtype=self.dtype)
        sizes = {"HEADS": self.heads, "LATENT": c.kv_lora_rank, "TOPK": c.index_topk, "SPLIT": split, "SPLITS": splits}
        launch(
            attend.attend, (rows, splits),
            query, self.cache.latent[number], selection, step.table, step.positions, partial, stats,
            c.softmax_scale, step.table.shape[1],
            ROPE=c.qk_rope_head_dim, PAGE=PAGE, SELECTED=self.selects, BLOCK=32,
            HEAD_ROWS=max(16, _power_of_two(self.heads)), **sizes,
        )  # fmt: skip
        block = min(64, c.kv_lora_rank)
        launch(
            attend.merge, (rows * self.heads, c.kv_lora_rank // block), partial, stats, step.positions, latent,
            SELECTED=self.selects, BLOCK=block, **sizes,
        )  # fmt: skip
        return latent

    def _output(self, layer: Layer, step: _Step, heads: torch.Tensor) -> None:
        self._add_linear(step, _matrix(layer, "o"), heads, layer["mlp_norm"])

    def _add_linear(self, step: _Step, matrix: PackedMatrix, x: torch.Tensor, gain: object) -> None:
        launch(
            residual.add_linear, (-(-matrix.n // 16),),
            x, step.x, gain, step.normed, step.squares, step.rows, *_packed(matrix),
            N=matrix.n, K=matrix.k, FORMAT=matrix.format, **_shape(step.rows, matrix),
        )  # fmt: skip

    def _dense(self, number: int, layer: Layer, step: _Step) -> None:
        gate_up = _matrix(layer, "gate_up")
        middle = self._new(1, step.rows, gate_up.n, dtype=self.dtype)
        self._gate_up(gate_up, step, step.squares, middle, step.positions, experts_in_all=0)
        self._add_linear(step, _matrix(layer, "down"), middle, self.next_norms[number])

    def _experts(self, number: int, layer: Layer, step: _Step) -> torch.Tensor:
        """Adds the mixture's output; returns each expert's weight, float32 [R, experts], 0 where it is not chosen."""
        c, rows = self.config, step.rows
        in_all = c.n_routed_experts
        router, gate_up, down = (_matrix(layer, name) for name in ("router", "gate_up", "down"))
        parts, weights = self._new(ROUTER_PARTS, rows, in_all), self._new(rows, in_all)
        launch(
            route.router, (-(-in_all // 16), ROUTER_PARTS),
            step.x, layer["mlp_norm"], step.squares, rows, _tiles(router), parts,
            EXPERTS=in_all, HIDDEN=c.hidden_size, EPS=c.rms_norm_eps, FORMAT=router.format, PARTS=ROUTER_PARTS,
            **_shape(rows, router),
        )  # fmt: skip
        slots = 1 + min(rows * c.num_experts_per_tok, in_all)
        middle = self._new(slots, rows, gate_up.n, dtype=self.dtype)
        chosen = self._new(1 + slots, dtype=torch.int32)
        launch(
            route.route, (rows,), parts, layer["router_bias"], weights, chosen, rows,
            EXPERTS=in_all, TOPK=c.num_experts_per_tok, FACTOR=c.routed_scaling_factor, PARTS=ROUTER_PARTS,
            ALONE=rows == 1, warps=1,
        )  # fmt: skip
        self._gate_up(gate_up, step, weights, middle, chosen, experts_in_all=in_all)
        launch(
            experts.down, (-(-down.n // 16),),
            middle, chosen, step.x, self.next_norms[number], step.normed, step.squares, rows, *_packed(down),
            N=down.n, WIDTH=down.k, FORMAT=down.format, **{**_shape(rows, down), "BLOCK": 64},
        )  # fmt: skip
        return weights

    def _gate_up(
        self, matrices: PackedMatrix, step: _Step, weights: torch.Tensor,
        middle: torch.Tensor, chosen: torch.Tensor, *, experts_in_all: int,
    ) -> None:  # fmt: skip
        launch(
            experts.gate_up, (-(-matrices.n // 16), middle.shape[0]),
            step.normed, step.squares, step.rows, weights, *_packed(matrices), middle, chosen,
            HIDDEN=self.config.hidden_size, WIDTH=matrices.n, EPS=self.config.rms_norm_eps, EXPERTS=experts_in_all,
            FORMAT=matrices.format, **_shape(step.rows, matrices),
        )  # fmt: skip

    def _head(self, step: _Step) -> torch.Tensor:
        c, matrix = self.config, self.weights.head
        logits = self._new(step.rows, matrix.n)
        wide = matrix.format == "f32" and self.dtype != torch.float32  # its inputs are not rounded
        launch(
            residual.head, (-(-matrix.n // 16),),
            step.x if wide else step.normed, self.weights.final_norm, step.squares, step.rows, _tiles(matrix), logits,
            N=matrix.n, K=matrix.k, EPS=c.rms_norm_eps, FORMAT=matrix.format, GAIN=wide, **_shape(step.rows, matrix),
        )  # fmt: skip
        return logits


def _shape(rows: int, matrix: PackedMatrix) -> dict[str, int]:
    """Of a kernel with products: the rows of a product, loads in flight, warps."""
    slots = matrix.tiles.shape[-2] * 4
    if rows == 1:
        # 32 KB of a matrix: 8 loads of 16 bytes a thread. A slot of MXFP4 has twice the numbers.
        most = 64 if matrix.format == "mxfp4" else 128
        return {"ROWS": 1, "BLOCK": min(most, _power_of_two(slots)), "STAGES": 1, "warps": 8 if slots >= 64 else 4}
    return {"ROWS": 16, "BLOCK": 1, "STAGES": 5, "warps": 2}


def _matrix(layer: Layer, field: str) -> PackedMatrix:
    matrix = layer[field]
    assert isinstance(matrix, PackedMatrix)
    return matrix


def _tiles(matrix: PackedMatrix) -> torch.Tensor:
    """A matrix's tiles as kernels read them: FP8 and MXFP4 as bytes."""
    return matrix.tiles.view(FORMATS[matrix.format].dtype) if matrix.scales is None else matrix.tiles


def _packed(matrix: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and scales; formats without scales give their tiles twice."""
    tiles = _tiles(matrix)
    return tiles, tiles if matrix.scales is None else matrix.scales


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check(config: GlmConfig) -> None:
    """Raises ConfigError with every dimension that the kernels' blocks do not fit."""
    powers = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_n_heads")
    wrong = [f"{name} {getattr(config, name)} is no power of two of at least 16" for name in powers
             if getattr(config, name) < 16 or getattr(config, name) & (getattr(config, name) - 1)]  # fmt: skip
    tiled = ("hidden_size", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")
    wrong += [f"{name} {getattr(config, name)} is no multiple of 16" for name in tiled if getattr(config, name) % 16]
    if wrong:
        raise ConfigError("The fused path cannot run this model: " + "; ".join(wrong) + ".")
