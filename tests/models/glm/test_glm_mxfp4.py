"""Checkpoints with MXFP4 experts, as AMD Quark writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rocmega.checkpoint import INDEX, Checkpoint
from rocmega.checkpoint.layouts import read_matrix
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import CheckpointError
from rocmega.models.glm.config import from_dir
from rocmega.models.glm.weights import Formats, check, pack

EXPERT = "model.layers.4.mlp.experts.7.gate_proj.weight"
SHARED = "model.layers.4.mlp.shared_experts.down_proj.weight"


def test_its_exact_twin_has_the_same_values(tiny_checkpoint):
    stored = Checkpoint(tiny_checkpoint("glm-5.2-tiny", "mxfp4"))
    twin = Checkpoint(tiny_checkpoint("glm-5.2-tiny", "mxfp4", dequantized=True))
    scales = {name for name in stored.names() if name.endswith(("_scale", "_scale_inv"))}
    assert set(twin.names()) == set(stored.names()) - scales
    kinds = set()
    for name in twin.names():
        kinds.add(stored.dtype(name))
        if stored.dtype(name) in (torch.uint8, torch.float8_e4m3fn):
            assert torch.equal(read_matrix(stored, name).dequantize(), twin.tensor(name))
        else:
            assert torch.equal(stored.tensor(name).float(), twin.tensor(name))
    assert kinds == {torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32}


def test_packed_values_are_the_twins(packed):
    config, weights = packed("glm-5.2-tiny", "mxfp4")
    _, twin = packed("glm-5.2-tiny", "mxfp4", dequantized=True)
    assert weights.formats == Formats("fp8", "bf16", "mxfp4", "fp8")
    assert weights.formats.label == "fp8+mxfp4"
    assert twin.formats == Formats("f32", "f32")
    for number, (fields, expected) in enumerate(zip(weights.layers, twin.layers, strict=True)):
        for name, field in fields.items():
            if not isinstance(field, PackedMatrix):
                assert torch.equal(field, expected[name])
                continue
            wanted = expected[name].dequantize()
            if field.format == "bf16":
                wanted = wanted.bfloat16().float()
            assert torch.equal(field.dequantize(), wanted), (number, name)
        assert fields["gate_up"].format == ("fp8" if config.dense_layers[number] else "mxfp4")


@pytest.fixture
def altered(tiny_checkpoint, tmp_path):
    """altered(changes): the checkpoint with tensors replaced, or removed where None."""

    def write(changes: dict[str, torch.Tensor | None]) -> Path:
        directory = Path(shutil.copytree(tiny_checkpoint("glm-5.2-tiny", "mxfp4"), tmp_path / "checkpoint"))
        index = json.loads((directory / INDEX).read_text())
        for file in {index["weight_map"][name] for name in changes}:
            with safe_open(directory / file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
            tensors.update({name: changes.get(name, tensor) for name, tensor in tensors.items()})
            save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / file)
        for name, tensor in changes.items():
            if tensor is None:
                del index["weight_map"][name]
        (directory / INDEX).write_text(json.dumps(index))
        return directory

    return write


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{EXPERT}_scale": None}, f"tensor {EXPERT}_scale, the scales of an MXFP4 weight in .*, is missing"),
        (
            {f"{EXPERT}_scale": torch.ones(128, 4, dtype=torch.uint8)},
            r"_scale in .* is torch.uint8 \[128, 4\], not E8M0",
        ),
        ({EXPERT: torch.ones(128, 64, dtype=torch.uint8)}, rf"{EXPERT} in .* is \[128, 64\], not \[128, 256\]"),
        # As in amd/GLM-5-MXFP4, whose shared experts stay bf16: one stage reads all experts of a layer.
        ({SHARED: bf16(256, 128), f"{SHARED}_scale": None}, "the experts, the shared one among them, are of different"),
    ],
)
def test_what_does_not_fit(changes, message, altered):
    directory = altered(changes)
    with pytest.raises(CheckpointError, match=message):
        check(Checkpoint(directory), from_dir(directory))


def test_a_nan_scale_is_named(altered, tiny_checkpoint):
    scales = Checkpoint(tiny_checkpoint("glm-5.2-tiny", "mxfp4")).read(f"{EXPERT}_scale")
    scales[3, 3] = 255
    directory = altered({f"{EXPERT}_scale": scales})
    with pytest.raises(CheckpointError, match=f"{EXPERT}_scale holds a NaN, E8M0 byte 255"):
        pack(Checkpoint(directory), from_dir(directory))


def test_mxfp4_that_config_json_does_not_announce(altered):
    directory = altered({})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is MXFP4, though config.json says that weights are FP8"):
        check(Checkpoint(directory), from_dir(directory))


def test_bf16_with_mxfp4_experts_is_fine(tiny_checkpoint, tmp_path):
    """As in amd/GLM-5.2-MXFP4: attention in bf16, experts and here the dense layers in MXFP4."""
    from rocmega.checkpoint.quantize import quantize_mxfp4

    source = Checkpoint(tiny_checkpoint("glm-5.2-tiny", "bf16"))
    tensors = {}
    for name in source.names():
        if ".mlp." in name and name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale"] = quantize_mxfp4(source.read(name).float())
        else:
            tensors[name] = source.read(name)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tiny_checkpoint("glm-5.2-tiny", "mxfp4") / "config.json").read_text())
    scheme = config["quantization_config"]["global_quant_config"]
    config["quantization_config"] = {"quant_method": "quark", "global_quant_config": scheme, "exclude": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = pack(Checkpoint(tmp_path), from_dir(tmp_path))
    assert weights.formats == Formats("bf16", "bf16", "mxfp4", "mxfp4")
    assert weights.formats.label == "bf16+mxfp4/mxfp4"
    assert weights.formats.absorbed == "bf16"
