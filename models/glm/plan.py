"""What a packed GLM consists of, for each rank, and what of the checkpoint it is made from.

Field names are those of LayerWeights in descriptor.h, after "layers.N.". Ranks share the heads of attention, the
intermediate dimension of every MLP and the vocabulary of the head; low-rank projections, indexer, router, norms and the
embedding are with every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocmega.checkpoint.layouts import StoredMatrix, read_matrix
from rocmega.checkpoint.tiles import MX_GROUP, SCALE_BLOCK, dtype_of
from rocmega.errors import ConfigError
from rocmega.models.common.plan import Builder, packed_format
from rocmega.models.glm.activations import choose
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.published import DRAFT_NORMS, Formats, mlps, with_draft_layer
from rocmega.packing.plan import DRAFT, Field, Made, Plan, Reads, divide, finest_block

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


def plan(
    config: GlmConfig, stored: Formats, *, tp: int = 1, arch: str | None = None, activations: str = "auto"
) -> Plan:
    """The plan for a checkpoint that is stored in these formats.

    tp: ranks that share the model. arch: what it is for; None keeps the published FP8 whatever runs it. activations:
    what the weights are to meet. Raises ConfigError if the ranks cannot share the model evenly, or a part would need
    scales that it cannot have; RequestError for activations that these weights cannot meet.
    """
    formats = packed_formats(config, stored, tp, arch, activations)
    choose(formats, activations)  # before hundreds of gigabytes are packed for nothing
    builder = LayerBuilder(config, formats, tp, plus_zero=arch == "gfx942")
    for layer in range(config.num_hidden_layers):
        builder.layer(layer)
    builder.ends()
    return Plan(formats.to_json(), arch, tp, builder.fields, builder.jobs)


def draft_plan(config: GlmConfig, stored: Formats, *, arch: str | None = None, activations: str = "auto") -> Plan:
    """The plan of the layer for guessing ahead (draft.py), for one rank: fields "draft.X"."""
    extended = with_draft_layer(config)
    formats = packed_formats(extended, stored, 1, arch, activations)
    builder = LayerBuilder(extended, formats, 1, plus_zero=arch == "gfx942")
    builder.layer(config.num_hidden_layers, DRAFT)
    for field, source in DRAFT_NORMS.items():
        builder.vector(field, config.hidden_size, source)
    builder.matrix("eh_proj", formats.island, (config.hidden_size, 2 * config.hidden_size), "eh_proj.weight")
    return Plan(formats.to_json(), arch, 1, builder.fields, builder.jobs)


def packed_formats(
    config: GlmConfig, stored: Formats, tp: int = 1, arch: str | None = None, activations: str = "auto"
) -> Formats:
    """The packed formats of a stored checkpoint: FP8 as the architecture has it, and as the cuts need it.

    For f32 activations the absorbed matrices are float32 too.
    """
    heads = config.num_attention_heads
    divide(
        {
            "num_attention_heads": heads,
            "intermediate_size": config.intermediate_size,
            "moe_intermediate_size": config.moe_intermediate_size,
            "vocab_size": config.vocab_size,
        },
        tp,
    )
    cut_rows = {"linear": {"q_b_proj rows": heads * config.qk_head_dim}, "dense": {}, "expert": {}}
    cut_columns = {
        "linear": {"o_proj columns": heads * config.v_head_dim},
        "dense": {"intermediate_size": config.intermediate_size},
        "expert": {"moe_intermediate_size": config.moe_intermediate_size},
    }
    kinds = {"linear": stored.linear, "dense": stored.dense, "expert": stored.expert}
    sizes = {
        name: size
        for kind, format in kinds.items()
        if format.startswith("fp8")
        for name, size in (cut_rows[kind] | cut_columns[kind]).items()
    }
    block = finest_block(sizes, tp, SCALE_BLOCK)
    groups = {
        name: size
        for kind, format in kinds.items()
        if format == "mxfp4"
        for name, size in cut_columns[kind].items()
        if size // tp % MX_GROUP
    }
    if groups:
        listed = ", ".join(f"{name} {size}" for name, size in groups.items())
        raise ConfigError(f"With {tp} ranks the parts of {listed} are no whole MXFP4 groups of {MX_GROUP}.")
    linear, dense, expert = (packed_format(format, block, arch) for format in kinds.values())
    return Formats(linear, stored.island, expert, dense, "f32" if activations == "f32" else "")


@dataclass(frozen=True)
class AbsorbedJob:
    """kv_b_proj, [heads * (nope + v), latent], as key_up and value_up: a head's key part is transposed.

    They are dequantized, because scales of blocks do not survive the transposition, and rounded to the absorbed format:
    bf16 holds every product of an e4m3 number and a power of two, and rounds other scales' products to 8 bits.
    """

    source: str
    field: str  # key_up
    values: str  # value_up
    config: GlmConfig
    format: str
    tp: int
    ranks: tuple[int, ...] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def run(self, checkpoint: Checkpoint, ranks: Sequence[int]) -> Iterator[Made]:
        c, each = self.config, self.config.num_attention_heads // self.tp
        weight = read_matrix(checkpoint, self.source).dequantize()
        heads = weight.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        keys, values = heads.to(dtype_of(self.format)).split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        for rank in ranks:
            for index in range(each):
                head = rank * each + index
                yield Made((rank,), self.field, index, 0, StoredMatrix(self.format, keys[head].mT.contiguous()))
                yield Made((rank,), self.values, index, 0, StoredMatrix(self.format, values[head]))


class LayerBuilder(Builder):
    """Collects fields and jobs, layer by layer."""

    def __init__(self, config: GlmConfig, formats: Formats, tp: int, plus_zero: bool):
        super().__init__(tp, plus_zero)
        self.config, self.formats = config, formats

    def layer(self, layer: int, prefix: str | None = None) -> None:
        """One layer. prefix: of its fields, "layers.N." if not given."""
        c, f = self.config, self.formats
        self.prefix, self.source = prefix or f"layers.{layer}.", f"model.layers.{layer}."
        heads, hidden = c.num_attention_heads, c.hidden_size
        self.vector("attention_norm", hidden, "input_layernorm.weight")
        self.matrix("q_a", f.linear, (c.q_lora_rank, hidden), "self_attn.q_a_proj.weight")
        self.matrix("kv_a", f.linear, (c.latent_dim, hidden), "self_attn.kv_a_proj_with_mqa.weight")
        if c.full_index[layer]:
            self.indexer()
        self.vector("q_a_norm", c.q_lora_rank, "self_attn.q_a_layernorm.weight")
        self.vector("kv_a_norm", c.kv_lora_rank, "self_attn.kv_a_layernorm.weight")
        self.matrix("q_b", f.linear, (heads * c.qk_head_dim, c.q_lora_rank), "self_attn.q_b_proj.weight", cut=0)
        self.absorbed()
        self.matrix("o", f.linear, (hidden, heads * c.v_head_dim), "self_attn.o_proj.weight", cut=1)
        self.vector("mlp_norm", hidden, "post_attention_layernorm.weight")
        if c.dense_layers[layer]:
            width, format, reads = c.intermediate_size, f.dense, Reads()
        else:
            width, format = c.moe_intermediate_size, f.expert
            reads = Reads("experts", c.n_routed_experts, c.num_experts_per_tok, always=1)
            self.matrix("router", f.island, (c.n_routed_experts, hidden), "mlp.gate.weight")
            self.vector("router_bias", c.n_routed_experts, "mlp.gate.e_score_correction_bias")
        names = mlps(c, layer)
        gate_up = [f"{mlp}.{part}_proj.weight" for mlp in names for part in ("gate", "up")]
        self.matrix("gate_up", format, (width, hidden), *gate_up, cut=0, reads=reads)
        self.matrix("down", format, (hidden, width), *(f"{mlp}.down_proj.weight" for mlp in names), cut=1, reads=reads)

    def indexer(self) -> None:
        c, at = self.config, "self_attn.indexer."
        self.vector("index_k_norm", c.index_head_dim, f"{at}k_norm.weight", f"{at}k_norm.bias")
        self.matrix(
            "index_q", self.formats.linear, (c.index_n_heads * c.index_head_dim, c.q_lora_rank), f"{at}wq_b.weight"
        )
        self.matrix("index_k", self.formats.linear, (c.index_head_dim, c.hidden_size), f"{at}wk.weight")
        self.matrix("index_weights", self.formats.island, (c.index_n_heads, c.hidden_size), f"{at}weights_proj.weight")

    def absorbed(self) -> None:
        c, format, heads = self.config, self.formats.absorbed, self.config.num_attention_heads // self.tp
        shapes = {"key_up": (c.kv_lora_rank, c.qk_nope_head_dim), "value_up": (c.v_head_dim, c.kv_lora_rank)}
        for name, shape in shapes.items():
            self.put(Field(self.prefix + name, format, shape, heads, split=self.tp > 1))
        source = f"{self.source}self_attn.kv_b_proj.weight"
        key_up, value_up = f"{self.prefix}key_up", f"{self.prefix}value_up"
        self.jobs.append(AbsorbedJob(source, key_up, value_up, c, format, self.tp))

    def ends(self) -> None:
        """What is not in a layer."""
        c, f = self.config, self.formats
        self.prefix, self.source = "", "model."
        self.embedding(f.island, c.vocab_size, c.hidden_size, "model.embed_tokens.weight")
        self.vector("final_norm", c.hidden_size, "norm.weight")
        self.source = ""
        self.matrix("head", f.island, (c.vocab_size, c.hidden_size), "lm_head.weight", cut=0)
