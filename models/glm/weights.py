"""From a checkpoint's tensors to the packed weights that kernels and the standard path share.

Field names and shapes are those of LayerWeights in descriptor.h. Everything is checked by the files' headers before
the first tensor is read; then one layer after the other is packed, so that at most the packed copy and a few tensors
are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocmega.checkpoint.tiles import PackedMatrix, dequantize_fp8, dtype_of, scale_grid
from rocmega.errors import CheckpointError
from rocmega.models.glm.config import GlmConfig

if TYPE_CHECKING:
    from rocmega.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # layers packed, layers in all

_FORMAT_OF = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Formats:
    """What is stored in which format: "f32", "bf16" or "fp8".

    Fields:
        linear: the big matrices.
        island: embedding, head, router and index weights, which no checkpoint quantizes; f32 or bf16.
        absorbed: key_up and value_up; f32 if linear is, else bf16.
        cache: latent and index cache; f32 if linear is, else bf16.
    """

    linear: str
    island: str

    @property
    def absorbed(self) -> str:
        return "f32" if self.linear == "f32" else "bf16"

    @property
    def cache(self) -> str:
        return self.absorbed


Layer = dict[str, PackedMatrix | torch.Tensor]


@dataclass(frozen=True)
class GlmWeights:
    """A model's packed weights.

    Fields:
        formats: of matrices and cache.
        layers: per layer, field of LayerWeights -> PackedMatrix, or float32 tensor for norms and biases. Fields that
        are null
            in descriptor.h are absent. gate_up and down of mixture layers hold the shared expert last.
        embedding: island dtype [vocab, hidden], row-major.
        final_norm: float32 [hidden].
        head: [vocab, hidden], island format.
    """

    formats: Formats
    layers: list[Layer]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: PackedMatrix

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the packed copy."""
        for field in (
            self.embedding,
            self.final_norm,
            self.head,
            *(field for layer in self.layers for field in layer.values()),
        ):
            if isinstance(field, torch.Tensor):
                yield field
            else:
                yield field.tiles
                if field.scales is not None:
                    yield field.scales

    def bytes(self) -> int:
        """Device bytes of the packed copy."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device


# The checkpoint's side: names and shapes. "linear" is quantized in FP8 checkpoints, "island" never, "vector" is small,
# and "up" is kv_b_proj, which is linear but ends up absorbed.
Expected = dict[str, tuple[tuple[int, ...], str]]


def layer_tensors(config: GlmConfig, layer: int) -> Expected:
    """Tensor name -> (shape, kind) of one layer, FP8 scales not counted."""
    c, prefix = config, f"model.layers.{layer}."
    heads, hidden = c.num_attention_heads, c.hidden_size
    linear: dict[str, tuple[int, int]] = {
        "self_attn.q_a_proj": (c.q_lora_rank, hidden),
        "self_attn.kv_a_proj_with_mqa": (c.latent_dim, hidden),
        "self_attn.q_b_proj": (heads * c.qk_head_dim, c.q_lora_rank),
        "self_attn.o_proj": (hidden, heads * c.v_head_dim),
    }
    island: dict[str, tuple[int, int]] = {}
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
        mlps, width = ["mlp"], c.intermediate_size
    else:
        island["mlp.gate"] = (c.n_routed_experts, hidden)
        vector["mlp.gate.e_score_correction_bias"] = c.n_routed_experts
        mlps, width = _experts(c), c.moe_intermediate_size
    for mlp in mlps:
        linear[f"{mlp}.gate_proj"] = linear[f"{mlp}.up_proj"] = (width, hidden)
        linear[f"{mlp}.down_proj"] = (hidden, width)
    up = (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    return {
        **{f"{prefix}{name}.weight": (shape, "linear") for name, shape in linear.items()},
        f"{prefix}self_attn.kv_b_proj.weight": (up, "up"),
        **{f"{prefix}{name}.weight": (shape, "island") for name, shape in island.items()},
        **{f"{prefix}{name}": ((size,), "vector") for name, size in vector.items()},
    }


def expected_tensors(config: GlmConfig) -> Expected:
    """Tensor name -> (shape, kind) of the whole model, FP8 scales and the draft (MTP) layer not counted."""
    vocabulary = (config.vocab_size, config.hidden_size)
    expected: Expected = {
        "model.embed_tokens.weight": (vocabulary, "island"),
        "lm_head.weight": (vocabulary, "island"),
        "model.norm.weight": ((config.hidden_size,), "vector"),
    }
    for layer in range(config.num_hidden_layers):
        expected.update(layer_tensors(config, layer))
    return expected


def scale_name(name: str) -> str:
    """The FP8 block scales' tensor of a weight."""
    return f"{name}_scale_inv"


