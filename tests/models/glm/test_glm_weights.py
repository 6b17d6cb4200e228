from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rocmega.checkpoint import INDEX, SINGLE, Checkpoint
from rocmega.checkpoint.tiles import PackedMatrix, dequantize_fp8
from rocmega.errors import CheckpointError
from rocmega.models.glm.config import from_dict, from_dir
from rocmega.models.glm.presets import preset
from rocmega.models.glm.weights import Formats, GlmWeights, check, expected_tensors, pack, scale_name

KINDS = ("f32", "bf16", "fp8")


def values(directory: Path) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint, dequantized to float32."""
    checkpoint = Checkpoint(directory)
    out = {}
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        if scale_name(name) in checkpoint:
            tensor = dequantize_fp8(tensor, checkpoint.tensor(scale_name(name)))
        out[name] = tensor.float()
    return out


@pytest.mark.parametrize("dtype", KINDS)
def test_every_field_holds_the_checkpoints_values(dtype, packed, tiny_checkpoint):
    config, weights = packed("glm-5.2-tiny", dtype)
    source = values(tiny_checkpoint("glm-5.2-tiny", dtype))
    for number, fields in enumerate(weights.layers):
        layer, attention = f"model.layers.{number}.", f"model.layers.{number}.self_attn."
        expected = {
            "attention_norm": source[f"{layer}input_layernorm.weight"],
            "q_a_norm": source[f"{attention}q_a_layernorm.weight"],
            "kv_a_norm": source[f"{attention}kv_a_layernorm.weight"],
            "mlp_norm": source[f"{layer}post_attention_layernorm.weight"],
            "q_a": source[f"{attention}q_a_proj.weight"],
            "kv_a": source[f"{attention}kv_a_proj_with_mqa.weight"],
            "q_b": source[f"{attention}q_b_proj.weight"],
            "o": source[f"{attention}o_proj.weight"],
        }
        up = source[f"{attention}kv_b_proj.weight"].view(4, 48 + 64, 64)
        up = up if dtype == "f32" else up.bfloat16().float()
        expected["key_up"], expected["value_up"] = up[:, :48].mT, up[:, 48:]
        if config.full_index[number]:
            norm = f"{attention}indexer.k_norm."
            expected["index_k_norm"] = torch.stack([source[f"{norm}weight"], source[f"{norm}bias"]])
            expected["index_q"] = source[f"{attention}indexer.wq_b.weight"]
            expected["index_k"] = source[f"{attention}indexer.wk.weight"]
            expected["index_weights"] = source[f"{attention}indexer.weights_proj.weight"]
        mlps = ["mlp"] if number < 3 else [*(f"mlp.experts.{e}" for e in range(16)), "mlp.shared_experts"]
        if number >= 3:
            expected["router"] = source[f"{layer}mlp.gate.weight"]
            expected["router_bias"] = source[f"{layer}mlp.gate.e_score_correction_bias"]
        gate_up = [source[f"{layer}{mlp}.{part}_proj.weight"] for mlp in mlps for part in ("gate", "up")]
        down = [source[f"{layer}{mlp}.down_proj.weight"] for mlp in mlps]
        expected["gate_up"], expected["down"] = torch.stack(gate_up), torch.stack(down) if number >= 3 else down[0]
        assert fields.keys() == expected.keys()
        for field, value in fields.items():
            found = value.dequantize() if isinstance(value, PackedMatrix) else value
            assert torch.equal(found, expected[field]), (number, field)
    assert torch.equal(weights.embedding.float(), source["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, source["model.norm.weight"])
    assert torch.equal(weights.head.dequantize(), source["lm_head.weight"])


def test_formats(packed):
    assert [packed("glm-5.2-tiny", dtype)[1].formats for dtype in KINDS] == [
        Formats("f32", "f32"),
        Formats("bf16", "bf16"),
        Formats("fp8", "bf16"),
    ]
    formats = packed("glm-5.2-tiny", "fp8")[1].formats
    assert (formats.absorbed, formats.cache) == ("bf16", "bf16")
    assert (Formats("f32", "f32").absorbed, Formats("f32", "f32").cache) == ("f32", "f32")


def test_formats_of_fields(packed):
    """As descriptor.h says: LINEAR, ISLAND and ABSORBED matrices, float32 vectors."""
    _, weights = packed("glm-5.2-tiny", "fp8")
    found = {name: getattr(field, "format", "vector") for layer in weights.layers for name, field in layer.items()}
    linear = dict.fromkeys(("q_a", "kv_a", "q_b", "o", "index_q", "index_k", "gate_up", "down"), "fp8")
    island = dict.fromkeys(("index_weights", "router"), "bf16")
    absorbed = dict.fromkeys(("key_up", "value_up"), "bf16")
    names = ("attention_norm", "q_a_norm", "kv_a_norm", "mlp_norm", "index_k_norm", "router_bias")
    assert found == {**linear, **island, **absorbed, **dict.fromkeys(names, "vector")}
    assert weights.embedding.dtype == torch.bfloat16
    assert weights.head.format == "bf16"
    vectors = [field for layer in weights.layers for field in layer.values() if isinstance(field, torch.Tensor)]
    assert all(vector.dtype == torch.float32 for vector in vectors)


@pytest.mark.parametrize("dtype", KINDS)
def test_bytes(dtype, packed):
    weights: GlmWeights = packed("glm-5.2-tiny", dtype)[1]
    total = weights.embedding.nbytes + weights.final_norm.nbytes + weights.head.bytes()
    for layer in weights.layers:
        total += sum(f.bytes() if isinstance(f, PackedMatrix) else f.nbytes for f in layer.values())
    assert weights.bytes() == total
    assert len({tensor.data_ptr() for tensor in weights.tensors()}) == len(list(weights.tensors()))


def test_published_bytes():
    """What one rank of one would hold of GLM-5.2: 744 billion weights, by shapes alone."""
    expected = expected_tensors(from_dict(preset("glm-5.2")))
    count = sum(torch.Size(shape).numel() for shape, _ in expected.values())
    assert 7.4e11 < count < 7.5e11
    assert len(expected) == 3 + 78 * 9 + 21 * 5 + 3 * 3 + 75 * (2 + 257 * 3)


def test_progress(tiny):
    seen = []
    pack(Checkpoint(tiny), from_dir(tiny), lambda done, total: seen.append((done, total)))
    assert seen == [(layer, 8) for layer in range(1, 9)]


def test_weights_outlive_the_files(tiny_copy):
    checkpoint = Checkpoint(tiny_copy)
    weights = pack(checkpoint, from_dir(tiny_copy))
    checkpoint.close()
    before = [tensor.clone() for tensor in weights.tensors()]
    for file in tiny_copy.glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, weights.tensors(), strict=True)
    )


# Faults.

Q_A = "model.layers.4.self_attn.q_a_proj.weight"


@pytest.fixture
def altered(tiny_checkpoint, tmp_path):
    """altered(changes, dtype): a tiny checkpoint in one file with tensors replaced, added, or removed where None."""

    def write(changes: dict, dtype: str = "f32") -> tuple[Checkpoint, object]:
        source = tiny_checkpoint("glm-5.2-tiny", dtype)
        tensors = {}
        for file in source.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        tensors.update(changes)
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / SINGLE)
        return Checkpoint(tmp_path), from_dir(source)

    return write


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        ("f32", {Q_A: None}, f"tensor {Q_A} is missing"),
        ("f32", {Q_A: torch.zeros(256, 128)}, rf"tensor {Q_A} in model.safetensors is \[256, 128\], not \[128, 256\]"),
        ("f32", {Q_A: torch.zeros(128, 256, dtype=torch.float16)}, f"{Q_A} in .* is torch.float16, which is not supp"),
        ("f32", {Q_A: bf16(128, 256)}, r"matrices of attention are of different dtypes, .*bf16 \(.*q_a_proj"),
        ("f32", {"lm_head.weight": None, "model.norm.weight": None}, r"model.norm.weight is missing"),
        (
            "f32",
            {Q_A: torch.zeros(128, 256).to(torch.float8_e4m3fn)},
            "is FP8 and config.json has no quantization_conf",
        ),
        ("f32", {Q_A.replace("weight", "bias"): torch.zeros(128)}, "q_a_proj.bias is not part of the model"),
        (
            "f32",
            {"model.layers.3.self_attn.indexer.wk.weight": torch.zeros(64, 256)},
            "layers.3.self_attn.indexer.wk.weight is not part",
        ),
        ("fp8", {scale_name(Q_A): None}, f"tensor {scale_name(Q_A)}, the scales of an FP8 weight .*, is missing"),
        (
            "fp8",
            {scale_name(Q_A): torch.ones(2, 1)},
            r"q_a_proj.weight_scale_inv .* \[2, 1\], not torch.float32 \[1, 2\]",
        ),
        ("fp8", {scale_name(Q_A): bf16(1, 2)}, r"q_a_proj.weight_scale_inv .* torch.bfloat16 \[1, 2\], not"),
        ("fp8", {Q_A: bf16(128, 256), scale_name(Q_A): None}, f"{Q_A} in .* though config.json says that .* are FP8"),
        ("fp8", {Q_A: torch.zeros(128, 256).to(torch.float8_e5m2)}, f"{Q_A} in .* is torch.float8_e5m2, which is not"),
        ("fp8", {"lm_head.weight": torch.zeros(512, 256).to(torch.float8_e4m3fn)}, "lm_head.weight .* not supported"),
    ],
)
def test_checkpoints_that_do_not_fit(dtype, changes, message, altered):
    checkpoint, config = altered(changes, dtype)
    with pytest.raises(CheckpointError, match=message):
        pack(checkpoint, config, progress=lambda *_: pytest.fail("packed before all was checked"))


def test_all_faults_are_counted(altered):
    checkpoint, config = altered(
        {name: None for name in expected_tensors(from_dict(preset("glm-5.2-tiny"))) if "experts" in name}
    )
    with pytest.raises(CheckpointError, match=r"is missing; and 247 more\. "):
        check(checkpoint, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.layers.8.eh_proj.weight": torch.zeros(256, 512), "model.layers.8.self_attn.k_scale": torch.zeros(1)},
        {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.zeros(16)},
    ],
)
def test_draft_layers_and_old_buffers_are_passed_over(changes, altered):
    check(*altered(changes))


def test_kv_b_may_stay_bf16_in_an_fp8_checkpoint(altered):
    name = "model.layers.4.self_attn.kv_b_proj.weight"
    weight = torch.randn(448, 64).bfloat16()
    checkpoint, config = altered({name: weight, scale_name(name): None}, "fp8")
    weights = pack(checkpoint, config)
    assert torch.equal(weights.layers[4]["value_up"].dequantize()[0], weight[48:112].float())


def test_one_float32_island_widens_all(altered):
    name = "model.layers.2.self_attn.indexer.weights_proj.weight"
    weight = torch.randn(16, 256)
    checkpoint, config = altered({name: weight}, "bf16")
    weights = pack(checkpoint, config)
    assert weights.formats == Formats("bf16", "f32")
    assert torch.equal(weights.layers[2]["index_weights"].dequantize(), weight)
    assert weights.embedding.dtype == torch.float32


def test_truncated_shard(tiny_copy):
    shard = sorted(tiny_copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated: tensor .* Fetch it again") as failed:
        pack(Checkpoint(tiny_copy), from_dir(tiny_copy))
    assert str(failed.value).count(" is truncated") == 1, "one damaged file is one fault"


def test_index_of_another_model(tiny_copy):
    index = json.loads((tiny_copy / INDEX).read_text())
    index["weight_map"] = {name.replace("layers.7", "layers.9"): file for name, file in index["weight_map"].items()}
    (tiny_copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor model.layers.7.* is missing"):
        pack(Checkpoint(tiny_copy), from_dir(tiny_copy))
