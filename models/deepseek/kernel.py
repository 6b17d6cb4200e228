"""The mega-task as a unit to compile: one binary per model, weight formats, tensor-parallel size and target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.cache import PAGE
from rocmega.errors import ConfigError
from rocmega.models.common.kernel import (
    FORMATS,
    LDS_WORDS,
    ROWS,
    THREADS,
    ZERO_WORDS,
    check_exact,
    check_formats,
    exact_attention,
    header_text,
    multiples,
    variant,
)
from rocmega.models.deepseek.activations import choose
from rocmega.models.deepseek.config import Compressed, DeepseekConfig
from rocmega.toolchain import Unit

if TYPE_CHECKING:
    from rocmega.models.deepseek.weights import Formats

# Beside those of every family: published FP8 with scales per 32x32 blocks, which are powers of two.
FINE = {
    "fp8_32": {"f32": "FineFp8Wide<false>", "bf16": "FineFp8<false>"},
    "fp8_32_fnuz": {"f32": "FineFp8Wide<true>", "bf16": "FineFp8<true>"},
}
KNOWN = {**FORMATS, **FINE}
KERNEL = "deepseek_decode"
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Shape:
    """One rank's dimensions: heads, their groups, experts' widths and the vocabulary are divided among the ranks."""

    heads: int
    groups: int
    expert_width: int
    vocab: int

    @classmethod
    def of(cls, config: DeepseekConfig, tp: int = 1) -> Shape:
        """Raises ConfigError with every reason: ranks that do not divide the model, dimensions that no tile fits."""
        divided = {
            "num_attention_heads": config.num_attention_heads,
            "o_groups": config.o_groups,
            "moe_intermediate_size": config.moe_intermediate_size,
            "vocab_size": config.vocab_size,
        }
        faults = [f"{name} {value} is not divisible by {tp} ranks" for name, value in divided.items() if value % tp]
        faults += _faults(config, tp)
        if faults:
            raise ConfigError(f"The mega-task cannot run this model: {'; '.join(faults)}. Use the standard path.")
        return cls(*(value // tp for value in divided.values()))


@dataclass(frozen=True)
class Kinds:
    """The kinds of compressed entries that a model's layers attend to, two at most.

    Fields:
        kinds: (ratio, pooling as in hip/stages/compress.h, whether index keys have a compressor of their own).
    """

    kinds: tuple[tuple[int, int, bool], ...]

    @classmethod
    def of(cls, config: DeepseekConfig) -> Kinds:
        found: dict[tuple[int, int], bool] = {}
        for layer, kind in enumerate(config.compressed):
            if kind is not None and config.makes_entries(layer):
                keys = config.makes_keys(layer) and not config.keys_from_latent
                found[_pooled(kind)] = keys or found.get(_pooled(kind), False)
        return cls(tuple((*kind, keys) for kind, keys in found.items()))

    def number(self, kind: Compressed) -> int:
        """1 + the place of a layer's kind."""
        return 1 + next(at for at, known in enumerate(self.kinds) if known[:2] == _pooled(kind))

    def down_width(self, config: DeepseekConfig) -> int:
        """Compressors' values and gates of a layer at most, and the indexer's heads."""
        values = {0: 1, 1: 2, 2: 4}  # by pooling: of an entry's width
        widths = [values[pooling] * (config.head_dim + keys * config.index_head_dim) for _, pooling, keys in self.kinds]
        return max(widths, default=0) + config.index_n_heads


def _pooled(kind: Compressed) -> tuple[int, int]:
    return kind.ratio, 2 if kind.overlap else int(kind.gated)


def _faults(config: DeepseekConfig, tp: int) -> Iterable[str]:
    """What the kernel's tiles ask of a model's dimensions."""
    sixteens = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "o_lora_rank": config.o_lora_rank,
        "index_n_heads": config.index_n_heads,
        "moe_intermediate_size per rank": config.moe_intermediate_size // tp,
        "vocab_size per rank": config.vocab_size // tp,
        "n_routed_experts": config.n_routed_experts,
    }
    yield from multiples(sixteens, 16)
    yield from multiples({"index_head_dim": config.index_head_dim, "head_dim": config.head_dim}, 32)
    if config.head_dim > 2 * THREADS:
        yield f"head_dim {config.head_dim} is more than {2 * THREADS}"
    if config.num_experts_per_tok > 14:
        yield f"num_experts_per_tok {config.num_experts_per_tok} is more than 14"
    if config.n_routed_experts > 2 * THREADS:
        yield f"n_routed_experts {config.n_routed_experts} is more than {2 * THREADS}"
    if len(Kinds.of(config).kinds) > 2:
        yield "its layers attend to more than two kinds of compressed entries"
    for kind in config.compressed:
        if kind is not None and kind.selector is not None and PAGE // kind.ratio < 16:
            yield f"selections from entries of {kind.ratio} tokens, of which a page holds fewer than 16"
            break
    bound = config.candidates
    if bound is not None and (bound.blocks - 1) * bound.block_size < config.index_topk:
        yield f"{bound.blocks} blocks of {bound.block_size} candidates may hold fewer than {config.index_topk} entries"
    if config.engram is not None and config.hidden_size % (16 * tp * config.engram.copies):
        yield f"hidden_size {config.hidden_size} per rank is not a multiple of 16"


