"""DeepSeek models without a download: the published dimensions, and small models with random weights.

`write_checkpoint` writes a directory as published: config.json, safetensors shards and their index, with published
names. The small models keep all that matters of the big ones, with short windows and ratios, so that a short prompt
crosses every border. No value is one that hides an error: no zero sink or position table, no unit norm, no two tokens
that choose the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rocmega.checkpoint.layouts import StoredMatrix
from rocmega.checkpoint.quantize import quantize_fp8, quantize_mxfp4, quantize_mxfp8
from rocmega.checkpoint.tiles import e8m0_values
from rocmega.errors import RequestError
from rocmega.models.common.presets import copy_of, draw, generator, write_files
from rocmega.models.common.published import Expected
from rocmega.models.deepseek.config import V4, V41, V41_TEXT, DeepseekConfig, from_dict
from rocmega.models.deepseek.engram import TOKEN_MAP, primes
from rocmega.models.deepseek.published import expected_tensors

_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "compress_rope_theta": 160000,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "vocab_size": 129280,
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536}
_ATTENTION = {
    "head_dim": 512, "num_attention_heads": 64, "o_groups": 8, "o_lora_rank": 1024, "qk_rope_head_dim": 64,
    "index_head_dim": 128, "index_topk": 512, "num_experts_per_tok": 6,
}  # fmt: skip
_TINY = {
    "hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 8, "head_dim": 64,
    "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "sliding_window": 16, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8,
    "max_position_embeddings": 4096, "num_nextn_predict_layers": 0,
}  # fmt: skip
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def v4_config(dimensions: dict[str, Any]) -> dict[str, Any]:
    """A V4 config.json of these dimensions."""
    outer = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": V4, "bos_token_id": 0, "eos_token_id": 1}
    rope = {"rope_scaling": {**_YARN, "type": "yarn"}}
    return {**_COMMON, **outer, "num_hash_layers": 3, "rms_norm_eps": 1e-06, **rope, **dimensions}


def v41_config(text: dict[str, Any]) -> dict[str, Any]:
    """A V4.1 config.json whose language model has these dimensions; the heights of Engram's tables follow."""
    rope = {"rope_scaling": {**_YARN, "rope_type": "yarn"}}
    inner = {**_COMMON, "model_type": V41_TEXT, "rms_norm_eps": 1e-20, **rope, **text}
    heights = primes(
        len(inner["engram_layer_ids"]),
        inner["engram_max_ngram_size"],
        inner["engram_n_heads"],
        inner["engram_vocab_size"],
    )
    inner["engram_num_embeddings"] = [sum(columns) for columns in heights]
    outer = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": V41, "bos_token_id": 0, "eos_token_id": 1}
    return {**outer, "pad_token_id": 2, "text_config": inner}


PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v4-flash": v4_config(
        {
            **_ATTENTION, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
            "n_routed_experts": 256, "q_lora_rank": 1024, "index_n_heads": 64, "num_nextn_predict_layers": 1,
            "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "torch_dtype": "bfloat16",
        }
    ),
    "deepseek-v4.1-flash": v41_config(
        {
            **_ATTENTION, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40,
            "n_routed_experts": 384, "q_lora_rank": 1280, "index_n_heads": 32, "num_nextn_predict_layers": 3,
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "candidate_source_layer_id": 20,
            "candidate_topk_blocks": 2048, "candidate_block_size": 8, "engram_layer_ids": [1, 14],
            "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256, "engram_vocab_size": 16000000,
            "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
        }
    ),
    # A ratio of 16 in place of 128: transformers' names alone can say so.
    "deepseek-v4-flash-tiny": v4_config(
        {
            **_TINY, "num_hidden_layers": 6, "compress_rates": {_CSA: 4, _HCA: 16},
            "layer_types": ["sliding_attention"] * 2 + [_CSA, _HCA] * 2,
        }
    ),
    "deepseek-v4.1-flash-tiny": v41_config(
        {
            **_TINY, "num_hidden_layers": 12, "compress_ratios": [0] * 2 + [2] * 4 + [1] * 6,
            "kv_source_layer_ids": [2, 4, 6], "index_source_layer_ids": [2, 4, 6, 8, 10],
            "candidate_source_layer_id": 6, "candidate_topk_blocks": 5, "candidate_block_size": 4,
            "engram_layer_ids": [1, 4], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32,
            "engram_vocab_size": 97, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 300,
        }
    ),
}  # fmt: skip
WRITABLE = tuple(name for name in PRESETS if name.endswith("-tiny"))
DTYPES = ("f32", "bf16", "mxfp4")


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

    dtype: "f32"; "bf16"; or "mxfp4", as published: MXFP4 experts, FP8 matrices with E8M0 scales per block, Engram rows
    in FP8 with a scale for each 32, and bf16 and float32 where published checkpoints have them. dequantized: the values
    of a checkpoint that is not "f32", written as float32 without quantization: its exact twin. shards: how many files
    the tensors are spread over.
    """
    if name not in WRITABLE or dtype not in DTYPES:
        raise RequestError(
            f"weights of {name!r} in {dtype!r} cannot be made: use one of {', '.join(WRITABLE)} in {', '.join(DTYPES)}."
        )
    return write_config(preset(name), directory, dtype, seed, dequantized=dequantized, shards=shards)


def write_config(
    config: dict[str, Any],
    directory: str | Path,
    dtype: str = "f32",
    seed: int = 0,
    *,
    dequantized: bool = False,
    shards: int = 1,
) -> Path:
    """As `write_checkpoint`, for the object of a config.json of a small model."""
    config = {**config, "dtype": "float32" if dtype == "f32" or dequantized else "bfloat16"}
    if dtype == "mxfp4" and not dequantized:
        config |= _quantization(config["model_type"])
    model = from_dict(config)
    expected = expected_tensors(model)
    if model.engram is not None:
        expected[TOKEN_MAP] = ((model.vocab_size,), "ids")

    def stored(names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return _stored(model, {name: expected[name] for name in names}, dtype, seed, dequantized)

    write_files(Path(directory), config, list(expected), shards, stored)
    return Path(directory)


def _quantization(model_type: str) -> dict[str, Any]:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    if model_type == V4:
        fp8 |= {"fmt": "e4m3", "weight_block_size": [128, 128]}  # type: ignore[dict-item]
        return {"quantization_config": fp8, "expert_dtype": "fp4"}
    return {"quantization_config": {**fp8, "weight_block_size": [32, 32], "expert_dtype": "fp4"}}


def _stored(
    model: DeepseekConfig, expected: Expected, dtype: str, seed: int, dequantized: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (shape, kind) in expected.items():
        value = _value(model, name, shape, kind, seed)
        wide = kind in ("mixing", "choice", "ids") or name.endswith(_WIDE)
        if dtype == "mxfp4" and kind in ("linear", "expert", "rows"):
            matrix = _quantized(value, kind, model.scale_block)
            if dequantized:
                yield name, matrix.dequantize()
                continue
            values, scales = matrix.values, matrix.scales
            assert scales is not None
            yield name, values.view(torch.int8) if kind == "expert" else values
            yield f"{name.removesuffix('.weight')}.scale", _e8m0(scales)
        elif dtype == "f32" or wide:
            yield name, value
        else:
            rounded = value.to(torch.bfloat16)
            yield name, rounded.float() if dequantized else rounded


_WIDE = (".ape", "_base", "_scale", ".attn_sink", "gate.bias")  # float32 in published checkpoints


def _quantized(value: torch.Tensor, kind: str, block: int) -> StoredMatrix:
    if kind == "expert":
        return StoredMatrix("mxfp4", *quantize_mxfp4(value))
    if kind == "rows":
        return StoredMatrix("mxfp8", *quantize_mxfp8(value))
    weight, codes = quantize_fp8(value, block, e8m0=True)
    return StoredMatrix("fp8" if block == 128 else f"fp8_{block}", weight, e8m0_values(codes))


def _e8m0(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes, or float32 powers of two, as published checkpoints store them."""
    if scales.dtype == torch.float32:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return scales.view(torch.float8_e8m0fnu)


def _value(model: DeepseekConfig, name: str, shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """A tensor's values: a pure function of model, name, shape and seed."""
    source, leaf = generator(name, seed), name.rsplit(".", 1)[-1]
    if kind == "choice":
        order = torch.rand(shape[0], model.n_routed_experts, generator=source).argsort(-1)
        return order[:, : shape[1]].contiguous()
    if kind == "ids":
        assert model.engram is not None
        return torch.randint(model.engram.compressed_vocab_size, shape, generator=source)
    values = draw(name, shape, seed)
    if leaf == "bias":
        return values * 0.05
    if leaf in ("attn_sink", "ape") or leaf.endswith("_base"):
        return values * 0.5
    if leaf.endswith("_scale"):
        return 1 + values * 0.2
    if len(shape) == 1 or leaf in ("q_weight", "k_weight"):
        return 1 + values * 0.1
    if name == "embed.weight" or kind == "rows":
        return values
    gain = 4.0 if name == "head.weight" else 2.0 if name.endswith("ffn.gate.weight") else 1.0
    return values * (gain / math.sqrt(shape[-1]))
