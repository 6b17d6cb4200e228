"""Published tensors: which belong to a model, how they are stored, and what packs make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocmega.checkpoint import INDEX, Checkpoint
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import CheckpointError, ConfigError
from rocmega.models.common.weights import carry_out
from rocmega.models.deepseek.config import from_dict, from_dir
from rocmega.models.deepseek.presets import preset, write_checkpoint
from rocmega.models.deepseek.published import QUANTIZABLE, Formats, layer_tensors, named_formats, published_formats
from rocmega.models.deepseek.weights import assemble, check, expected_tensors, plan, plan_of
from rocmega.packing import open_pack, pack_checkpoint
from tests.models.deepseek.conftest import FAMILIES, Model, load


@pytest.mark.parametrize(
    ("name", "dtype", "formats"),
    [
        ("deepseek-v4-flash-tiny", "f32", Formats("f32", "f32")),
        ("deepseek-v4-flash-tiny", "bf16", Formats("bf16", "bf16")),
        ("deepseek-v4-flash-tiny", "mxfp4", Formats("fp8", "bf16", "mxfp4")),
        ("deepseek-v4.1-flash-tiny", "f32", Formats("f32", "f32", table="f32")),
        ("deepseek-v4.1-flash-tiny", "mxfp4", Formats("fp8_32", "bf16", "mxfp4", "mxfp8")),
    ],
)
def test_formats(name, dtype, formats, tiny_checkpoint):
    directory = tiny_checkpoint(name, dtype)
    assert check(Checkpoint(directory), from_dir(directory)) == formats
    assert named_formats(from_dir(directory), dtype) == formats
    assert formats.cache == ("f32" if dtype == "f32" else "bf16")


def test_what_is_published():
    """Counts and shapes of tensors that are known of the published checkpoints' headers."""
    v4, v41 = (from_dict(preset(name)) for name in ("deepseek-v4-flash", "deepseek-v4.1-flash"))
    counts = [_tensors(v41, layer) for layer in range(40)]
    plain = 2334
    assert counts[0] == counts[3] == plain
    assert [counts[layer] - plain for layer in (1, 2, 8, 14, 20, 24, 36)] == [6, 8, 8, 6 + 8, 7, 3, 3]
    assert published_formats(v4).label == "fp8+mxfp4"
    assert published_formats(v41).label == "fp8_32+mxfp4"
    shapes = expected_tensors(v41)
    assert shapes["layers.14.engram.embed.weight"][0] == (384016682, 256)
    assert shapes["layers.1.engram.wkv.weight"][0] == (25600, 6144)
    assert "layers.20.attn.compressor.wgate.weight" not in shapes
    assert shapes["layers.24.attn.indexer.wq_b.weight"][0] == (4096, 1280)
    shapes = expected_tensors(v4)
    assert shapes["layers.3.attn.compressor.ape"][0] == (128, 512)
    assert shapes["layers.2.attn.indexer.compressor.wkv.weight"][0] == (256, 4096)
    assert shapes["layers.2.ffn.gate.tid2eid"][0] == (129280, 6)
    assert "layers.2.ffn.gate.bias" not in shapes


def _tensors(config, layer: int) -> int:
    """Of a V4.1 layer as published: scales, and the routing bias of image tokens, are counted there."""
    kinds = [kind for _, kind in layer_tensors(config, layer).values()]
    return len(kinds) + sum(kind in QUANTIZABLE for kind in kinds) + 1


def rewrite(directory: Path, change) -> Path:
    """A checkpoint of one file, with its dict of tensors changed."""
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def small(name: str, directory: Path, dtype: str = "mxfp4") -> Path:
    return write_checkpoint(name, directory, dtype, shards=1)


def _set(name, value):
    return lambda tensors: tensors.update({name: value})


FAULTS = [
    ("deepseek-v4-flash-tiny", lambda t: t.pop("hc_head_fn"), "tensor hc_head_fn is missing"),
    (
        "deepseek-v4-flash-tiny",
        lambda t: t.pop("layers.2.attn.compressor.ape"),
        "layers.2.attn.compressor.ape is missing",
    ),
    ("deepseek-v4-flash-tiny", lambda t: t.pop("layers.3.attn.wkv.scale"), "scales of an FP8 weight .* is missing"),
    ("deepseek-v4-flash-tiny", _set("layers.0.attn.attn_sink", torch.ones(9)), r"is \[9\], not \[8\]"),
    ("deepseek-v4-flash-tiny", _set("layers.0.ffn.gate.tid2eid", torch.ones(512, 4)), "not whole numbers"),
    ("deepseek-v4-flash-tiny", _set("layers.0.ffn.gate.bias", torch.ones(16)), "layers.0.ffn.gate.bias is not part"),
    ("deepseek-v4-flash-tiny", _set("layers.1.attn.wq_b.bias", torch.ones(512)), "wq_b.bias is not part of the model"),
    (
        "deepseek-v4-flash-tiny",
        _set("layers.6.attn_norm.weight", torch.ones(256)),
        "layers.6.attn_norm.weight is not part",
    ),
    (
        "deepseek-v4-flash-tiny",
        _set("layers.1.attn.wkv.weight", torch.ones(64, 256)),
        "though config.json says that weights",
    ),
    ("deepseek-v4.1-flash-tiny", lambda t: t.pop("engram.token_map"), "neither tokenizer.json is there"),
    (
        "deepseek-v4.1-flash-tiny",
        _set("layers.7.attn.indexer.wk.weight", torch.ones(32, 64)),
        "indexer.wk.weight is not part",
    ),
    ("deepseek-v4.1-flash-tiny", lambda t: t.pop("layers.4.engram.embed.scale"), "is missing"),
]


