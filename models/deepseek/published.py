"""DeepSeek's published checkpoints: names, shapes and storage of their tensors, and whether a directory holds one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rocmega.checkpoint.layouts import examine
from rocmega.checkpoint.tiles import FORMATS
from rocmega.errors import CheckpointError
from rocmega.models.common.published import (
    Expected,
    Layouts,
    check_matrix_shape,
    check_shape,
    extra,
    mixtures,
    plain_layout,
    raise_faults,
)
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.engram import TOKEN_MAP, has_token_map

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


@dataclass(frozen=True)
class Formats:
    """What is stored in which format: names as in rocmega.checkpoint.tiles.

    Fields:
        linear: the big matrices of attention, indexer, shared expert and Engram.
        island: embedding, head, router, compressors and index weights, which no checkpoint quantizes; f32 or bf16.
        expert: routed experts; as linear if not given.
        table: rows of Engram's tables: mxfp8, bf16 or f32; "" without Engram.
        cache: window, entries and index keys; f32 for f32 activations, else bf16. If not given, f32 where linear is.

    The matrices that mix streams are float32 always: 20 rounds of normalizing follow them.
    """

    linear: str
    island: str
    expert: str = ""
    table: str = ""
    cache: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert", self.expert or self.linear)
        object.__setattr__(self, "cache", self.cache or ("f32" if self.linear == "f32" else "bf16"))

    @property
    def label(self) -> str:
        """The big matrices' format, or formats: "fp8+mxfp4" with other experts."""
        return self.linear if self.expert == self.linear else f"{self.linear}+{self.expert}"

    def to_json(self) -> dict[str, str]:
        """For a pack's manifest; Formats(**...) is the inverse."""
        return asdict(self)


# Kinds: "linear" and "expert" may be quantized; "island" never is; "mixing", "bias" and "vector" are small and become
# float32; "choice" is whole numbers; "rows" are looked up.
QUANTIZABLE = ("linear", "expert", "rows")
_GROUPS = {"linear": "the big matrices are", "expert": "the routed experts are"}


def published_formats(config: DeepseekConfig) -> Formats:
    """As the checkpoints of DeepSeek are published."""
    linear = "fp8" if config.scale_block == 128 else f"fp8_{config.scale_block}"
    return Formats(linear, "bf16", "mxfp4", "mxfp8" if config.engram else "")


def named_formats(config: DeepseekConfig, format: str | None) -> Formats:
    """Of a model by name; format: f32, bf16, fp8, or mxfp4, which is of experts; None: as published."""
    published = published_formats(config)
    if format is None or format == "mxfp4":
        return published
    if format == "fp8":
        return replace(published, expert=published.linear)
    return Formats(format, format, table=format if config.engram else "")


def layer_tensors(config: DeepseekConfig, layer: int) -> Expected:
    """Tensor name -> (shape, kind) of one layer, scales not counted."""
    out = {**_streams(config), **_attention(config), **_compression(config, layer), **_experts(config, layer)}
    if config.engram is not None and layer in config.engram.layers:
        out.update(_engram(config, layer))
    return {f"layers.{layer}.{name}": entry for name, entry in out.items()}


def _streams(c: DeepseekConfig) -> Expected:
    out: Expected = {"attn_norm.weight": ((c.hidden_size,), "vector"), "ffn_norm.weight": ((c.hidden_size,), "vector")}
    for site in ("attn", "ffn"):
        out[f"hc_{site}_fn"] = ((c.mixes, c.hc_mult * c.hidden_size), "mixing")
        out[f"hc_{site}_base"] = ((c.mixes,), "vector")
        out[f"hc_{site}_scale"] = ((3,), "vector")
    return out


