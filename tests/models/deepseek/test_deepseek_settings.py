"""Every setting of the models, moved alone: ours moves with the oracle, and would be caught if it did not.

The starting points are small and have settings whose every neighbour shows: long contexts for the rotary embedding
after few tokens, few Sinkhorn rounds, borders within a short prompt.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from rocmega.models.deepseek.presets import preset, v4_config, v41_config, write_config
from tests.models.deepseek.conftest import all_logits, load

DECODED = 4  # the last tokens of the prompt
TOLERANCE = 1e-4
SHOWS = 1e-2  # what a setting must move the logits by, of which the largest is about 10: 100 times the tolerance

_CSA, _HCA, _WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_ROPE = {
    "compress_rope_theta": 100,
    "rope_scaling": {
        "rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 4, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
_SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "hc_sinkhorn_iters": 2,
    "hc_eps": 0.01,
    **_ROPE,
}
_V4 = {"num_hidden_layers": 4, "num_hash_layers": 1, "layer_types": [_WINDOW, _CSA, _HCA, _CSA]}
_V41 = {
    "num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2, 3],
    "index_source_layer_ids": [1, 2, 3, 5], "candidate_source_layer_id": 3, "candidate_topk_blocks": 4,
    "candidate_block_size": 2, "index_topk": 4, "sliding_window": 8,
}  # fmt: skip


def v4(**fields) -> dict[str, Any]:
    return v4_config({**preset("deepseek-v4-flash-tiny"), **_SMALL, **_V4, **fields})


def v41(**fields) -> dict[str, Any]:
    text = {**preset("deepseek-v4.1-flash-tiny")["text_config"], **_SMALL, **_V41, **fields}
    return v41_config({**text, "rms_norm_eps": fields.get("rms_norm_eps", 1e-20)})


def _rope(**fields) -> dict[str, Any]:
    return {"rope_scaling": {**_ROPE["rope_scaling"], **fields}}


BOTH = [
    {"rms_norm_eps": 0.1},
    {"hc_eps": 0.1},
    {"hc_sinkhorn_iters": 3},
    {"hc_mult": 2},
    {"swiglu_limit": 0.5},
    {"routed_scaling_factor": 3.0},
    {"rope_theta": 100},
    {"compress_rope_theta": 1000},
    _rope(factor=16),
    _rope(beta_fast=2),
    _rope(beta_slow=0.25),
    _rope(original_max_position_embeddings=256),
    {"sliding_window": 5},
    {"index_topk": 3},
    {"num_experts_per_tok": 3},
    {"n_routed_experts": 16},
    {"qk_rope_head_dim": 8},
    {"head_dim": 32},
    {"num_attention_heads": 4},
    {"o_groups": 4},
    {"index_n_heads": 32},
    {"index_head_dim": 64},
]
OF_V4 = [
    {"num_hash_layers": 3},
    {"layer_types": [_WINDOW, _HCA, _HCA, _CSA]},
    {"layer_types": [_CSA, _CSA, _HCA, _CSA]},
    {"compress_rates": {_CSA: 8, _HCA: 16}},
    {"compress_rates": {_CSA: 4, _HCA: 8}},
]
OF_V41 = [
    {"compress_ratios": [0, 4, 2, 1, 1, 1]},
    {"kv_source_layer_ids": [1, 3]},
    {"index_source_layer_ids": [1, 2, 3]},
    {"index_source_layer_ids": [1, 2, 3, 4, 5]},
    {"candidate_source_layer_id": -1},
    {"candidate_topk_blocks": 3},
    {"candidate_block_size": 3},
    {"engram_layer_ids": [1]},
    {"engram_layer_ids": [2, 4]},
    {"engram_max_ngram_size": 3},
    {"engram_n_heads": 3},
    {"engram_head_dim": 64},
    {"engram_vocab_size": 50},
    {"engram_compressed_vocab_size": 200},
]


# V4's entries are of up to 16 tokens and select among several of them; V4.1's are of 4 at most, and its oracle takes a
# token at a time, in float64.
TOKENS = {v4: 40, v41: 24}


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    """Ours and the oracle's logits of the prompt's last tokens, for v4 or v41 and some fields; each computed once."""

    @cache
    def run(make, number: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        fields = {} if number is None else SETTINGS[number][1]
        directory = write_config(make(**fields), tmp_path_factory.mktemp("setting"))
        tokens = _tokens(TOKENS[make])
        ours = load(directory).follow("a", tokens[:-DECODED], tokens[-DECODED:].tolist())
        return ours, all_logits(directory, tokens[:-1])[-DECODED:]

    return run


SETTINGS = [*((v4, fields) for fields in BOTH + OF_V4), *((v41, fields) for fields in BOTH + OF_V41)]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda n: f"{SETTINGS[n][0].__name__}-{SETTINGS[n][1]}")
def test_setting(number, logits):
    make, _ = SETTINGS[number]
    ours, expected = logits(make, number)
    assert (ours - expected).abs().max() < TOLERANCE
    unmoved, also = logits(make, None)
    assert (unmoved - also).abs().max() < TOLERANCE
    assert (expected - also).abs().max() > SHOWS


def test_the_token_before_the_first_is_the_padding(tmp_path):
    """Alone, for it shows in the first tokens only."""
    first, other = (write_config(v41(engram_pad_token_id=pad), tmp_path / str(pad)) for pad in (2, 9))
    tokens = _tokens(3)
    rows = [load(directory).follow("a", tokens[:1], tokens.tolist()) for directory in (first, other)]
    for directory, ours in zip((first, other), rows, strict=True):
        assert (ours - all_logits(directory, torch.cat([tokens[:1], tokens[:2]]))).abs().max() < TOLERANCE
    assert (rows[0] - rows[1]).abs().max() > SHOWS