@pytest.mark.parametrize(("name", "change", "message"), FAULTS)
def test_what_does_not_fit_is_refused(name, change, message, tmp_path):
    directory = rewrite(small(name, tmp_path), change)
    with pytest.raises(CheckpointError, match=message):
        check(Checkpoint(directory), from_dir(directory))


def test_scales_of_the_other_generation_are_refused(tmp_path, tiny_checkpoint):
    def swap(tensors):
        scale = tensors["layers.0.attn.wq_a.scale"]
        tensors["layers.0.attn.wq_a.scale"] = scale[:1, :2].clone()

    directory = rewrite(small("deepseek-v4.1-flash-tiny", tmp_path), swap)
    with pytest.raises(CheckpointError, match=r"a scale per 128x128 and config.json says 32x32"):
        check(Checkpoint(directory), from_dir(directory))


def test_drafts_and_vision_are_left_alone(tmp_path):
    def add(tensors):
        extra = ("mtp.0.attn.wkv.weight", "vision.blocks.0.weight", "aligner.weight", "layers.3.ffn.gate.bias_vl")
        tensors.update({name: torch.ones(3) for name in extra})

    directory = rewrite(small("deepseek-v4.1-flash-tiny", tmp_path), add)
    check(Checkpoint(directory), from_dir(directory))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "deepseek-v4-flash-tiny",
            _set("layers.1.ffn.gate.tid2eid", torch.full((512, 4), 16)),
            "chooses experts 16 to 16",
        ),
        ("deepseek-v4.1-flash-tiny", _set("engram.token_map", torch.full((512,), 300)), "compressed ids up to 300"),
    ],
)
def test_numbers_out_of_range_are_refused(name, change, message, tmp_path):
    directory = rewrite(small(name, tmp_path, "f32"), change)
    with pytest.raises(CheckpointError, match=message):
        load(directory)


# Ranks and packs.


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_two_ranks_are_the_whole(name, tiny_checkpoint):
    directory = tiny_checkpoint(name, "mxfp4")
    config, checkpoint = from_dir(directory), Checkpoint(directory)
    one, two = (plan_of(checkpoint, config, tp=tp) for tp in (1, 2))
    alone = carry_out(checkpoint, one, config.num_hidden_layers, None, "cpu", 0)
    ranks = [carry_out(checkpoint, two, config.num_hidden_layers, None, "cpu", rank) for rank in (0, 1)]
    # Of [count, n, k]. The groups of o_a are shared, as matrices.
    axes = {"q_b": 1, "o_a": 0, "o_b": 2, "gate_up": 1, "down": 2, "shared_gate_up": 1, "shared_down": 2, "head": 1}
    axes["engram_kv"] = 1
    split = set()
    for field, value in alone.items():
        kind = field.rsplit(".", 1)[-1]
        if isinstance(value, PackedMatrix):
            parts = [rank[field].dequantize().view(-1, rank[field].n, rank[field].k) for rank in ranks]
            expected = value.dequantize().view(-1, value.n, value.k)
            if two.fields[field].split:
                split.add(kind)
                parts = [torch.cat(parts, dim=axes[kind])]
            assert all(torch.equal(part, expected) for part in parts), field
        else:
            assert all(torch.equal(rank[field], value) for rank in ranks), field
    assert split == axes.keys() - ({"engram_kv"} if config.engram is None else set())


def test_the_published_models_divide():
    """V4.1's experts are 2304 wide: with 8 ranks 288, which is 9 groups and 2.25 tiles of 128."""
    for name, block in (("deepseek-v4-flash", "fp8"), ("deepseek-v4.1-flash", "fp8_32")):
        config = from_dict(preset(name))
        for tp in (1, 2, 4, 8):
            made = plan(config, published_formats(config), tp=tp, arch="gfx942")
            assert made.formats["linear"] == f"{block}_fnuz"
            assert made.fields["layers.30.gate_up"].shape == (config.moe_intermediate_size // tp, config.hidden_size)
            assert made.fields["layers.30.o_a"].count == 8 // tp
    with pytest.raises(ConfigError, match="16 ranks cannot share this model evenly: o_groups 8"):
        plan(from_dict(preset("deepseek-v4-flash")), Formats("fp8", "bf16", "mxfp4"), tp=16)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pack_is_the_same_model(name, tmp_path, tiny_checkpoint, model, prompt):
    [folder] = pack_checkpoint(tiny_checkpoint(name, "mxfp4"), tmp_path, arch="host")
    pack = open_pack(folder)
    pack.verify()
    config = from_dict(pack.manifest["config"])
    packed = Model(config, assemble(pack.formats, config, pack.load()))
    expected = model(name, "mxfp4").prefill("a", prompt[:30])
    assert torch.equal(packed.prefill("a", prompt[:30]), expected)
