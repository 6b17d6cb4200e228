"""Which activations weights may meet; and f32: every number of a quantized checkpoint as published, none rounded."""

from __future__ import annotations

import copy

import pytest
import torch

from rocmega.errors import ConfigError, RequestError
from rocmega.models.glm import config, kernel, presets
from rocmega.models.glm.activations import choose
from rocmega.models.glm.published import Formats
from tests.models.glm.conftest import Model

# Sums of up to 1,056 products in another order than transformers' are 1e-6 off; eight layers make that 2e-5 of logits
# whose standard deviation is 4.
EXACT = 1e-4


@pytest.mark.parametrize("dtype", ["fp8", "mxfp4"])
def test_64_greedy_tokens_equal_transformers_on_the_dequantized_values(dtype, packed, server, reference, prompt):
    """From several shards, by both paths."""
    tokens, logits = reference("glm-5.2-tiny", dtype, dequantized=True)
    standard = Model(*packed("glm-5.2-tiny", dtype, activations="f32"))
    ours, rows = standard.greedy("a", prompt, len(tokens))
    assert ours == tokens
    assert (rows - logits).abs().max() < EXACT
    mega = server("glm-5.2-tiny", dtype, activations="f32")
    mega.begin("a", prompt)
    for _ in tokens[1:]:
        mega.step("a")
    assert mega.tokens["a"] == tokens
    assert (torch.stack(mega.logits["a"]) - logits).abs().max() < EXACT


@pytest.mark.parametrize("field", ["q_a", "gate_up"])
def test_a_shifted_block_of_scales_is_noticed(field, packed, reference, prompt):
    """The comparison above sees one layer's scales one block further on: FP8 in q_a, E8M0 in gate_up."""
    _, logits = reference("glm-5.2-tiny", "mxfp4", dequantized=True)
    config, weights = packed("glm-5.2-tiny", "mxfp4", activations="f32")
    layers = [dict(layer) for layer in weights.layers]
    matrix = copy.copy(layers[5][field])
    object.__setattr__(matrix, "scales", matrix.scales.roll(1, dims=2))
    layers[5][field] = matrix
    shifted = copy.copy(weights)
    object.__setattr__(shifted, "layers", layers)
    assert (Model(config, shifted).prefill("a", prompt) - logits[0]).abs().max() > 100 * EXACT


@pytest.mark.parametrize(
    ("formats", "asked", "chosen"),
    [
        (Formats("f32", "f32"), "auto", "f32"),
        (Formats("f32", "f32"), "f32", "f32"),
        (Formats("bf16", "bf16"), "auto", "bf16"),
        (Formats("fp8", "bf16"), "auto", "bf16"),
        (Formats("fp8", "bf16", absorbed="f32"), "auto", "f32"),
        (Formats("fp8_fnuz", "bf16", "mxfp4"), "fp8", "fp8"),
        (Formats("bf16", "bf16", "mxfp4"), "fp8", "fp8"),
    ],
)
def test_choice(formats, asked, chosen):
    assert choose(formats, asked) == chosen


@pytest.mark.parametrize(
    ("formats", "asked", "message"),
    [
        (Formats("fp8", "bf16"), "int8", "choose one of auto, f32, bf16, fp8"),
        (Formats("f32", "f32"), "bf16", "this checkpoint is float32"),
        (Formats("fp8", "bf16"), "f32", "this pack has them in bf16. Load the checkpoint itself"),
        (Formats("fp8", "bf16", absorbed="f32"), "fp8", "packed for f32 activations"),
        (Formats("bf16", "bf16"), "fp8", "for quantized weights, FP8 or MXFP4, and these are bf16"),
    ],
)
def test_refusals(formats, asked, message):
    with pytest.raises(RequestError, match=message):
        choose(formats, asked)


def test_models_whose_exact_activations_do_not_fit_are_refused():
    glm = config.from_dict(presets.preset("glm-5.2"))
    formats = Formats("fp8", "bf16", absorbed="f32")
    for target in ("host", "gfx942"):
        with pytest.raises(ConfigError, match=r"entries would take 28864 words of 15040\. Use"):
            kernel.unit(glm, formats, target)
    for target in ("gfx950", "sm_90"):
        assert "using Linear = Fp8Wide<false>" in kernel.unit(glm, formats, target, tp=8).headers["model_config.h"]
