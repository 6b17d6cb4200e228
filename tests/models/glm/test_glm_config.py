from __future__ import annotations

import json

import pytest

from rocmega import registry
from rocmega.errors import ConfigError
from rocmega.models.glm.config import from_dict, from_dir
from rocmega.models.glm.presets import PRESETS, preset

FULL_52 = [0, 1, 2, *range(6, 78, 4)]


def changed(name: str = "glm-5.2-tiny", /, **fields) -> dict:
    """A preset with fields replaced, or removed where they are ...."""
    config = {**preset(name), **fields}
    return {field: value for field, value in config.items() if value is not ...}


def test_published_models():
    glm5, glm52 = from_dict(preset("glm-5")), from_dict(preset("glm-5.2"))
    assert glm5.full_index == (True,) * 78
    assert [layer for layer, full in enumerate(glm52.full_index) if full] == FULL_52
    assert glm52.dense_layers == (True,) * 3 + (False,) * 75
    assert (glm5.rope_theta, glm52.rope_theta) == (1e6, 8e6)
    assert glm52.softmax_scale == 1 / 16
    assert (glm52.latent_dim, glm52.qk_head_dim) == (576, 256)
    assert (glm52.rms_norm_eps, glm52.latent_norm_eps, glm52.index_norm_eps) == (1e-5, 1e-6, 1e-6)
    assert glm52.eos_token_ids == (154820, 154827, 154829)
    assert not glm52.quantized


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model_we_run(name):
    assert from_dict(preset(name)).num_hidden_layers == PRESETS[name]["num_hidden_layers"]


SAME = [
    {"rope_parameters": ..., "rope_theta": 8000000.0},
    {"rope_parameters": ..., "rope_theta": 8e6, "rope_scaling": {"type": "default"}},
    {"rope_theta": 8000000, "rope_scaling": None},
    {"indexer_types": ..., "index_topk_freq": 4, "index_skip_topk_offset": 3},
    {"indexer_types": ..., "index_topk_pattern": "FFFSSSFS"},
    {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None},
    {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "first_k_dense_replace": ...},
    {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5},
    {"layer_types": ["deepseek_sparse_attention"] * 8},
    {"layer_types": ["indexed_attention"] * 8},
    {"head_dim": 192, "torch_dtype": "bfloat16", "index_share_for_mtp_iteration": True, "num_nextn_predict_layers": 0},
    {"n_routed_experts": ..., "num_local_experts": 16},
    {"something_new": None},
]


@pytest.mark.parametrize("fields", SAME)
def test_other_spellings_of_the_same_model(fields):
    assert from_dict(changed(**fields)) == from_dict(preset("glm-5.2-tiny"))


