"""What the kernel's tiles ask of a model's dimensions, said before anything is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocmega.errors import ConfigError
from rocmega.models.glm import config, kernel, presets

TINY = config.from_dict(presets.preset("glm-5.2-tiny"))


def test_the_presets_fit():
    for name in ("glm-5-tiny", "glm-5.2-tiny", "glm-5.2"):
        kernel.Shape.of(config.from_dict(presets.preset(name)))
    assert kernel.Shape.of(TINY, 2).heads == TINY.num_attention_heads // 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 264}, "hidden_size 264 is not a multiple of 16"),
        ({"index_head_dim": 48}, "index_head_dim 48 is not a multiple of 32"),
        ({"kv_lora_rank": 32}, r"kv_lora_rank \+ rope 64 is less than 96"),
        ({"n_routed_experts": 272}, "n_routed_experts 272 is more than 256"),
        ({"num_experts_per_tok": 15}, "num_experts_per_tok 15 is more than 14"),
    ],
)
def test_dimensions_that_no_tile_fits_are_named(changes, reason):
    with pytest.raises(ConfigError, match=rf"cannot run this model: .*{reason}.* standard path"):
        kernel.Shape.of(replace(TINY, **changes))


def test_all_reasons_are_named_and_ranks_that_do_not_divide():
    with pytest.raises(ConfigError, match=r"num_attention_heads \d+ is not divisible by 3 ranks.*; .*vocab_size"):
        kernel.Shape.of(TINY, 3)