def lds_words(config: DeepseekConfig, target: str) -> int:
    """Words of the large LDS array: experts beyond 256 take three of them each."""
    return LDS_WORDS[target] - max(0, config.n_routed_experts - THREADS) * 4


def model_header(config: DeepseekConfig, formats: Formats, target: str, tp: int = 1, activations: str = "auto") -> str:
    """The text of model_config.h, which decode.hip is compiled against."""
    activations = choose(formats, activations)
    shape, kinds = Shape.of(config, tp), Kinds.of(config).kinds
    check_formats(formats, target, activations, KNOWN)
    if activations == "f32":
        check_exact(exact_attention(config.head_dim, lds_words(config, target) - ZERO_WORDS, target), target)
    sizes = {
        "ROWS": ROWS,
        "RANKS": tp,
        "PAGE": PAGE,
        "LDS_WORDS": lds_words(config, target),
        "HIDDEN": config.hidden_size,
        "VOCAB": shape.vocab,
        "HEADS": shape.heads,
        "D": config.head_dim,
        "ROPE": config.qk_rope_head_dim,
        "Q_LORA": config.q_lora_rank,
        "GROUPS": shape.groups,
        "O_LORA": config.o_lora_rank,
        "WINDOW": config.sliding_window,
        "STREAMS": config.hc_mult,
        "SINKHORN_ROUNDS": config.hc_sinkhorn_iters,
        "EXPERTS": config.n_routed_experts,
        "TOP_K": config.num_experts_per_tok,
        "EXPERT_WIDTH": shape.expert_width,
        "INDEX_HEADS": config.index_n_heads,
        "INDEX_DIM": config.index_head_dim,
        "INDEX_TOPK": config.index_topk,
        "DOWN_WIDTH": Kinds.of(config).down_width(config),
        "HEAD_NORM": config.head_norm,
        "DELAYED": config.delayed,
        "KEYS_FROM_LATENT": config.keys_from_latent,
    }
    for letter, (ratio, pooling, keys) in zip("AB", (*kinds, *kinds, (1, 0, False), (1, 0, False)), strict=False):
        sizes |= {f"RATIO_{letter}": ratio, f"POOLING_{letter}": pooling, f"KEYS_{letter}": keys}
    bound, engram = config.candidates, config.engram
    sizes |= {
        "CANDIDATE_LAYER": bound.source if bound else -1,
        "CANDIDATE_BLOCKS": bound.blocks if bound else 1,
        "CANDIDATE_SIZE": bound.block_size if bound else 1,
        "NGRAM": engram.max_ngram_size if engram else 2,
        "ENGRAM_HEADS": engram.n_heads if engram else 1,
        "ENGRAM_COLUMNS": engram.columns if engram else 1,
        "ENGRAM_DIM": engram.head_dim if engram else 0,
        "ENGRAM_COPIES": engram.copies if engram else 1,
    }
    numbers = {
        "NORM_EPS": config.rms_norm_eps,
        "HC_EPS": config.hc_eps,
        "ROUTED_SCALE": config.routed_scaling_factor,
        "SOFTMAX_SCALE": config.softmax_scale,
        "INDEX_SCALE": config.index_scale,
        "INDEX_WEIGHT_SCALE": config.index_weight_scale,
        "SWIGLU_LIMIT": config.swiglu_limit,
    }
    types = {
        "Linear": KNOWN[formats.linear][activations],
        "Expert": KNOWN[formats.expert][activations],
        "Island": FORMATS[formats.island]["bf16"],  # as it is stored: the embedding's rows
        "Head": FORMATS[formats.island][activations],
    }
    return header_text(sizes, numbers, types)


def unit(
    config: DeepseekConfig,
    formats: Formats,
    target: str,
    tp: int = 1,
    activations: str = "auto",
    *,
    timeline: bool = False,
    one_row: bool = False,
) -> Unit:
    """What the toolchain compiles for one target.

    activations: what weights meet, see activations.py. The rest are variants, see `variant`.
    """
    activations = choose(formats, activations)
    suffix, defines = variant(timeline=timeline, one_row=one_row)
    name = f"{config.model_type}-{formats.label}-{formats.island}-a{activations}-tp{tp}{suffix}"
    header = model_header(config, formats, target, tp, activations)
    return Unit(name.replace("+", "-"), FOLDER / "decode.hip", {"model_config.h": header}, defines)