REFUSED = [
    ({"n_group": 8}, "n_group is 8 and only 1"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
    ({"topk_group": 4}, "topk_group is 4"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax' and only 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"),
    ({"attention_bias": 0}, "attention_bias is 0"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"rope_interleave": False}, "rope_interleave"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False and only True"),
    ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ({"model_type": "deepseek_v32"}, "model_type is 'deepseek_v32'"),
    ({"model_type": ...}, "model_type is missing"),
    ({"rope_parameters": ...}, "rope_theta is missing"),
    ({"rope_theta": 1e6}, "rope_theta differ: rope_theta 1000000.0, rope_parameters.rope_theta 8000000.0"),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, "'yarn' and only 'default'"),
    ({"rope_parameters": {"rope_theta": 1e6, "factor": 4.0}}, "rope_parameters.factor is not known"),
    ({"rope_parameters": 3}, "rope_parameters is 3, not an object"),
    ({"rope_parameters": {"rope_theta": "big"}}, "not a number above 1"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type is 'linear'"),
    ({"indexer_types": ["full"] * 7}, "indexer_types has 7 entries for 8 layers"),
    ({"indexer_types": ["shared"] + ["full"] * 7}, "the first layer shares a selection"),
    ({"indexer_types": ["full"] * 7 + ["none"]}, "indexer_types may hold only 'full', 'shared'"),
    ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "indexer_types and index_topk_freq .* different layers"),
    ({"index_topk_pattern": "FFFFFFFF"}, "indexer_types and index_topk_pattern describe different layers"),
    ({"index_topk_freq": 0}, "is no schedule"),
    ({"mlp_layer_types": ["dense"] * 8}, "mlp_layer_types and first_k_dense_replace describe different layers"),
    ({"mlp_layer_types": ["dense"] * 9}, "mlp_layer_types has 9 entries"),
    ({"mlp_layer_types": 7}, "mlp_layer_types may hold only"),
    ({"first_k_dense_replace": ...}, "both missing"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ({"layer_types": ["linear_attention"] * 8}, "layer_types may hold only"),
    ({"layer_types": ["indexed_attention"] * 9}, "layer_types has 9 entries"),
    ({"num_key_value_heads": 1}, "num_key_value_heads is 1, which contradicts .* 4"),
    ({"qk_head_dim": 64}, "qk_head_dim is 64, which contradicts"),
    ({"num_local_experts": 8}, "num_local_experts is 8, which contradicts"),
    ({"hidden_size": 0}, "hidden_size is 0, not a sensible positive integer"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"hidden_size": "256"}, "hidden_size is '256'"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    ({"kv_lora_rank": ...}, "kv_lora_rank is missing"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"routed_scaling_factor": ...}, "routed_scaling_factor is missing"),
    ({"qk_rope_head_dim": 31, "qk_head_dim": 79}, "qk_rope_head_dim 31 is odd"),
    ({"qk_rope_head_dim": 128, "qk_head_dim": 176}, "more than index_head_dim"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than there are experts, 16"),
    ({"eos_token_id": "stop"}, "eos_token_id is 'stop'"),
    ({"swiglu_limit": 10.0}, "swiglu_limit is not a field known"),
    ({"sliding_window": 128}, "sliding_window is not a field known"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quant_method is 'compressed-tensors'"),
    ({"quantization_config": 8}, "quantization_config is 8"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is missing"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}},
        r"weight_block_size is \[64, 128\]",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}},
        "fmt is 'e5m2'",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}},
        "quantization_config.scale_fmt is not known",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_would_change_the_mathematics_is_refused(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        from_dict(changed(**fields))


def test_all_reasons_at_once():
    with pytest.raises(ConfigError) as caught:
        from_dict(changed(n_group=8, hidden_act="gelu", swiglu_limit=1.0, hidden_size=..., indexer_types=["full"]))
    for reason in (
        "5 reasons",
        "n_group",
        "hidden_act",
        "swiglu_limit",
        "hidden_size is missing",
        "indexer_types has 1",
    ):
        assert reason in str(caught.value)


def test_fp8_is_recognized(tiny_checkpoint):
    assert from_dir(tiny_checkpoint("glm-5.2-tiny", "fp8")).quantized
    assert not from_dir(tiny_checkpoint("glm-5.2-tiny", "bf16")).quantized


@pytest.mark.parametrize("differences", [True, False])
@pytest.mark.parametrize("name", ["glm-5-tiny", "glm-5.2-tiny", "glm-5.2"])
def test_what_transformers_writes_is_the_same_model(name, differences):
    transformers = pytest.importorskip("transformers", minversion="5.7.0")
    written = transformers.GlmMoeDsaConfig(**preset(name)).to_json_string(use_diff=differences)
    assert from_dict(json.loads(written)) == from_dict(preset(name))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_damaged_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json is not a JSON object"):
        from_dir(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json cannot be read \(No such file"):
        from_dir(tmp_path)


def test_registry(tmp_path, tiny):
    assert registry.load_config(tiny) == from_dir(tiny)
    assert registry.family_module("glm_moe_dsa", "config").from_dir is from_dir
    for model_type in ("llama", None, ["glm_moe_dsa"]):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match=r"not supported; known types: .*, glm_moe_dsa"):
            registry.load_config(tmp_path)


# Quark.

MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": MXFP4, "input_tensors": {**MXFP4, "is_dynamic": True}, "bias": None},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head", "*self_attn*", "*mlp.gate"],
    "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
    "quant_mode": "eager_mode",
    "version": "0.11.1",
}


def test_quark_is_read():
    assert from_dict(changed(quantization_config=QUARK)).quantization == "quark"
    fp8 = {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}}}
    config = from_dict(changed(quantization_config={**QUARK, "layer_quant_config": fp8}))
    assert config.quantization == "quark"
    assert config.quantized


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_quant_config": None}, "global_quant_config has weights of another kind"),
        ({"global_quant_config": {"weight": {**MXFP4, "group_size": 16}}}, "another kind than MXFP4"),
        ({"global_quant_config": {"weight": [MXFP4, MXFP4]}}, "another kind than MXFP4"),
        (
            {"layer_quant_config": {"*attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}},
            r"layer_quant_config.\*attn\* has weights of another kind",
        ),
        ({"export": {"weight_format": "fake_quantized"}}, "fake_quantized"),
        ({"rotation": True}, "quantization_config.rotation is not known"),
    ],
)
def test_other_quark_schemes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(changed(quantization_config={**QUARK, **changes}))
