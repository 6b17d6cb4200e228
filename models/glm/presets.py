"""GLM models without a download: the published dimensions, and small models with random weights.

`write_checkpoint` writes a directory as published: config.json, safetensors shards and their index, with published
names. The small models keep all that matters of the big ones: dense and mixture layers, shared selections, contexts
beyond index_topk; "-mtp-" has the layer for guessing ahead (draft.py) too. No value is one that hides an error: no zero
bias, no unit norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rocmega.checkpoint.layouts import scale_names
from rocmega.checkpoint.quantize import quantize_fp8, quantize_mxfp4
from rocmega.checkpoint.tiles import MX_GROUP, SCALE_BLOCK, dequantize_fp8, dequantize_mxfp4
from rocmega.errors import RequestError
from rocmega.models.common.presets import copy_of, draw, write_files
from rocmega.models.glm.config import MODEL_TYPE, GlmConfig, from_dict
from rocmega.models.glm.published import QUANTIZABLE, Expected, draft_tensors, expected_tensors, scale_name

_COMMON = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "model_type": MODEL_TYPE,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
}
_PUBLISHED = {
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "vocab_size": 154880, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "head_dim": 64, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "num_nextn_predict_layers": 1, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820,
}  # fmt: skip
_TINY = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 8,
    "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 32,
    "qk_head_dim": 80, "v_head_dim": 64, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 24,
    "max_position_embeddings": 4096, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# The published widths of a layer, with few heads, experts, layers and words: about 1.7 billion weights.
_MID = {
    **_TINY,
    "hidden_size": 6144, "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": 5,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 8, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256,
    "index_n_heads": 32, "index_head_dim": 128,
}  # fmt: skip
# As small as FP8 blocks of 128 allow, for training in minutes (models/glm/training). A token is a character's ASCII
# code, 3 is "end of text". Long puzzles reach far beyond index_topk.
_PUZZLES = {
    **_TINY,
    "moe_intermediate_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 1, "vocab_size": 128,
    "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_head_dim": 64, "index_topk": 64, "max_position_embeddings": 1024,
    "eos_token_id": [3], "pad_token_id": 3,
}  # fmt: skip


def _glm5(dimensions: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": 1000000.0, "rope_type": "default"}
    return {"max_position_embeddings": 202752, **_COMMON, **dimensions, "rope_parameters": rope}


def _glm52(dimensions: dict[str, Any]) -> dict[str, Any]:
    layers = dimensions["num_hidden_layers"]
    kinds = ["full" if max(layer - 2, 0) % 4 == 0 else "shared" for layer in range(layers)]
    rope = {"rope_theta": 8000000.0, "rope_type": "default"}
    longest = {"max_position_embeddings": 1048576}
    return {**longest, **_COMMON, **dimensions, "rope_parameters": rope, "indexer_types": kinds}


def _puzzles() -> dict[str, Any]:
    """A rotation for contexts of hundreds, and a layer that shares a selection among so few."""
    config = _glm52(_PUZZLES)
    config["rope_parameters"]["rope_theta"] = 10000.0
    config["indexer_types"] = ["full", "full", "shared", "full"]
    return config


PRESETS: dict[str, dict[str, Any]] = {
    "glm-5": _glm5(_PUBLISHED),
    "glm-5.2": _glm52(_PUBLISHED),
    "glm-5-tiny": _glm5(_TINY),
    "glm-5.2-tiny": _glm52(_TINY),
    "glm-5.2-mtp-tiny": _glm52({**_TINY, "num_nextn_predict_layers": 1}),
    "glm-5-mid": _glm5(_MID),
    "glm-5.2-mid": _glm52(_MID),
    "glm-5.2-puzzles": _puzzles(),
}
WRITABLE = tuple(name for name in PRESETS if name.endswith(("-tiny", "-mid")))
DTYPES = ("f32", "bf16", "fp8", "mxfp4")

_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.embed_tokens", "mlp.gate", "self_attn.indexer.weights_proj"],
    "quant_method": "fp8",
    "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
}
# As AMD Quark writes it, for MXFP4 with some layers in block FP8.
_MXFP4 = {"dtype": "fp4", "group_size": MX_GROUP, "qscheme": "per_group", "scale_format": "e8m0"}
_BLOCK_FP8 = {"block_size": [SCALE_BLOCK, SCALE_BLOCK], "dtype": "fp8_e4m3", "qscheme": "per_block"}
_QUARK = {
    "exclude": _QUANTIZATION["modules_to_not_convert"],
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {"weight": _MXFP4},
    "layer_quant_config": {"*.self_attn.*": {"weight": _BLOCK_FP8}, "model.layers.[0-2].mlp.*": {"weight": _BLOCK_FP8}},
    "quant_method": "quark",
}


def preset(name: str) -> dict[str, Any]:
    """A copy of a preset's config.json. Raises RequestError for an unknown name."""
    return copy_of(PRESETS, name)


