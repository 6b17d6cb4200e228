"""What a packed DeepSeek consists of, for each rank, and what of the checkpoint it is made from.

Field names are those of `LayerStages`, after "layers.N.". Ranks share the heads of attention with their groups of the
output projection, the intermediate dimension of every expert, the hidden dimension of Engram's keys and value, and the
vocabulary of the head; low-rank projections, compressors, indexer, router, stream mixing, norms, sinks and the
embedding are with every rank. Matrices that mix streams are not in tiles: they have 24 rows, which would fill one and a
half, and the vector unit multiplies them (hip/stages/streams.h). Engram's tables stay in host memory, where the ranks
of a machine may map one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.layouts import read_matrix
from rocmega.checkpoint.tiles import MX_GROUP
from rocmega.errors import CheckpointError, ConfigError
from rocmega.models.common.plan import Builder, packed_format
from rocmega.models.deepseek.activations import choose
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.engram import TOKEN_MAP, token_map
from rocmega.models.deepseek.published import Formats
from rocmega.packing.plan import Field, Made, PlainJob, Plan, Reads, banded_rows, divide, finest_block

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


def plan(
    config: DeepseekConfig, stored: Formats, *, tp: int = 1, arch: str | None = None, activations: str = "auto"
) -> Plan:
    """The plan for a checkpoint that is stored in these formats.

    tp: ranks that share the model. arch: what it is for; None keeps the published FP8 whatever runs it. activations:
    what the weights will meet, see activations.py. Raises ConfigError if the ranks cannot share the model evenly, or a
    part would need scales that it cannot have; RequestError for activations that these weights cannot meet.
    """
    formats = packed_formats(config, stored, tp, arch, activations)
    choose(formats, activations)  # before hundreds of gigabytes are packed for nothing
    builder = _Builder(config, formats, tp, plus_zero=arch == "gfx942")
    for layer in range(config.num_hidden_layers):
        builder.layer(layer)
    builder.ends()
    return Plan(formats.to_json(), arch, tp, builder.fields, builder.jobs)


def packed_formats(
    config: DeepseekConfig, stored: Formats, tp: int = 1, arch: str | None = None, activations: str = "auto"
) -> Formats:
    """The packed formats of a stored checkpoint: FP8 as the architecture has it, and as the cuts need it."""
    c, width = config, config.moe_intermediate_size
    cuts = {"o_groups": c.o_groups, "moe_intermediate_size": width, "vocab_size": c.vocab_size}
    if c.engram is not None:
        cuts["hidden_size"] = c.hidden_size
    divide({"num_attention_heads": c.num_attention_heads, **cuts}, tp)
    sizes: dict[str, int] = {}
    if stored.linear.startswith("fp8"):
        sizes = {
            "wq_b rows": c.num_attention_heads * c.head_dim,
            "wo_b columns": c.o_groups * c.o_lora_rank,
            "moe_intermediate_size": width,
        }
        sizes |= {"engram.wkv rows": c.hidden_size} if c.engram is not None else {}
    if stored.expert.startswith("fp8"):
        sizes["moe_intermediate_size"] = width
    if stored.expert == "mxfp4" and width // tp % MX_GROUP:
        raise ConfigError(
            f"With {tp} ranks the parts of moe_intermediate_size {width} are no whole MXFP4 groups of {MX_GROUP}."
        )
    block = finest_block(sizes, tp, c.scale_block)
    linear, expert = (packed_format(format, block, arch) for format in (stored.linear, stored.expert))
    return Formats(linear, stored.island, expert, stored.table, "f32" if activations == "f32" else "")


@dataclass(frozen=True)
class StackedJob:
    """A tensor of several matrices, one above the other, as the matrices that they are.

    Fields:
        field: where they go, one after the other.
        source: the tensor, [count * rows, columns].
        count: how many matrices.
        shape: of one matrix.
        format: of the field.
        tp: how many ranks share them.
        whole: each rank has some of the matrices; else some rows of each.
        ranks: see Job.
    """

    field: str
    source: str
    count: int
    shape: tuple[int, int]
    format: str
    tp: int
    whole: bool
    ranks: tuple[int, ...] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        each = self.count // self.tp if self.whole else self.count
        height = self.shape[0] if self.whole else self.shape[0] // self.tp
        for rank in ranks:
            for index in range(each):
                first = (rank * each + index) * height if self.whole else index * self.shape[0] + rank * height
                part = read_matrix(checkpoint, self.source, (first, first + height), self.format)
                yield Made((rank,), self.field, index, 0, part)


@dataclass(frozen=True)
class TokenMapJob:
    """Engram's compressed id of every token: the checkpoint's own tensor, or made from its tokenizer."""

    field: str
    vocab: int
    compressed: int
    ranks: tuple[int, ...] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return ()

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        if TOKEN_MAP in checkpoint:
            ids, at = checkpoint.read(TOKEN_MAP).to(torch.int32), checkpoint.file(TOKEN_MAP)
            fits = ids.shape == (self.vocab,) and int(ids.min()) >= 0 and int(ids.max()) < self.compressed
        else:
            at = checkpoint.directory / "tokenizer.json"
            ids = token_map(at, self.vocab)
            fits = int(ids.max()) + 1 == self.compressed
        if not fits:
            raise CheckpointError(
                f"{at} gives {list(ids.shape)} tokens compressed ids up to {int(ids.max())}, and config.json says that "
                f"there are {self.compressed}: they do not belong together. Fetch both again."
            )
        yield Made(tuple(ranks), self.field, 0, 0, ids)


@dataclass(frozen=True)
class ChoiceJob:
    """Some rows of a table of experts' numbers, int32. Raises CheckpointError for a number that no expert has."""

    field: str
    source: str
    experts: int
    rows: tuple[int, int] | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        value = checkpoint.read(self.source, self.rows)
        if int(value.min()) < 0 or int(value.max()) >= self.experts:
            raise CheckpointError(
                f"{checkpoint.file(self.source)}: tensor {self.source} chooses experts {int(value.min())} to "
                f"{int(value.max())}, and there are {self.experts}: the file is damaged. Fetch it again."
            )
        yield Made(tuple(ranks), self.field, 0, self.rows[0] if self.rows else 0, value.to(torch.int32))


