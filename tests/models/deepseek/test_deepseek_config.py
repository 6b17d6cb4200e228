from __future__ import annotations

import json

import pytest

from rocmega import registry
from rocmega.errors import ConfigError
from rocmega.models.deepseek.config import Candidates, Compressed, Yarn, from_dict, from_dir
from rocmega.models.deepseek.presets import PRESETS, preset


def changed(name: str, /, **fields) -> dict:
    """A preset with fields of its language model replaced, or removed where they are ...."""
    config = preset(name)
    text = config.get("text_config", config)
    text.update(fields)
    for field in [field for field, value in text.items() if value is ...]:
        del text[field]
    return config


def test_published_v4():
    c = from_dict(preset("deepseek-v4-flash"))
    assert [layer for layer, kind in enumerate(c.compressed) if kind is None] == [0, 1]
    assert c.compressed[2] == Compressed(4, 2, 2, overlap=True)
    assert c.compressed[3] == Compressed(128, 3, None)
    assert sum(map(c.selects, range(43))) == 21
    assert c.hash_layers == (True,) * 3 + (False,) * 40
    assert c.yarn == Yarn(16, 32, 1, 65536)
    assert (c.head_norm, c.delayed, c.keys_from_latent, c.mixes, c.scale_block) == (True, False, False, 24, 128)
    assert c.eos_token_ids == (1,)


def test_published_v41():
    c = from_dict(preset("deepseek-v4.1-flash"))
    sources = sorted({kind.source for kind in c.compressed if kind})
    assert sources == [2, 8, 14, 20]
    assert sorted({kind.selector for kind in c.compressed if kind}) == [2, 8, 14, 20, 24, 28, 32, 36]
    assert c.compressed[13] == Compressed(2, 8, 8)
    assert c.compressed[39] == Compressed(1, 20, 36, gated=False)
    assert c.candidates == Candidates(20, 2048, 8)
    assert (c.head_norm, c.delayed, c.keys_from_latent, c.scale_block) == (False, True, True, 32)
    assert c.engram is not None
    assert c.engram.rows == (384006168, 384016682)  # as published: derived here from the primes
    assert c.engram.columns == 24


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model_we_run(name):
    raw = preset(name)
    assert from_dict(raw).num_hidden_layers == raw.get("text_config", raw)["num_hidden_layers"]


