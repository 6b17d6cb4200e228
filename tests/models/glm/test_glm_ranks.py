"""What each rank holds: put together again it is the whole model, and what cannot be shared is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rocmega.checkpoint import Checkpoint
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import ConfigError
from rocmega.models.glm.config import GlmConfig, from_dict, from_dir
from rocmega.models.glm.plan import plan
from rocmega.models.glm.presets import preset
from rocmega.models.glm.weights import Formats, GlmWeights, pack

# Axis of a field's values [..., n, k] that ranks share; heads of absorbed matrices lie in front.
AXES = {"q_b": -2, "o": -1, "gate_up": -2, "down": -1, "key_up": 0, "value_up": 0}


def values(field: PackedMatrix | torch.Tensor) -> torch.Tensor:
    return field.dequantize() if isinstance(field, PackedMatrix) else field


@pytest.fixture(scope="module")
def ranks(tiny_checkpoint):
    """ranks(kind, tp, arch): the weights of all ranks."""

    def load(kind: str, tp: int, arch: str | None = None) -> list[GlmWeights]:
        directory = tiny_checkpoint("glm-5.2-tiny", kind)
        opened, config = Checkpoint(directory), from_dir(directory)
        return [pack(opened, config, tp=tp, rank=rank, arch=arch) for rank in range(tp)]

    return load


@pytest.mark.parametrize(
    ("kind", "tp", "arch"),
    [("f32", 4, None), ("bf16", 2, None), ("fp8", 2, None), ("fp8", 2, "gfx942"), ("mxfp4", 2, "gfx950")],
)
def test_the_ranks_together_are_the_whole(kind, tp, arch, ranks, packed):
    _, whole = packed("glm-5.2-tiny", kind)
    parts = ranks(kind, tp, arch)
    assert [(part.tp, part.rank) for part in parts] == [(tp, rank) for rank in range(tp)]
    for number, fields in enumerate(whole.layers):
        for name, field in fields.items():
            shares = [values(part.layers[number][name]) for part in parts]
            if name in AXES:
                together = torch.cat(shares, dim=AXES[name]).reshape(values(field).shape)  # one head has no axis for it
                assert torch.equal(together, values(field)), (number, name)
            else:
                assert all(torch.equal(share, values(field)) for share in shares), (number, name)
    assert torch.equal(torch.cat([values(part.head) for part in parts]), values(whole.head))
    assert all(torch.equal(part.embedding, whole.embedding) for part in parts)
    assert all(torch.equal(part.final_norm, whole.final_norm) for part in parts)


def test_formats_follow_cuts_and_architecture(ranks):
    """160 rows of q_b for each of two ranks begin inside a block of 128, but at one of 32."""
    assert ranks("fp8", 1)[0].formats == Formats("fp8", "bf16")
    assert ranks("fp8", 2)[0].formats == Formats("fp8_32", "bf16")
    assert ranks("fp8", 2, "gfx942")[0].formats == Formats("fp8_32_fnuz", "bf16")
    assert ranks("fp8", 1, "gfx942")[0].formats == Formats("fp8_fnuz", "bf16")
    assert ranks("mxfp4", 1, "gfx942")[0].formats == Formats("fp8_fnuz", "bf16", "mxfp4", "fp8_fnuz")
    assert ranks("bf16", 2, "gfx942")[0].formats == Formats("bf16", "bf16")


def glm52(**changes: int) -> GlmConfig:
    return dataclasses.replace(from_dict(preset("glm-5.2")), **changes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("arch", "fp8"), [("gfx942", "fp8_fnuz"), ("gfx950", "fp8"), ("sm_90", "fp8")])
def test_the_published_dimensions_keep_their_blocks(tp, arch, fp8):
    made = plan(glm52(), Formats("fp8", "bf16"), tp=tp, arch=arch)
    assert made.formats == {"linear": fp8, "island": "bf16", "expert": fp8, "dense": fp8}
    assert made.fields["layers.3.gate_up"].shape == (2048 // tp, 6144)
    assert made.fields["layers.3.down"].shape == (6144, 2048 // tp)
    assert made.fields["layers.0.down"].shape == (6144, 12288 // tp)
    assert made.fields["layers.3.q_b"].shape == (64 * 256 // tp, 2048)
    assert made.fields["layers.3.o"].shape == (6144, 64 * 256 // tp)
    assert made.fields["layers.3.key_up"].count == 64 // tp
    assert made.fields["head"].shape == (154880 // tp, 6144)
    assert made.fields["layers.3.kv_a"].shape == (576, 6144)  # 4.5 blocks of scales, with every rank
    assert made.fields["layers.3.kv_a"].tensors()["layers.3.kv_a.scales"] == ("F32", (1, 5, 48))


def test_the_work_is_cut_into_pieces_of_bounded_size():
    """No job reads more than about 64 MB: the head is 1.9 GB."""
    made = plan(glm52(), Formats("fp8", "bf16"), tp=8)
    head = [job for job in made.jobs if job.field == "head"]
    rows = [job.rows for job in head]
    assert all(stop - start <= (64 << 20) / (6144 * 2) for start, stop in rows)
    assert [job.ranks for job in head] == sorted(job.ranks for job in head)
    assert sum(stop - start for start, stop in rows) == 154880
    assert sum(len(job.sources) for job in made.jobs if job.field == "layers.3.gate_up") == 514


@pytest.mark.parametrize(
    ("changes", "formats", "tp", "message"),
    [
        ({}, Formats("fp8", "bf16"), 3, "3 ranks cannot share this model evenly: num_attention_heads 64; moe_inter"),
        ({"qk_nope_head_dim": 16}, Formats("fp8", "bf16"), 64, "parts of q_b_proj rows 5120"),
        ({"moe_intermediate_size": 1536 + 64}, Formats("fp8", "bf16"), 8, "parts of moe_intermediate_size 1600 begin"),
        (
            {"moe_intermediate_size": 1536 + 128},
            Formats("fp8", "bf16", "mxfp4"),
            8,
            "parts of moe_intermediate_size 1664 are no whole MXFP4 groups of 32",
        ),
    ],
)
def test_what_ranks_cannot_share(changes, formats, tp, message):
    with pytest.raises(ConfigError, match=message):
        plan(glm52(**changes), formats, tp=tp)


def test_mxfp4_for_gfx942_has_no_negative_zero(ranks, packed):
    """Elsewhere the bytes are those of the checkpoint."""
    _, kept = packed("glm-5.2-tiny", "mxfp4")
    [changed] = ranks("mxfp4", 1, "gfx942")
    before, after = (weights.layers[4]["gate_up"].tiles for weights in (kept, changed))
    low, high = before & 15, before >> 4
    assert ((low == 8) | (high == 8)).any()
    assert torch.equal(after & 15, torch.where(low == 8, 0, low))
    assert torch.equal(after >> 4, torch.where(high == 8, 0, high))
