"""GLM's published checkpoints: names, shapes and storage of their tensors, and whether a directory holds such a one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rocmega.checkpoint.layouts import MatrixInfo, examine
from rocmega.checkpoint.tiles import FORMATS, scale_grid
from rocmega.errors import CheckpointError
from rocmega.models.common.published import (
    Expected,
    Layouts,
    check_matrix_shape,
    extra,
    mixtures,
    plain_layout,
    raise_faults,
)
from rocmega.models.common.published import scale_name as scale_name
from rocmega.models.glm.config import GlmConfig

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint


@dataclass(frozen=True)
class Formats:
    """What is stored in which format: names as in rocmega.checkpoint.tiles.

    Fields:
        linear: the big matrices.
        island: embedding, head, router and index weights, which no checkpoint quantizes; f32 or bf16.
        expert: gate, up and down of mixture layers, routed and shared; as linear if not given.
        dense: gate, up and down of dense layers; as linear if not given.
        absorbed: key_up and value_up; f32 for f32 activations, else bf16. If not given, f32 where linear is.
        cache: latent and index cache, as absorbed: they meet.
    """

    linear: str
    island: str
    expert: str = ""
    dense: str = ""
    absorbed: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert", self.expert or self.linear)
        object.__setattr__(self, "dense", self.dense or self.linear)
        object.__setattr__(self, "absorbed", self.absorbed or ("f32" if self.linear == "f32" else "bf16"))

    @property
    def cache(self) -> str:
        return self.absorbed

    @property
    def label(self) -> str:
        """The big matrices' format, or formats: "fp8", "fp8+mxfp4" with other experts, "bf16+mxfp4/mxfp4"."""
        dense = "" if self.dense == self.linear else f"/{self.dense}"
        return self.linear if self.expert == self.linear and not dense else f"{self.linear}+{self.expert}{dense}"

    def to_json(self) -> dict[str, str]:
        """For a pack's manifest; Formats(**...) is the inverse. Without `absorbed` where it follows from the others."""
        stored = asdict(self)
        if replace(self, absorbed="") == self:
            del stored["absorbed"]
        return stored


# Names and shapes. "linear" are the big matrices of attention and indexer, "dense" and "expert" those of the MLPs, all
# of which may be quantized; "up" is kv_b_proj, which may be too but ends up absorbed; "island" never is; "vector" is
# small.
QUANTIZABLE = ("linear", "dense", "expert", "up")
DRAFT_NORMS = {"embed_norm": "enorm.weight", "hidden_norm": "hnorm.weight", "head_norm": "shared_head.norm.weight"}
_GROUPS = {
    "linear": "the big matrices of attention are",
    "dense": "the dense layers' matrices are",
    "expert": "the experts, the shared one among them, are",
}