def _attention(c: DeepseekConfig) -> Expected:
    heads, inner = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    return {
        "attn.wq_a.weight": ((c.q_lora_rank, c.hidden_size), "linear"),
        "attn.q_norm.weight": ((c.q_lora_rank,), "vector"),
        "attn.wq_b.weight": ((heads, c.q_lora_rank), "linear"),
        "attn.wkv.weight": ((c.head_dim, c.hidden_size), "linear"),
        "attn.kv_norm.weight": ((c.head_dim,), "vector"),
        "attn.wo_a.weight": ((inner, heads // c.o_groups), "linear"),
        "attn.wo_b.weight": ((c.hidden_size, inner), "linear"),
        "attn.attn_sink": ((c.num_attention_heads,), "vector"),
    }


def _compression(c: DeepseekConfig, layer: int) -> Expected:
    kind, out = c.compressed[layer], Expected()
    if kind is None:
        return out
    if c.makes_entries(layer):
        out.update(_compressor(c, "attn.compressor.", layer, c.head_dim))
    if c.makes_keys(layer) and c.keys_from_latent:
        out["attn.indexer.wk.weight"] = ((c.index_head_dim, c.head_dim), "island")
        out["attn.indexer.k_norm.weight"] = ((c.index_head_dim,), "vector")
    elif c.makes_keys(layer):
        out.update(_compressor(c, "attn.indexer.compressor.", layer, c.index_head_dim))
    if c.selects(layer):
        out["attn.indexer.wq_b.weight"] = ((c.index_n_heads * c.index_head_dim, c.q_lora_rank), "linear")
        out["attn.indexer.weights_proj.weight"] = ((c.index_n_heads, c.hidden_size), "island")
    return out


def _compressor(c: DeepseekConfig, prefix: str, layer: int, width: int) -> Expected:
    kind = c.compressed[layer]
    assert kind is not None
    wide = (2 if kind.overlap else 1) * width
    out: Expected = {
        f"{prefix}wkv.weight": ((wide, c.hidden_size), "island"),
        f"{prefix}norm.weight": ((width,), "vector"),
    }
    if kind.gated:
        out[f"{prefix}wgate.weight"] = ((wide, c.hidden_size), "island")
    if not c.keys_from_latent:
        out[f"{prefix}ape"] = ((kind.ratio, wide), "vector")
    return out


def _experts(c: DeepseekConfig, layer: int) -> Expected:
    width, hidden = c.moe_intermediate_size, c.hidden_size
    out: Expected = {"ffn.gate.weight": ((c.n_routed_experts, hidden), "island")}
    if c.hash_layers[layer]:
        out["ffn.gate.tid2eid"] = ((c.vocab_size, c.num_experts_per_tok), "choice")
    else:
        out["ffn.gate.bias"] = ((c.n_routed_experts,), "vector")
    for name, kind in [*((f"experts.{e}", "expert") for e in range(c.n_routed_experts)), ("shared_experts", "linear")]:
        out[f"ffn.{name}.w1.weight"] = out[f"ffn.{name}.w3.weight"] = ((width, hidden), kind)
        out[f"ffn.{name}.w2.weight"] = ((hidden, width), kind)
    return out


def _engram(c: DeepseekConfig, layer: int) -> Expected:
    assert c.engram is not None
    rows = c.engram.rows[c.engram.layers.index(layer)]
    columns = c.engram.columns * c.engram.head_dim
    return {
        "engram.embed.weight": ((rows, c.engram.head_dim), "rows"),
        "engram.wkv.weight": (((c.hc_mult + 1) * c.hidden_size, columns), "linear"),
        "engram.q_weight": ((c.hc_mult, c.hidden_size), "vector"),
        "engram.k_weight": ((c.hc_mult, c.hidden_size), "vector"),
    }


def expected_tensors(config: DeepseekConfig) -> Expected:
    """Tensor name -> (shape, kind) of the whole language model, scales, draft heads and vision not counted."""
    c, vocabulary = config, (config.vocab_size, config.hidden_size)
    expected: Expected = {
        "embed.weight": (vocabulary, "island"),
        "head.weight": (vocabulary, "island"),
        "norm.weight": ((c.hidden_size,), "vector"),
    }
    if not c.delayed:
        expected["hc_head_fn"] = ((c.hc_mult, c.hc_mult * c.hidden_size), "mixing")
        expected["hc_head_base"] = ((c.hc_mult,), "vector")
        expected["hc_head_scale"] = ((1,), "vector")
    for layer in range(c.num_hidden_layers):
        expected.update(layer_tensors(c, layer))
    return expected


def check(checkpoint: Checkpoint, config: DeepseekConfig) -> Formats:
    """Compares the files' headers with what the configuration asks for, and finds the formats they are stored in.

    Raises CheckpointError, listing what is missing, misshapen, of a wrong dtype or not part of the model.
    """
    expected = expected_tensors(config)
    faults = [f"tensor {name} is missing" for name in expected if name not in checkpoint]
    layouts: Layouts = {kind: {} for kind in (*QUANTIZABLE, "island", "mixing", "vector", "choice")}
    for name, (shape, kind) in expected.items():
        if name not in checkpoint:
            continue
        try:
            layouts[kind].setdefault(_layout(checkpoint, config, name, shape, kind), name)
        except CheckpointError as error:
            faults.append(str(error))
    if config.engram is not None and not has_token_map(checkpoint):
        faults.append(f"neither tokenizer.json is there, which tells Engram's compressed token ids, nor {TOKEN_MAP}")
    faults += extra(checkpoint, expected, QUANTIZABLE, lambda name: _ignored(config, name))
    faults += mixtures(layouts, _GROUPS)
    if config.quantized and not any(FORMATS[layout].block for layout in layouts["linear"]):
        faults.append("no big matrix is FP8, though config.json says so")
    raise_faults(checkpoint, faults)
    # A single float32 island makes all of them float32: widening is exact, narrowing is not.
    island = "f32" if "f32" in layouts["island"] else "bf16"
    linear, expert, table = (next(iter(layouts[kind]), "") for kind in ("linear", "expert", "rows"))
    return Formats(linear, island, expert, table)


def _layout(checkpoint: Checkpoint, config: DeepseekConfig, name: str, shape: tuple[int, ...], kind: str) -> str:
    """How a tensor is stored; raises CheckpointError with what is wrong with it."""
    if kind == "choice":
        check_shape(checkpoint, name, shape)
        if checkpoint.info(name).dtype not in ("I64", "I32"):
            raise CheckpointError(f"tensor {name} is {checkpoint.dtype(name)}, not whole numbers")
        return "i32"
    if kind not in QUANTIZABLE:
        return plain_layout(checkpoint, name, shape)
    check_matrix_shape(checkpoint, name, shape)
    info, at = examine(checkpoint, name), checkpoint.file(name).name
    block = FORMATS[info.layout].block if info.layout in FORMATS else 0
    allowed = {"linear": ("f32", "bf16", "fp8", "fp8_32"), "expert": ("f32", "bf16", "mxfp4", "fp8", "fp8_32")}
    if info.layout not in allowed.get(kind, ("f32", "bf16", "mxfp8")):
        raise CheckpointError(f"tensor {name} in {at} is {info.layout}, which is not supported there")
    if info.layout not in ("f32", "bf16") and not config.quantized:
        raise CheckpointError(f"tensor {name} in {at} is {info.layout} and config.json has no quantization_config")
    if block and block != config.scale_block:
        raise CheckpointError(
            f"tensor {info.scale} in {at} has a scale per {block}x{block} and config.json says "
            f"{config.scale_block}x{config.scale_block}"
        )
    if config.quantized and kind == "linear" and not block:
        raise CheckpointError(f"tensor {name} in {at} is {info.layout}, though config.json says that weights are FP8")
    return info.layout


def _ignored(config: DeepseekConfig, name: str) -> bool:
    """Draft heads, the routing bias of image tokens, and vision, which lies beside the language model."""
    first = name.split(".")[0]
    ours = ("layers", "embed", "head", "norm", "hc_head_fn", "hc_head_base", "hc_head_scale")
    vision = config.delayed and first not in ours
    return first == "mtp" or vision or (config.delayed and name.endswith("ffn.gate.bias_vl"))