def write_checkpoint(
    name: str,
    directory: str | Path,
    dtype: str = "f32",
    seed: int = 0,
    *,
    dequantized: bool = False,
    shards: int = 3,
) -> Path:
    """Writes a small preset with random weights, the same ones for the same seed; returns the directory.

    dtype: "f32"; "bf16"; "fp8", e4m3 with 128x128 float32 scales where published checkpoints have them and bf16
    elsewhere; or "mxfp4", the same with MXFP4 experts as AMD Quark stores them. dequantized: the values of a checkpoint
    that is not "f32", written as float32 without quantization: its exact twin. shards: how many files the tensors are
    spread over.
    """
    if name not in WRITABLE or dtype not in DTYPES:
        raise RequestError(
            f"weights of {name!r} in {dtype!r} cannot be made: use one of {', '.join(WRITABLE)} in {', '.join(DTYPES)}."
        )
    model = from_dict(preset(name))
    written = write_weights(
        preset(name),
        directory,
        dtype,
        lambda tensor, shape: _value(model, tensor, shape, seed),
        dequantized=dequantized,
        shards=shards,
    )
    _fused.cache_clear()
    return written


def write_weights(
    config: dict[str, Any],
    directory: str | Path,
    dtype: str,
    value: Callable[[str, tuple[int, ...]], torch.Tensor],
    *,
    dequantized: bool = False,
    shards: int = 1,
) -> Path:
    """Writes a checkpoint of given values; returns the directory. Other arguments as in `write_checkpoint`.

    config: a config.json, whose dtype and quantization are replaced. value: a tensor's float32 values, from its
    published name and its shape.
    """
    config = {name: field for name, field in config.items() if name != "quantization_config"}
    config["dtype"] = "float32" if dtype == "f32" or dequantized else "bfloat16"
    if dtype in ("fp8", "mxfp4") and not dequantized:
        config["quantization_config"] = _QUANTIZATION if dtype == "fp8" else _QUARK
    directory = Path(directory)
    model = from_dict(config)
    expected = expected_tensors(model)
    if model.num_nextn_predict_layers:
        expected |= draft_tensors(model)

    def stored(names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return _stored({name: expected[name] for name in names}, dtype, value, dequantized)

    write_files(directory, config, list(expected), shards, stored)
    return directory


def _stored(
    expected: Expected, dtype: str, values: Callable[[str, tuple[int, ...]], torch.Tensor], dequantized: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (shape, kind) in expected.items():
        value = values(name, shape)
        if dtype in ("fp8", "mxfp4") and kind in QUANTIZABLE:
            packed = dtype == "mxfp4" and kind == "expert"
            weight, scales = quantize_mxfp4(value) if packed else quantize_fp8(value)
            if dequantized:
                yield name, (dequantize_mxfp4 if packed else dequantize_fp8)(weight, scales)
            else:
                yield name, weight
                yield scale_names(name)[1] if packed else scale_name(name), scales
        elif dtype == "f32" or name.endswith("e_score_correction_bias"):
            yield name, value
        else:
            rounded = value.to(torch.bfloat16)
            yield name, rounded.float() if dequantized else rounded


def _value(config: GlmConfig, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor's float32 values: a pure function of model, name, shape and seed.

    A layer's experts are drawn together, under the names that transformers gives their fused tensors, so that seed 0
    is the model which anything else that draws by parameter name gets.
    """
    if ".mlp.experts." not in name:
        return _drawn(name, shape, seed)
    layer, rest = name.split(".mlp.experts.")
    expert, part, _ = rest.split(".")
    (n, k), experts = shape, config.n_routed_experts
    if part == "down_proj":
        return _fused(f"{layer}.mlp.experts.down_proj", (experts, n, k), seed)[int(expert)].clone()
    gate, up = _fused(f"{layer}.mlp.experts.gate_up_proj", (experts, 2 * n, k), seed)[int(expert)].chunk(2)
    return (gate if part == "gate_proj" else up).clone()


@lru_cache(maxsize=2)  # one layer's two fused tensors
def _fused(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return _drawn(name, shape, seed)


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = draw(name, shape, seed)
    if name.endswith("e_score_correction_bias"):
        return values * 0.05
    if name.endswith("k_norm.bias"):
        return values * 0.1
    if len(shape) == 1:
        return 1 + values * 0.1
    if name == "model.embed_tokens.weight":
        return values
    gain = {"lm_head.weight": 4.0}.get(name, 2.0 if name.endswith("mlp.gate.weight") else 1.0)
    return values * (gain / math.sqrt(shape[-1]))
