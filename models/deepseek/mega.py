"""The mega-task path: a decode step as one launch of models/deepseek/decode.hip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocmega.cache import PAGE
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import ConfigError, RequestError
from rocmega.models.common.formulas import pair_angles
from rocmega.models.common.kernel import ROWS, SPLIT, TILE_ROWS, router_slices
from rocmega.models.common.mega import DecodePath, common_region_bytes
from rocmega.models.deepseek import kernel
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.formulas import frequencies

if TYPE_CHECKING:
    from rocmega.models.common.weights import Layer
    from rocmega.models.deepseek.engram import Table
    from rocmega.step import StepBatch

NOBODY = 0xFFFFFFFF
PIECE = 2 * kernel.THREADS  # channels that a block takes at once, as in hip/stages/streams.h and engram.h


def max_splits(config: DeepseekConfig, max_model_len: int) -> int:
    """Parts of a row's attention at most: of the window, and of a selection or of all entries."""
    kinds = [kind for kind in config.compressed if kind is not None]
    made = [(kind.selector is not None, max_model_len // kind.ratio) for kind in kinds]
    entries = [min(config.index_topk, most) if selected else most for selected, most in made]
    return -(-config.sliding_window // SPLIT) + -(-max(entries, default=0) // SPLIT)


def mix_slices(config: DeepseekConfig) -> int:
    """In how many parts of k the products with the mixing weights come, as in hip/stages/streams.h."""
    parts, rest = divmod(config.hc_mult * config.hidden_size, PIECE)
    return 1 if rest or parts > 40 else parts


def region_bytes(
    config: DeepseekConfig, tp: int, max_pages: int, splits: int, blocks: int, *, exact: bool
) -> dict[str, int]:
    """Sizes of everything a launch writes, by field of DecodeArgs; shapes as in descriptor.h.

    splits: as of `max_splits`. exact: activations are float32, one a word; else bf16, two.
    """
    c, shape, pair, word = config, kernel.Shape.of(config, tp), 8, 4
    streams, hidden, heads = c.hc_mult, c.hidden_size, shape.heads
    activations = {
        "x_normed": hidden,
        "q_normed": c.q_lora_rank,
        "index_query": c.index_n_heads * c.index_head_dim,
        "attention_out": heads * c.head_dim,
        "grouped": shape.groups * c.o_lora_rank,
        "shared_middle": shape.expert_width,
        "middle": c.num_experts_per_tok * shape.expert_width,
    }
    values = {
        "h": streams * hidden,
        "h_engram": streams * hidden if c.engram else 0,
        "x": hidden,
        "x_squares": hidden // TILE_ROWS,
        "products": mix_slices(c) * (c.mixes + 1),
        "site": c.mixes,
        "dots": -(-hidden // PIECE) * 3 * streams if c.engram else 0,
        "q_squares": c.q_lora_rank // TILE_ROWS,
        "down_kv": c.head_dim,
        "down_wide": kernel.Kinds.of(c).down_width(c),
        "latent": c.head_dim if c.keys_from_latent else 0,
        "key_values": c.index_head_dim if c.keys_from_latent else 0,
        "query": heads * c.head_dim,
        "query_squares": heads * c.head_dim // TILE_ROWS if c.head_norm else 0,
        "router_scores": router_slices(hidden) * c.n_routed_experts,
        "shared_out": hidden,
    }
    slotted = values | {name: width if exact else width // 2 for name, width in activations.items()}
    bound = c.candidates
    return {
        **common_region_bytes(shape.vocab, blocks),
        **{name: 2 * ROWS * width * pair for name, width in slotted.items() if width},
        **_engram_bytes(c, exact),
        "index_scores": ROWS * max_pages * PAGE * word,
        "candidates_taken": ROWS * (max_pages * PAGE // bound.block_size) * word if bound else 0,
        "selection": ROWS * c.index_topk * word,
        "partial_out": ROWS * splits * heads * c.head_dim * word,
        "partial_stat": ROWS * splits * heads * 2 * word,
        **{f"{name}_flags": ROWS * pair for name in ("window", "entry", "key", "candidate", "selection")},
        "score_flags": ROWS * max_pages * pair,
        "partial_flags": ROWS * splits * -(-heads // 16) * pair,
        "tokens_out": ROWS * word,
    }


def slot_scales(matrix: PackedMatrix) -> torch.Tensor:
    """Scales of 32x32 blocks as the kernel wants them: an E8M0 byte for each 16-byte slot of a tile.

    Uint8 [count, rows of tiles, tiles in a row, 64], a sixteenth of the tiles' size. Raises ConfigError for scales that
    are no powers of two: those are of checkpoints that somebody else quantized.
    """
    scales = matrix.scales
    assert scales is not None
    words = scales.contiguous().view(torch.int32)
    if bool(((words & 0x807FFFFF) != 0).any()):
        raise ConfigError(
            "The mega-task reads FP8 with scales of 32x32 blocks only where they are powers of two, as published. Use "
            "the standard path."
        )
    exponents, (_, rows, columns, _) = (words >> 23).to(torch.uint8), matrix.tiles.shape
    device = scales.device
    row = (torch.arange(rows, device=device) * TILE_ROWS // 32).clamp_max(exponents.shape[1] - 1)
    column = (torch.arange(columns * 4, device=device) * 16 // 32).clamp_max(exponents.shape[2] - 1)
    slots = exponents[:, row][:, :, column].view(-1, rows, columns, 4, 1)
    return slots.expand(-1, -1, -1, -1, TILE_ROWS).flatten(-2).contiguous()


def _engram_bytes(config: DeepseekConfig, exact: bool) -> dict[str, int]:
    """The regions that there are once for each Engram."""
    engram = config.engram
    if engram is None:
        return {}
    columns, count = engram.columns * engram.head_dim, len(engram.layers) * ROWS
    return {
        "looked_up": count * (columns if exact else columns // 2) * 8,
        "mapped": count * (config.hc_mult + 1) * config.hidden_size * 8,
    }


class MegaPath(DecodePath):
    """DeepSeek's mega-task. Rows of a step are different requests: the state of one knows no earlier token twice.

    The cache is of plain values, not of published records. Engram's tables are copied to the device.
    """

    kernel = kernel
    config: DeepseekConfig

    def _region_bytes(self) -> dict[str, int]:
        exact = self.weights.formats.cache == "f32"
        splits = self._args.max_splits
        sizes = region_bytes(self.config, self.weights.tp, self.max_pages, splits, self.blocks, exact=exact)
        return {name: size for name, size in sizes.items() if size}

    def _symmetric_bytes(self) -> dict[str, tuple[int, int]]:
        c, sizes = self.config, super()._symmetric_bytes()
        if c.engram is None:
            return sizes
        mapped = len(c.engram.layers) * ROWS * (c.hc_mult + 1) * c.hidden_size * 8
        return sizes | {"mapped_parts": (mapped, c.hidden_size // self.weights.tp * 8)}

    def _fill_model(self) -> None:
        args, device, c = self._args, self.driver.device, self.config
        self._check()
        self._positions, self._slots = (torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in range(2))
        args.positions, args.slots = self._constant(self._positions), self._constant(self._slots)
        args.max_splits = max_splits(c, self.max_model_len)
        for field, theta, yarn in (
            ("rope", c.rope_theta, None),
            ("stretched_rope", c.compress_rope_theta, c.yarn),
        ):
            turns = frequencies(c.qk_rope_head_dim, theta, yarn, device)
            table = pair_angles(torch.arange(self.max_model_len, device=device), turns).contiguous()
            setattr(args, field, self._constant(table))
        for field, name in (("end_mix", "end_mix"), ("end_base", "end_mix_base"), ("end_scale", "end_mix_scale")):
            if name in self.weights.end:
                setattr(args, field, self._constant(self.weights.end[name]))
        if c.engram is not None:
            args.padding_token = c.engram.pad_token_id
            args.token_ids = self._constant(self.weights.token_map.to(device))
            args.recent = self.cache.address("recent")
            args.engram_count = len(c.engram.layers)
            entries = (self._header.structs["EngramWeights"] * args.engram_count)()
            for entry, layer in zip(entries, c.engram.layers, strict=True):
                self._fill_engram(entry, self.weights.layers[layer], self.weights.tables[layer])
            args.engrams = self._table(entries)

    @property
    def positions(self) -> torch.Tensor:
        """Of the step's rows, int32, on the device."""
        return self._positions[: self._args.rows]

    def _check(self) -> None:
        """Refuses what the kernel cannot read."""
        faults = []
        if self.cache.spec.format != self.weights.formats.cache:
            faults.append(f"its cache holds {self.weights.formats.cache} values, not {self.cache.spec.format} ones")
        for number, layer in enumerate(self.weights.layers):
            chosen = layer.get("experts_of_token")
            if chosen is not None and bool((chosen.sort(dim=-1).values.diff(dim=-1) == 0).any()):
                faults.append(f"layer {number} chooses an expert twice for a token")
        if faults:
            raise ConfigError(f"The mega-task cannot run this model: {'; '.join(faults)}. Use the standard path.")

    def _fill_engram(self, entry: Any, layer: Layer, table: Table) -> None:
        device = self.driver.device
        entry.table = self._constant(table.rows.to(device))
        entry.scales = 0 if table.scales is None else self._constant(table.scales.to(device))
        entry.multipliers = self._constant(torch.tensor(table.hash.multipliers, dtype=torch.int64, device=device))
        entry.heights = self._constant(table.hash.heights.flatten().to(device, torch.int32))
        self._put_matrix(entry.kv, _matrix(layer, "engram_kv"))
        entry.q_weight = self._constant(_tensor(layer, "engram_q_weight"))
        entry.k_weight = self._constant(_tensor(layer, "engram_k_weight"))

    def _put_matrix(self, entry: Any, matrix: PackedMatrix) -> None:
        super()._put_matrix(entry, matrix)
        if matrix.format in kernel.FINE:
            entry.scales = self._constant(slot_scales(matrix))

    def _fill_layer(self, entry: Any, number: int, layer: Layer) -> None:
        c, kind = self.config, self.config.compressed[number]
        for site in ("attention", "mlp"):
            into = getattr(entry, site)
            for field in ("mix", "norm"):
                setattr(into, field, self._constant(_tensor(layer, f"{site}_{field}")))
            for field in ("base", "scale"):
                setattr(into, field, self._constant(_tensor(layer, f"{site}_mix_{field}")))
        self._put_fields(entry, {name: value for name, value in layer.items() if not name.startswith(_ELSEWHERE)})
        heads = c.num_attention_heads // self.weights.tp
        sinks = _tensor(layer, "sinks")[self.weights.rank * heads : (self.weights.rank + 1) * heads]
        entry.sinks = self._constant(sinks.contiguous())
        entry.window = self.cache.address(f"window.{number}")
        entry.selector = NOBODY
        if c.engram is not None and number in c.engram.layers:
            entry.engram = 1 + c.engram.layers.index(number)
        if kind is None:
            return
        entry.kind, entry.source, entry.selects = kernel.Kinds.of(c).number(kind), kind.source, c.selects(number)
        entry.selector = NOBODY if kind.selector is None else kind.selector
        self._fill_compressor(entry.entry, "entry", "entries", "pending", number, kind.source, layer)
        self._fill_compressor(entry.key, "key", "keys", "pending_keys", number, kind.source, layer)

    def _fill_compressor(
        self, entry: Any, field: str, pool: str, pending: str, number: int, source: int, layer: Layer
    ) -> None:
        for name in ("kv", "gate"):
            if f"{field}_{name}" in layer:
                self._put_matrix(getattr(entry, name), _matrix(layer, f"{field}_{name}"))
        for name in ("ape", "norm"):
            if f"{field}_{name}" in layer:
                setattr(entry, name, self._constant(_tensor(layer, f"{field}_{name}")))
        entry.entries = self.cache.address(f"{pool}.{source}")
        entry.pending = self.cache.address(f"{pending}.{number}")

    def _place_rows(self, batch: StepBatch) -> None:
        slots = self.cache.slots(batch.block_table[:, 0])
        if len(set(slots.tolist())) < batch.rows:
            raise RequestError(
                "several rows of a step are of one request: each needs the state that the one before leaves. Give them "
                "to steps of their own, or use path='standard'."
            )
        self._positions[: batch.rows] = batch.positions
        self._slots[: batch.rows] = slots.to(torch.int32)


# Fields of a layer that are not LayerWeights' own.
_ELSEWHERE = ("sinks", "attention_", "mlp_", "entry_", "key_kv", "key_gate", "key_ape", "key_norm", "engram_")


def _matrix(layer: Layer, name: str) -> PackedMatrix:
    value = layer[name]
    assert isinstance(value, PackedMatrix)
    return value


def _tensor(layer: Layer, name: str) -> torch.Tensor:
    value = layer[name]
    assert isinstance(value, torch.Tensor)
    return value