def _experts(config: GlmConfig) -> list[str]:
    return [*(f"mlp.experts.{expert}" for expert in range(config.n_routed_experts)), "mlp.shared_experts"]


def check(checkpoint: Checkpoint, config: GlmConfig) -> Formats:
    """Compares the files' headers with what the configuration asks for, and finds the formats.

    Raises CheckpointError, listing what is missing, misshapen, of a wrong dtype or not part of the model.
    """
    expected = expected_tensors(config)
    faults = [f"tensor {name} is missing" for name in expected if name not in checkpoint]
    dtypes: dict[str, dict[torch.dtype, str]] = {"linear": {}, "up": {}, "island": {}, "vector": {}}
    for name, (shape, kind) in expected.items():
        if name in checkpoint:
            faults += _faults_of(checkpoint, config, name, shape, kind)
            dtypes[kind].setdefault(checkpoint.dtype(name), name)
    faults += _extra(checkpoint, config, expected)
    if len(dtypes["linear"]) > 1:
        mixture = " and ".join(f"{dtype} ({name})" for dtype, name in dtypes["linear"].items())
        faults.append(f"the big matrices are of different dtypes, {mixture}, and one launch runs one format")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(
            f"{checkpoint.directory} does not hold the model of its config.json: {shown}. Fetch the checkpoint again, "
            "or use the config.json that belongs to it."
        )
    # A single float32 island makes all of them float32: widening is exact, narrowing is not.
    island = "f32" if torch.float32 in dtypes["island"] else "bf16"
    return Formats(linear=_FORMAT_OF[next(iter(dtypes["linear"]))], island=island)


def _faults_of(
    checkpoint: Checkpoint, config: GlmConfig, name: str, shape: tuple[int, ...], kind: str
) -> Iterator[str]:
    at = checkpoint.file(name)
    if checkpoint.shape(name) != shape:
        yield f"tensor {name} in {at.name} is {list(checkpoint.shape(name))}, not {list(shape)}"
        return
    dtype = checkpoint.dtype(name)
    quantized = dtype == torch.float8_e4m3fn
    if dtype not in (torch.float32, torch.bfloat16) and not (quantized and kind in ("linear", "up")):
        yield f"tensor {name} in {at.name} is {dtype}, which is not supported there"
    if quantized and not config.quantized:
        yield f"tensor {name} in {at.name} is FP8 and config.json has no quantization_config"
    if config.quantized and not quantized and kind == "linear":
        yield f"tensor {name} in {at.name} is {dtype}, though config.json says that the weights are FP8"
    if not quantized:
        return
    scale = scale_name(name)
    if scale not in checkpoint:
        yield f"tensor {scale}, the scales of an FP8 weight in {at.name}, is missing"
    elif checkpoint.shape(scale) != scale_grid(*shape) or checkpoint.dtype(scale) != torch.float32:
        yield (
            f"tensor {scale} in {checkpoint.file(scale).name} is {checkpoint.dtype(scale)} "
            f"{list(checkpoint.shape(scale))}, not torch.float32 {list(scale_grid(*shape))}"
        )


def _extra(checkpoint: Checkpoint, config: GlmConfig, expected: Expected) -> Iterator[str]:
    """Tensors that the model's mathematics has no place for: biases, other scales, an indexer in a shared layer."""
    for name in checkpoint.names():
        weight = name.removesuffix("_scale_inv")
        if name in expected or name.endswith("rotary_emb.inv_freq"):
            continue
        scales = weight != name and expected.get(weight, ((), ""))[1] in ("linear", "up")
        if scales and weight in checkpoint and checkpoint.dtype(weight) == torch.float8_e4m3fn:
            continue
        parts = name.split(".")
        if name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= config.num_hidden_layers:
            continue  # the draft layer
        yield f"tensor {name} is not part of the model that config.json describes"


# Packing.