@dataclass(frozen=True)
class TableJob:
    """Some rows of a table, its codes or their scales, as they are stored: uint8."""

    field: str
    source: str
    rows: tuple[int, int] | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        value = checkpoint.read(self.source, self.rows).view(torch.uint8)
        yield Made(tuple(ranks), self.field, 0, self.rows[0] if self.rows else 0, value)


class _Builder(Builder):
    """Collects fields and jobs, layer by layer."""

    def __init__(self, config: DeepseekConfig, formats: Formats, tp: int, plus_zero: bool):
        super().__init__(tp, plus_zero)
        self.config, self.formats = config, formats

    def layer(self, layer: int) -> None:
        c = self.config
        self.prefix = self.source = f"layers.{layer}."
        for site, name in (("attention", "attn"), ("mlp", "ffn")):
            self.plain(f"{site}_mix", "f32", (c.mixes, c.hc_mult * c.hidden_size), f"hc_{name}_fn")
            self.vector(f"{site}_mix_base", c.mixes, f"hc_{name}_base")
            self.vector(f"{site}_mix_scale", 3, f"hc_{name}_scale")
            self.vector(f"{site}_norm", c.hidden_size, f"{name}_norm.weight")
        self.attention()
        self.compression(layer)
        self.experts(layer)
        if c.engram is not None and layer in c.engram.layers:
            self.engram(c.engram.rows[c.engram.layers.index(layer)])

    def attention(self) -> None:
        c, f = self.config, self.formats.linear
        heads = c.num_attention_heads * c.head_dim
        self.matrix("q_a", f, (c.q_lora_rank, c.hidden_size), "attn.wq_a.weight")
        self.matrix("kv", f, (c.head_dim, c.hidden_size), "attn.wkv.weight")
        self.vector("q_a_norm", c.q_lora_rank, "attn.q_norm.weight")
        self.vector("kv_norm", c.head_dim, "attn.kv_norm.weight")
        self.vector("sinks", c.num_attention_heads, "attn.attn_sink")
        self.matrix("q_b", f, (heads, c.q_lora_rank), "attn.wq_b.weight", cut=0)
        self.stacked("o_a", c.o_groups, (c.o_lora_rank, heads // c.o_groups), "attn.wo_a.weight", whole=True)
        self.matrix("o_b", f, (c.hidden_size, c.o_groups * c.o_lora_rank), "attn.wo_b.weight", cut=1)

    def compression(self, layer: int) -> None:
        c, f = self.config, self.formats
        if c.makes_entries(layer):
            self.compressor("entry", "attn.compressor.", layer, c.head_dim)
        if c.makes_keys(layer) and c.keys_from_latent:
            self.matrix("key_of_entry", f.island, (c.index_head_dim, c.head_dim), "attn.indexer.wk.weight")
            self.vector("key_norm", c.index_head_dim, "attn.indexer.k_norm.weight")
        elif c.makes_keys(layer):
            self.compressor("key", "attn.indexer.compressor.", layer, c.index_head_dim)
        if c.selects(layer):
            queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.matrix("index_q", f.linear, queries, "attn.indexer.wq_b.weight")
            weights = (c.index_n_heads, c.hidden_size)
            self.matrix("index_weights", f.island, weights, "attn.indexer.weights_proj.weight")

    def compressor(self, field: str, source: str, layer: int, width: int) -> None:
        kind = self.config.compressed[layer]
        assert kind is not None
        wide = (2 if kind.overlap else 1) * width
        shape = (wide, self.config.hidden_size)
        self.matrix(f"{field}_kv", self.formats.island, shape, f"{source}wkv.weight")
        self.vector(f"{field}_norm", width, f"{source}norm.weight")
        if kind.gated:
            self.matrix(f"{field}_gate", self.formats.island, shape, f"{source}wgate.weight")
        if not self.config.keys_from_latent:
            self.plain(f"{field}_ape", "f32", (kind.ratio, wide), f"{source}ape")

    def experts(self, layer: int) -> None:
        c, f = self.config, self.formats
        up, down = (c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)
        self.matrix("router", f.island, (c.n_routed_experts, c.hidden_size), "ffn.gate.weight")
        if c.hash_layers[layer]:
            table = Field(f"{self.prefix}experts_of_token", "i32", (c.vocab_size, c.num_experts_per_tok))
            self.put(replace(table, reads=Reads("rows")))
            choices = ChoiceJob(table.name, f"{self.source}ffn.gate.tid2eid", c.n_routed_experts)
            self.jobs += banded_rows(choices, c.vocab_size, c.num_experts_per_tok * 8)
        else:
            self.vector("router_bias", c.n_routed_experts, "ffn.gate.bias")
        reads = Reads("experts", c.n_routed_experts, c.num_experts_per_tok)
        routed = [f"ffn.experts.{expert}." for expert in range(c.n_routed_experts)]
        gate_up = [f"{expert}{part}.weight" for expert in routed for part in ("w1", "w3")]
        self.matrix("gate_up", f.expert, up, *gate_up, cut=0, reads=reads)
        self.matrix("down", f.expert, down, *(f"{expert}w2.weight" for expert in routed), cut=1, reads=reads)
        shared = "ffn.shared_experts."
        self.matrix("shared_gate_up", f.linear, up, f"{shared}w1.weight", f"{shared}w3.weight", cut=0)
        self.matrix("shared_down", f.linear, down, f"{shared}w2.weight", cut=1)

    def engram(self, rows: int) -> None:
        c, engram = self.config, self.config.engram
        assert engram is not None
        reads, source = Reads("rows", chosen=engram.columns), f"{self.source}engram.embed."
        if self.formats.table == "mxfp8":
            sizes = {"codes": (engram.head_dim, "weight"), "scales": (engram.head_dim // MX_GROUP, "scale")}
            for name, (width, tensor) in sizes.items():
                field = Field(f"{self.prefix}engram_{name}", "u8", (rows, width), reads=reads, host=True)
                self.put(field)
                self.jobs += banded_rows(TableJob(field.name, source + tensor), rows, width)
        else:
            table = (rows, engram.head_dim)
            self.plain("engram_rows", self.formats.table, table, "engram.embed.weight", reads=reads, host=True)
        shape = (c.hidden_size, engram.columns * engram.head_dim)
        self.stacked("engram_kv", c.hc_mult + 1, shape, "engram.wkv.weight", whole=False)
        self.plain("engram_q_weight", "f32", (c.hc_mult, c.hidden_size), "engram.q_weight")
        self.plain("engram_k_weight", "f32", (c.hc_mult, c.hidden_size), "engram.k_weight")

    def ends(self) -> None:
        """What is not in a layer."""
        c, f = self.config, self.formats
        self.prefix = self.source = ""
        self.embedding(f.island, c.vocab_size, c.hidden_size, "embed.weight")
        self.vector("final_norm", c.hidden_size, "norm.weight")
        self.matrix("head", f.island, (c.vocab_size, c.hidden_size), "head.weight", cut=0)
        if not c.delayed:
            self.plain("end_mix", "f32", (c.hc_mult, c.hc_mult * c.hidden_size), "hc_head_fn")
            self.vector("end_mix_base", c.hc_mult, "hc_head_base")
            self.vector("end_mix_scale", 1, "hc_head_scale")
        if c.engram is not None:
            self.put(Field("token_map", "i32", (c.vocab_size,), reads=Reads("rows"), host=True))
            self.jobs.append(TokenMapJob("token_map", c.vocab_size, c.engram.compressed_vocab_size))

    def stacked(self, name: str, count: int, shape: tuple[int, int], source: str, *, whole: bool) -> None:
        """A tensor of `count` matrices, shared as `StackedJob` says."""
        f, tp = self.formats.linear, self.tp
        local = (count // tp, shape) if whole else (count, (shape[0] // tp, shape[1]))
        self.put(Field(self.prefix + name, f, local[1], local[0], split=tp > 1))
        self.jobs.append(StackedJob(self.prefix + name, self.source + source, count, shape, f, tp, whole))

    def plain(
        self,
        name: str,
        format: str,
        shape: tuple[int, int],
        source: str,
        reads: Reads | None = None,
        host: bool = False,
    ) -> None:
        """A tensor that is copied as it is."""
        field = Field(self.prefix + name, format, shape, reads=reads or Reads(), host=host)
        self.put(field)
        job = PlainJob(field.name, (self.source + source,), field.dtype())
        self.jobs += banded_rows(job, shape[0], shape[1] * field.dtype().itemsize)
