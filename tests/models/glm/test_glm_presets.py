from __future__ import annotations

import json

import pytest
import torch

from rocmega.checkpoint import INDEX, Checkpoint
from rocmega.errors import RequestError
from rocmega.models.glm.presets import preset, quantize_fp8, write_checkpoint
from rocmega.models.glm.weights import scale_name


def tensors(directory) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def test_the_index_says_where_everything_is(tiny):
    index = json.loads((tiny / INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(tiny).values())


def test_same_seed_same_weights(tiny, tmp_path):
    again = tensors(write_checkpoint("glm-5.2-tiny", tmp_path / "again", shards=1))
    other = tensors(write_checkpoint("glm-5.2-tiny", tmp_path / "other", seed=1))
    for name, tensor in tensors(tiny).items():
        assert torch.equal(again[name], tensor)
        assert not torch.equal(other[name], tensor)


def test_no_value_hides_an_error(tiny):
    """Nothing constant, no zero vector, no two experts alike."""
    seen = set()
    for tensor in tensors(tiny).values():
        assert tensor.std() > 0.01
        seen.add(tuple(tensor.flatten()[:4].tolist()))
    assert len(seen) == len(tensors(tiny))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_dequantized_twins_have_the_same_values(dtype, tiny_checkpoint):
    stored = tensors(tiny_checkpoint("glm-5.2-tiny", dtype))
    twin = tensors(tiny_checkpoint("glm-5.2-tiny", dtype, dequantized=True))
    scales = {name for name in stored if name.endswith("_scale_inv")}
    assert twin.keys() == stored.keys() - scales
    assert bool(scales) == (dtype == "fp8")
    for name, tensor in twin.items():
        assert tensor.dtype == torch.float32
        value = stored[name].float()
        if scale_name(name) in scales:
            rows, columns = (torch.arange(size) // 128 for size in value.shape)
            value = value * stored[scale_name(name)][rows[:, None], columns]
        assert torch.equal(tensor, value)


def test_fp8_keeps_the_islands(tiny_checkpoint):
    stored = tensors(tiny_checkpoint("glm-5.2-tiny", "fp8"))
    quantized = {name.split(".")[-2] for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk"}
    assert quantized == attention | {"gate_proj", "up_proj", "down_proj"}
    biases = [tensor for name, tensor in stored.items() if name.endswith("e_score_correction_bias")]
    assert {tensor.dtype for tensor in biases} == {torch.float32}


def test_quantization_error_is_that_of_e4m3():
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    weight[:, 128:] *= 1e-3
    quantized, scales = quantize_fp8(weight)
    assert scales.shape == (2, 2)
    rows, columns = torch.arange(130) // 128, torch.arange(200) // 128
    error = (quantized.float() * scales[rows[:, None], columns] - weight).abs()
    assert (error <= weight.abs() / 16 + scales[rows[:, None], columns] * 2**-10).all()


def test_unknown_presets_are_refused(tmp_path):
    with pytest.raises(RequestError, match="no preset 'glm-6'"):
        preset("glm-6")
    with pytest.raises(RequestError, match=r"weights of 'glm-5.2' in 'f32' cannot be made"):
        write_checkpoint("glm-5.2", tmp_path)
    with pytest.raises(RequestError, match="in 'int8' cannot be made"):
        write_checkpoint("glm-5.2-tiny", tmp_path, "int8")
    assert not any(tmp_path.iterdir())


def test_presets_are_copies():
    preset("glm-5.2-tiny")["indexer_types"].clear()
    assert len(preset("glm-5.2-tiny")["indexer_types"]) == 8