def pack(
    checkpoint: Checkpoint, config: GlmConfig, progress: Progress | None = None, device: torch.device | str = "cpu"
) -> GlmWeights:
    """Reads and packs all weights. Raises CheckpointError before anything is packed if the checkpoint does not fit.

    progress: called with (layers done, layers) after each layer.
    """
    packer = _Packer(checkpoint, config, check(checkpoint, config), device)
    layers = []
    for layer in range(config.num_hidden_layers):
        layers.append(packer.layer(layer))
        if progress is not None:
            progress(layer + 1, config.num_hidden_layers)
    embedding = packer.read("model.embed_tokens.weight").to(device, dtype_of(packer.formats.island), copy=True)
    final_norm = packer.vector("model.norm.weight")
    return GlmWeights(packer.formats, layers, embedding, final_norm, packer.island("lm_head.weight"))


class _Packer:
    def __init__(self, checkpoint: Checkpoint, config: GlmConfig, formats: Formats, device: torch.device | str):
        self.checkpoint, self.config, self.formats, self.device = checkpoint, config, formats, device
        self.read = checkpoint.tensor

    def layer(self, layer: int) -> Layer:
        c, prefix = self.config, f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        fields: Layer = {
            "attention_norm": self.vector(f"{prefix}input_layernorm.weight"),
            "q_a_norm": self.vector(f"{attention}q_a_layernorm.weight"),
            "kv_a_norm": self.vector(f"{attention}kv_a_layernorm.weight"),
            "mlp_norm": self.vector(f"{prefix}post_attention_layernorm.weight"),
            "q_a": self.linear([f"{attention}q_a_proj.weight"]),
            "kv_a": self.linear([f"{attention}kv_a_proj_with_mqa.weight"]),
            "q_b": self.linear([f"{attention}q_b_proj.weight"]),
            "o": self.linear([f"{attention}o_proj.weight"]),
        }
        fields["key_up"], fields["value_up"] = self.absorbed(f"{attention}kv_b_proj.weight")
        if c.full_index[layer]:
            norm = f"{attention}indexer.k_norm."
            fields["index_k_norm"] = torch.stack([self.vector(f"{norm}weight"), self.vector(f"{norm}bias")])
            fields["index_q"] = self.linear([f"{attention}indexer.wq_b.weight"])
            fields["index_k"] = self.linear([f"{attention}indexer.wk.weight"])
            fields["index_weights"] = self.island(f"{attention}indexer.weights_proj.weight")
        if c.dense_layers[layer]:
            mlps = ["mlp"]
        else:
            mlps = _experts(c)
            fields["router"] = self.island(f"{prefix}mlp.gate.weight")
            fields["router_bias"] = self.vector(f"{prefix}mlp.gate.e_score_correction_bias")
        fields["gate_up"] = self.linear(
            [f"{prefix}{mlp}.{part}_proj.weight" for mlp in mlps for part in ("gate", "up")]
        )
        fields["down"] = self.linear([f"{prefix}{mlp}.down_proj.weight" for mlp in mlps])
        return fields

    def vector(self, name: str) -> torch.Tensor:
        return self.read(name).to(self.device, torch.float32, copy=True)

    def linear(self, names: list[str]) -> PackedMatrix:
        """Matrices of one shape, as stored, one after the other."""
        packed = PackedMatrix.empty(self.formats.linear, self.checkpoint.shape(names[0]), len(names), self.device)
        for index, name in enumerate(names):
            scales = self.read(scale_name(name)) if self.formats.linear == "fp8" else None
            packed.put(index, self.read(name), scales)
        return packed

    def island(self, name: str) -> PackedMatrix:
        return self._packed([self.read(name)], self.formats.island)

    def absorbed(self, name: str) -> tuple[PackedMatrix, PackedMatrix]:
        """kv_b_proj, [heads * (nope + v), latent], as key_up and value_up: a head's key part is transposed."""
        c = self.config
        weight = self.read(name)
        if weight.dtype == torch.float8_e4m3fn:
            weight = dequantize_fp8(weight, self.read(scale_name(name)))
        heads = weight.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        keys, values = heads.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        return self._packed(list(keys.mT), self.formats.absorbed), self._packed(list(values), self.formats.absorbed)

    def _packed(self, matrices: list[torch.Tensor], format: str) -> PackedMatrix:
        packed = PackedMatrix.empty(format, matrices[0].shape, len(matrices), self.device)
        for index, matrix in enumerate(matrices):
            packed.put(index, matrix.to(dtype_of(format)))
        return packed
