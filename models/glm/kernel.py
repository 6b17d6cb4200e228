"""The mega-task as a unit to compile: one binary per model, weight formats, tensor-parallel size and target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocmega.cache import PAGE
from rocmega.errors import ConfigError
from rocmega.models.common.kernel import (
    FORMATS,
    ZERO_WORDS,
    check_exact,
    check_formats,
    exact_attention,
    header_text,
    multiples,
    variant,
    waves,
)
from rocmega.models.common.kernel import LDS_WORDS as LDS_WORDS
from rocmega.models.common.kernel import ROWS as ROWS
from rocmega.models.common.kernel import SPLIT as SPLIT
from rocmega.models.common.kernel import THREADS as THREADS
from rocmega.models.common.kernel import TILE_ROWS as TILE_ROWS
from rocmega.models.common.kernel import router_slices as router_slices
from rocmega.models.glm.activations import choose
from rocmega.models.glm.config import GlmConfig
from rocmega.toolchain import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rocmega.models.glm.weights import Formats

KERNEL = "glm_decode"
FOLDER = Path(__file__).resolve().parent
LEAST_LATENT = 96  # of latent and shared key: no step of a narrower one has been tested


@dataclass(frozen=True)
class Shape:
    """One rank's dimensions: heads, expert and dense widths and the vocabulary are divided by the number of ranks."""

    heads: int
    dense_width: int
    expert_width: int
    vocab: int

    @classmethod
    def of(cls, config: GlmConfig, tp: int = 1) -> Shape:
        """Raises ConfigError with every reason: ranks that do not divide the model, dimensions that no tile fits."""
        divided = {
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "moe_intermediate_size": config.moe_intermediate_size,
            "vocab_size": config.vocab_size,
        }
        faults = [f"{name} {value} is not divisible by {tp} ranks" for name, value in divided.items() if value % tp]
        faults += _tile_faults(config, tp)
        if faults:
            raise ConfigError(f"The mega-task cannot run this model: {'; '.join(faults)}. Use the standard path.")
        return cls(*(value // tp for value in divided.values()))


def _tile_faults(config: GlmConfig, tp: int) -> Iterable[str]:
    """What the kernel's tiles ask of a model's dimensions."""
    sixteens = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "v_head_dim": config.v_head_dim,
        "index_n_heads": config.index_n_heads,
        "intermediate_size per rank": config.intermediate_size // tp,
        "moe_intermediate_size per rank": config.moe_intermediate_size // tp,
        "vocab_size per rank": config.vocab_size // tp,
        "n_routed_experts": config.n_routed_experts,
    }
    yield from multiples(sixteens, 16)
    yield from multiples({"index_head_dim": config.index_head_dim, "kv_lora_rank + rope": config.latent_dim}, 32)
    if config.latent_dim < LEAST_LATENT:
        yield f"kv_lora_rank + rope {config.latent_dim} is less than {LEAST_LATENT}"
    if config.n_routed_experts > THREADS:
        yield f"n_routed_experts {config.n_routed_experts} is more than {THREADS}"
    if config.num_experts_per_tok > 14:
        yield f"num_experts_per_tok {config.num_experts_per_tok} is more than 14"


def _exact_faults(config: GlmConfig, formats: Formats, target: str) -> Iterator[str]:
    """Where float32 activations need more LDS than there is, as lds.h, attend_tile.h and experts.h lay it out."""
    words, ring = lds_words(config, target) - ZERO_WORDS, 8 * 272 if target == "sm_90" else 0  # ring: of a wave
    yield from exact_attention(config.latent_dim, words, target)
    depth = {"f32": 16, "bf16": 32}.get(formats.expert, 128)  # of a unit
    shares = ROWS * (config.num_experts_per_tok + 1) * min(2, -(-config.moe_intermediate_size // depth)) * TILE_ROWS
    experts = shares + waves(target) * (ring + ROWS * depth)  # a unit of all rows for each wave
    if experts > words:
        yield f"the experts' shares and activations would take {experts} words of {words}"


def lds_words(_: GlmConfig, target: str) -> int:
    """Words of the large LDS array."""
    return LDS_WORDS[target]


def model_header(config: GlmConfig, formats: Formats, target: str, tp: int = 1, activations: str = "auto") -> str:
    """The text of model_config.h, which decode.hip is compiled against."""
    activations = choose(formats, activations)
    shape = Shape.of(config, tp)
    check_formats(formats, target, activations)
    if activations == "f32":
        check_exact(_exact_faults(config, formats, target), target)
    if formats.dense != formats.linear:
        raise ConfigError(
            f"The mega-task wants the dense layers' matrices in the format of attention's, and here they are "
            f"{formats.dense} and {formats.linear}. Use the standard path."
        )
    sizes = {
        "ROWS": ROWS,
        "RANKS": tp,
        "PAGE": PAGE,
        "LDS_WORDS": lds_words(config, target),
        "HIDDEN": config.hidden_size,
        "VOCAB": shape.vocab,
        "HEADS": shape.heads,
        "Q_LORA": config.q_lora_rank,
        "KV_LORA": config.kv_lora_rank,
        "ROPE": config.qk_rope_head_dim,
        "NOPE": config.qk_nope_head_dim,
        "V_DIM": config.v_head_dim,
        "DENSE_WIDTH": shape.dense_width,
        "EXPERTS": config.n_routed_experts,
        "TOP_K": config.num_experts_per_tok,
        "EXPERT_WIDTH": shape.expert_width,
        "INDEX_HEADS": config.index_n_heads,
        "INDEX_DIM": config.index_head_dim,
        "INDEX_TOPK": config.index_topk,
    }
    numbers = {
        "NORM_EPS": config.rms_norm_eps,
        "LATENT_NORM_EPS": config.latent_norm_eps,
        "INDEX_NORM_EPS": config.index_norm_eps,
        "ROUTED_SCALE": config.routed_scaling_factor,
        "SOFTMAX_SCALE": config.softmax_scale,
        "INDEX_SCALE": config.index_scale,
        "INDEX_WEIGHT_SCALE": config.index_weight_scale,
    }
    types = {
        "Linear": FORMATS[formats.linear][activations],
        "Expert": FORMATS[formats.expert][activations],
        "Island": FORMATS[formats.island]["bf16"],  # as it is stored: the embedding's rows
        "Head": FORMATS[formats.island][activations],
        "Absorbed": FORMATS[formats.absorbed][activations],
    }
    return header_text(sizes, numbers, types)


def unit(
    config: GlmConfig,
    formats: Formats,
    target: str,
    tp: int = 1,
    activations: str = "auto",
    *,
    timeline: bool = False,
    many: bool = False,
    one_row: bool = False,
) -> Unit:
    """What the toolchain compiles for one target.

    activations: what weights meet, see activations.py. The rest are variants, see `variant`.
    """
    activations = choose(formats, activations)
    suffix, defines = variant(timeline=timeline, many=many, one_row=one_row)
    name = f"glm-{formats.label}-{formats.island}-a{activations}-tp{tp}{suffix}".replace("+", "-")
    header = model_header(config, formats, target, tp, activations)
    return Unit(name, FOLDER / "decode.hip", {"model_config.h": header}, defines)