def layer_tensors(config: GlmConfig, layer: int) -> Expected:
    """Tensor name -> (shape, kind) of one layer, scales not counted."""
    c, prefix = config, f"model.layers.{layer}."
    heads, hidden = c.num_attention_heads, c.hidden_size
    linear: dict[str, tuple[int, int]] = {
        "self_attn.q_a_proj": (c.q_lora_rank, hidden),
        "self_attn.kv_a_proj_with_mqa": (c.latent_dim, hidden),
        "self_attn.q_b_proj": (heads * c.qk_head_dim, c.q_lora_rank),
        "self_attn.o_proj": (hidden, heads * c.v_head_dim),
    }
    island: dict[str, tuple[int, int]] = {}
    mlp: dict[str, tuple[int, int]] = {}
    vector = {
        "input_layernorm.weight": hidden,
        "post_attention_layernorm.weight": hidden,
        "self_attn.q_a_layernorm.weight": c.q_lora_rank,
        "self_attn.kv_a_layernorm.weight": c.kv_lora_rank,
    }
    if c.full_index[layer]:
        linear["self_attn.indexer.wq_b"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        linear["self_attn.indexer.wk"] = (c.index_head_dim, hidden)
        island["self_attn.indexer.weights_proj"] = (c.index_n_heads, hidden)
        vector["self_attn.indexer.k_norm.weight"] = vector["self_attn.indexer.k_norm.bias"] = c.index_head_dim
    if c.dense_layers[layer]:
        width = c.intermediate_size
    else:
        island["mlp.gate"] = (c.n_routed_experts, hidden)
        vector["mlp.gate.e_score_correction_bias"] = c.n_routed_experts
        width = c.moe_intermediate_size
    for name in mlps(c, layer):
        mlp[f"{name}.gate_proj"] = mlp[f"{name}.up_proj"] = (width, hidden)
        mlp[f"{name}.down_proj"] = (hidden, width)
    up = (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    kind = "dense" if c.dense_layers[layer] else "expert"
    return {
        **{f"{prefix}{name}.weight": (shape, "linear") for name, shape in linear.items()},
        **{f"{prefix}{name}.weight": (shape, kind) for name, shape in mlp.items()},
        f"{prefix}self_attn.kv_b_proj.weight": (up, "up"),
        **{f"{prefix}{name}.weight": (shape, "island") for name, shape in island.items()},
        **{f"{prefix}{name}": ((size,), "vector") for name, size in vector.items()},
    }


def mlps(config: GlmConfig, layer: int) -> list[str]:
    """A layer's gated MLPs, in the order in which they are packed: the dense one, or the experts, the shared last."""
    if config.dense_layers[layer]:
        return ["mlp"]
    return [*(f"mlp.experts.{expert}" for expert in range(config.n_routed_experts)), "mlp.shared_experts"]


def expected_tensors(config: GlmConfig) -> Expected:
    """Tensor name -> (shape, kind) of the whole model, scales and the draft (MTP) layer not counted."""
    vocabulary = (config.vocab_size, config.hidden_size)
    expected: Expected = {
        "model.embed_tokens.weight": (vocabulary, "island"),
        "lm_head.weight": (vocabulary, "island"),
        "model.norm.weight": ((config.hidden_size,), "vector"),
    }
    for layer in range(config.num_hidden_layers):
        expected.update(layer_tensors(config, layer))
    return expected


def with_draft_layer(config: GlmConfig) -> GlmConfig:
    """The model with the layer for guessing ahead (draft.py) as its last: a mixture, with an indexer."""
    return replace(
        config,
        num_hidden_layers=config.num_hidden_layers + 1,
        dense_layers=(*config.dense_layers, False),
        full_index=(*config.full_index, True),
    )


def has_draft_layer(checkpoint: Checkpoint, config: GlmConfig) -> bool:
    """Whether the files have the layer that config.json speaks of: some copies leave it out."""
    number = config.num_hidden_layers
    return bool(config.num_nextn_predict_layers) and f"model.layers.{number}.eh_proj.weight" in checkpoint


def draft_tensors(config: GlmConfig) -> Expected:
    """Tensor name -> (shape, kind) of the layer for guessing ahead, scales not counted."""
    number, hidden = config.num_hidden_layers, config.hidden_size
    prefix = f"model.layers.{number}."
    return {
        **layer_tensors(with_draft_layer(config), number),
        f"{prefix}eh_proj.weight": ((hidden, 2 * hidden), "island"),
        **{prefix + name: ((hidden,), "vector") for name in DRAFT_NORMS.values()},
    }


def published_formats(config: GlmConfig) -> Formats:
    """As the big models' FP8 checkpoints are published."""
    return Formats("fp8", "bf16")


def named_formats(config: GlmConfig, format: str | None) -> Formats:
    """Of a model by name; format: f32, bf16, fp8, or mxfp4, which is of experts; None: as published."""
    if format is None:
        return published_formats(config)
    linear = "fp8" if format == "mxfp4" else format
    return Formats(linear, "f32" if format == "f32" else "bf16", format)


def check(checkpoint: Checkpoint, config: GlmConfig) -> Formats:
    """Compares the files' headers with what the configuration asks for, and finds the formats they are stored in.

    Raises CheckpointError, listing what is missing, misshapen, of a wrong dtype or not part of the model.
    """
    expected = expected_tensors(config)
    layouts, faults = _examine(checkpoint, config, expected)
    faults += extra(checkpoint, expected, QUANTIZABLE, lambda name: _ignored(config, name))
    faults += mixtures(layouts, _GROUPS)
    if config.quantized and not any(FORMATS[layout].block or layout == "mxfp4" for layout in _all(layouts)):
        faults.append("no tensor is quantized, though config.json says so")
    raise_faults(checkpoint, faults)
    return _formats(layouts)


def check_part(checkpoint: Checkpoint, config: GlmConfig, expected: Expected) -> Formats:
    """The same for some tensors alone, which have formats of their own."""
    layouts, faults = _examine(checkpoint, config, expected)
    raise_faults(checkpoint, [*faults, *mixtures(layouts, _GROUPS)])
    return _formats(layouts)


def _examine(checkpoint: Checkpoint, config: GlmConfig, expected: Expected) -> tuple[Layouts, list[str]]:
    faults = [f"tensor {name} is missing" for name in expected if name not in checkpoint]
    layouts: Layouts = {kind: {} for kind in (*QUANTIZABLE, "island", "vector")}
    for name, (shape, kind) in expected.items():
        if name not in checkpoint:
            continue
        try:
            layouts[kind].setdefault(_layout(checkpoint, config, name, shape, kind), name)
        except CheckpointError as error:
            faults.append(str(error))
    return layouts, faults


def _formats(layouts: Layouts) -> Formats:
    # A single float32 island makes all of them float32: widening is exact, narrowing is not.
    island = "f32" if "f32" in layouts["island"] else "bf16"
    linear, expert, dense = (next(iter(layouts[kind]), "") for kind in ("linear", "expert", "dense"))
    return Formats(linear, island, expert, dense)


def _all(layouts: Layouts) -> set[str]:
    return {layout for group in layouts.values() for layout in group}


def _layout(checkpoint: Checkpoint, config: GlmConfig, name: str, shape: tuple[int, ...], kind: str) -> str:
    """How a tensor is stored; raises CheckpointError with what is wrong with it."""
    at = checkpoint.file(name).name
    if kind not in QUANTIZABLE or len(shape) != 2:
        return plain_layout(checkpoint, name, shape)
    packed = check_matrix_shape(checkpoint, name, shape)
    if (packed or checkpoint.info(name).dtype == "F8_E4M3") and not config.quantized:
        what = "MXFP4" if packed else "FP8"
        raise CheckpointError(f"tensor {name} in {at} is {what} and config.json has no quantization_config")
    info = examine(checkpoint, name)
    _check_quantization(checkpoint, config, info, kind)
    return info.layout


def _check_quantization(checkpoint: Checkpoint, config: GlmConfig, info: MatrixInfo, kind: str) -> None:
    """What config.json says of a matrix, beside what is stored."""
    at = checkpoint.file(info.name).name
    if config.quantization == "fp8":
        if info.layout in ("f32", "bf16") and kind != "up":
            raise CheckpointError(
                f"tensor {info.name} in {at} is {checkpoint.dtype(info.name)}, though config.json says that the "
                "weights are FP8"
            )
        if info.layout == "mxfp4":
            raise CheckpointError(f"tensor {info.name} in {at} is MXFP4, though config.json says that weights are FP8")
    if info.layout in ("fp8_32", "mxfp8") and info.scale is not None:
        grid = list(scale_grid(info.n, info.k))
        raise CheckpointError(
            f"tensor {info.scale} in {checkpoint.file(info.scale).name} is {list(checkpoint.shape(info.scale))}, not "
            f"{grid}: config.json says that blocks are 128x128"
        )


def _ignored(config: GlmConfig, name: str) -> bool:
    """The draft layer, and what transformers computes itself."""
    parts = name.split(".")
    draft = name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= config.num_hidden_layers
    return draft or name.endswith("rotary_emb.inv_freq")