DRAFT = {"dspark_block_size": 5, "dspark_target_layer_ids": [37, 38, 39], "num_nextn_predict_layers": 3}
NESTED = {
    "main": {"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 0.25},
    "compress": {
        "rope_theta": 160000, "rope_type": "yarn", "type": "yarn", "attention_factor": 1.0, "beta_fast": 32,
        "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
SAME = [
    ("deepseek-v4-flash-tiny", DRAFT),
    ("deepseek-v4-flash-tiny", {"rope_scaling": ..., "rope_parameters": NESTED}),
    ("deepseek-v4-flash-tiny", {"rope_parameters": NESTED}),
    ("deepseek-v4-flash-tiny", {"qk_rope_head_dim": ..., "partial_rotary_factor": 0.25}),
    ("deepseek-v4-flash-tiny", {"num_hash_layers": ..., "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3}),
    ("deepseek-v4-flash-tiny", {"compress_rates": ..., "compress_rate_csa": 4, "compress_rate_hca": 16}),
    ("deepseek-v4-flash-tiny", {"expert_dtype": "fp4", "num_local_experts": 16, "something_new": None}),
    ("deepseek-v4-flash", {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0], **DRAFT}),
    ("deepseek-v4.1-flash-tiny", {"compress_ratios": [0] * 2 + [2] * 4 + [1] * 6 + [0] * 3, **DRAFT}),
    ("deepseek-v4.1-flash-tiny", {"engram_num_embeddings": ...}),
]


@pytest.mark.parametrize(("name", "fields"), SAME)
def test_other_spellings_of_the_same_model(name, fields):
    assert from_dict(changed(name, **fields)) == from_dict(preset(name))


def test_what_lies_beside_the_language_model():
    plain = preset("deepseek-v4.1-flash-tiny")
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    outer = {"vision_config": {"patch_size": 14}, "image_token_id": 5, "dtype": "bfloat16", "eos_token_id": [1, 2]}
    config = from_dict({**plain, **outer, "quantization_config": quantization})
    assert config.quantized
    assert config.eos_token_ids == (1, 2)


REFUSED = [
    ("deepseek-v4-flash-tiny", {"n_shared_experts": 2}, "n_shared_experts is 2 and only 1"),
    ("deepseek-v4-flash-tiny", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ("deepseek-v4-flash-tiny", {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
    ("deepseek-v4-flash-tiny", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("deepseek-v4-flash-tiny", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("deepseek-v4-flash-tiny", {"kv_lora_rank": 512}, "kv_lora_rank is not a field known"),
    ("deepseek-v4-flash-tiny", {"kv_source_layer_ids": [2]}, "kv_source_layer_ids is not a field known"),
    ("deepseek-v4-flash-tiny", {"swiglu_limit": ...}, "swiglu_limit is missing"),
    ("deepseek-v4-flash-tiny", {"hc_eps": 0}, "hc_eps is 0, not a positive number"),
    ("deepseek-v4-flash-tiny", {"o_groups": 3}, "num_attention_heads 8 are not evenly in o_groups 3"),
    ("deepseek-v4-flash-tiny", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15, not an even number"),
    ("deepseek-v4-flash-tiny", {"qk_rope_head_dim": 48}, "more than index_head_dim 32"),
    ("deepseek-v4-flash-tiny", {"partial_rotary_factor": 0.5}, "contradicts qk_rope_head_dim 16"),
    ("deepseek-v4-flash-tiny", {"num_experts_per_tok": 17}, "more than there are experts, 16"),
    ("deepseek-v4-flash-tiny", {"num_local_experts": 8}, "num_local_experts is 8, which contradicts"),
    ("deepseek-v4-flash-tiny", {"layer_types": ...}, "layer_types and compress_ratios are both missing"),
    ("deepseek-v4-flash-tiny", {"layer_types": ["sliding_attention"] * 5}, "layer_types has 5 entries for 6"),
    ("deepseek-v4-flash-tiny", {"layer_types": ["full_attention"] * 6}, "layer_types may hold only"),
    (
        "deepseek-v4-flash-tiny",
        {"compress_ratios": [0, 0, 4, 4, 4, 4]},
        "layer_types and compress_ratios describe different",
    ),
    ("deepseek-v4-flash-tiny", {"compress_ratios": [0, 0, 4, 16, 4, 16]}, "compress_ratios may hold only 0, 4, 128"),
    ("deepseek-v4-flash-tiny", {"compress_rates": {"other": 3}}, "compress_rates is"),
    ("deepseek-v4-flash-tiny", {"compress_rate_hca": 128}, "compress_rate_hca 128 and compress_rates differ"),
    (
        "deepseek-v4-flash-tiny",
        {"compress_rates": {"heavily_compressed_attention": 24}},
        r"ratios \[24\] neither divide",
    ),
    ("deepseek-v4-flash-tiny", {"num_hash_layers": ...}, "mlp_layer_types and num_hash_layers are both missing"),
    (
        "deepseek-v4-flash-tiny",
        {"mlp_layer_types": ["moe"] * 6},
        "mlp_layer_types and num_hash_layers describe different",
    ),
    ("deepseek-v4-flash-tiny", {"rope_scaling": ...}, "rope_scaling is missing"),
    ("deepseek-v4-flash-tiny", {"rope_scaling": {"type": "linear", "factor": 2}}, "no rope_type 'yarn'"),
    ("deepseek-v4-flash-tiny", {"rope_parameters": {**NESTED, "main": {"rope_theta": 5}}}, "main.rope_theta is 5"),
    (
        "deepseek-v4-flash-tiny",
        {"rope_parameters": {**NESTED, "compress": {**NESTED["compress"], "factor": 4}}},
        "rope_scaling and rope_parameters.compress differ",
    ),
    (
        "deepseek-v4-flash-tiny",
        {"rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "mscale": 1.0}},
        "rope_scaling.mscale is not known .* rope_scaling.beta_slow is None",
    ),
    ("deepseek-v4-flash-tiny", {"expert_dtype": "int4"}, "expert_dtype is 'int4'"),
    ("deepseek-v4-flash-tiny", {"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
    (
        "deepseek-v4-flash-tiny",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        r"weight_block_size is \[32, 32\] and only \[128, 128\]",
    ),
    (
        "deepseek-v4.1-flash-tiny",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        r"weight_block_size is \[128, 128\] and only \[32, 32\]",
    ),
    ("deepseek-v4.1-flash-tiny", {"num_hash_layers": 3}, "num_hash_layers is not a field known"),
    ("deepseek-v4.1-flash-tiny", {"compress_ratios": [0, 2]}, "compress_ratios has 2 entries for 12 layers"),
    ("deepseek-v4.1-flash-tiny", {"compress_ratios": [0] * 2 + [2] * 10 + [1]}, "more may be only zeros"),
    ("deepseek-v4.1-flash-tiny", {"kv_source_layer_ids": [2, 99]}, "not a list of layers below 12"),
    ("deepseek-v4.1-flash-tiny", {"kv_source_layer_ids": [6, 2, 4]}, "not in ascending order"),
    ("deepseek-v4.1-flash-tiny", {"kv_source_layer_ids": [4, 6]}, "layer 2 has ratio 2 and there is no entries"),
    (
        "deepseek-v4.1-flash-tiny",
        {"kv_source_layer_ids": [0, 2, 4, 6]},
        "has layer 0, whose compress_ratios entry is 0",
    ),
    ("deepseek-v4.1-flash-tiny", {"kv_source_layer_ids": [2, 4]}, "layer 6 has ratio 1 and reads entries of ratio 2"),
    ("deepseek-v4.1-flash-tiny", {"index_source_layer_ids": [2, 6, 8, 10]}, "no selection from the entries of layer 4"),
    ("deepseek-v4.1-flash-tiny", {"candidate_source_layer_id": 7}, "candidate_source_layer_id 7 is not one of"),
    ("deepseek-v4.1-flash-tiny", {"candidate_source_layer_id": 4}, "bind selections from other entries"),
    ("deepseek-v4.1-flash-tiny", {"candidate_block_size": ...}, "candidate_block_size is missing"),
    ("deepseek-v4.1-flash-tiny", {"engram_n_heads": ...}, "engram_n_heads is missing"),
    (
        "deepseek-v4.1-flash-tiny",
        {"engram_num_embeddings": [5, 6]},
        r"engram_num_embeddings is \[5, 6\], and the other",
    ),
    ("deepseek-v4.1-flash-tiny", {"engram_pad_token_id": 512}, "engram_pad_token_id is 512, not a token"),
    ("deepseek-v4.1-flash-tiny", {"engram_max_ngram_size": 1}, "no n-grams"),
    ("deepseek-v4.1-flash-tiny", {"model_type": "other"}, "model_type is 'other'"),
]


@pytest.mark.parametrize(("name", "fields", "reason"), REFUSED)
def test_what_would_change_the_mathematics_is_refused(name, fields, reason):
    with pytest.raises(ConfigError, match=reason):
        from_dict(changed(name, **fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text_config": 3}, "text_config is 3, not an object"),
        ({"text_config": None}, "text_config is missing"),
        ({"rope_theta": 7}, "rope_theta is not a field known"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ],
)
def test_what_is_wrong_beside_the_language_model(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        from_dict({**preset("deepseek-v4.1-flash-tiny"), **fields})


def test_all_reasons_at_once():
    with pytest.raises(ConfigError) as caught:
        from_dict(
            changed("deepseek-v4-flash-tiny", hidden_act="gelu", mscale=1.0, hidden_size=..., layer_types=["moe"])
        )
    for reason in ("4 reasons", "hidden_act", "mscale", "hidden_size is missing", "layer_types may hold only"):
        assert reason in str(caught.value)


@pytest.mark.parametrize("differences", [True, False])
@pytest.mark.parametrize("name", ["deepseek-v4-flash-tiny", "deepseek-v4-flash"])
def test_what_transformers_writes_is_the_same_model(name, differences):
    transformers = pytest.importorskip("transformers", minversion="5.8.0")
    written = transformers.DeepseekV4Config(**preset(name)).to_json_string(use_diff=differences)
    assert from_dict(json.loads(written)) == from_dict(preset(name))


def test_registry(tiny_checkpoint):
    for name, model_type in (("deepseek-v4-flash-tiny", "deepseek_v4"), ("deepseek-v4.1-flash-tiny", "deepseek_v41")):
        directory = tiny_checkpoint(name)
        assert registry.load_config(directory) == from_dir(directory)
        assert registry.presets_of(name).preset(name)["model_type"] == model_type
