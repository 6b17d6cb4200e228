"""What a step reads, against counting by hand."""

from __future__ import annotations

import pytest

from rocmega.models.glm.config import from_dict
from rocmega.models.glm.plan import plan
from rocmega.models.glm.presets import preset
from rocmega.models.glm.published import Formats
from rocmega.models.glm.traffic import cache_reads
from rocmega.packing.traffic import BANDWIDTH, Traffic, distinct_experts, lines

FP8, MX4, BF16 = 1 + 4 / 128**2, 0.5 + 1 / 32, 2  # bytes of a weight, scales included
LAYERS, MIXTURE, HIDDEN = 78, 75, 6144
NORMS = ("norm", "bias")

# GLM-5.2's published dimensions, counted by hand: bytes that one token reads, and whether ranks share them. kv_b_proj
# counts as two bf16 matrices here, as it is packed.
BY_HAND = {
    "q_b": (LAYERS * 64 * 256 * 2048 * FP8, True),
    "key_up": (LAYERS * 64 * 192 * 512 * BF16, True),
    "value_up": (LAYERS * 64 * 256 * 512 * BF16, True),
    "o": (LAYERS * HIDDEN * 64 * 256 * FP8, True),
    "q_a": (LAYERS * 2048 * HIDDEN * FP8, False),
    "kv_a": (LAYERS * 576 * HIDDEN * FP8, False),
    "index_q": (21 * 4096 * 2048 * FP8, False),
    "index_k": (21 * 128 * HIDDEN * FP8, False),
    "index_weights": (21 * 32 * HIDDEN * BF16, False),
    "router": (MIXTURE * 256 * HIDDEN * BF16, False),
    "gate_up": ((3 * 12288 + MIXTURE * 9 * 2048) * 2 * HIDDEN * FP8, True),
    "down": ((3 * 12288 + MIXTURE * 9 * 2048) * HIDDEN * FP8, True),
    "head": (154880 * HIDDEN * BF16, True),
}


def traffic(name: str = "glm-5.2", formats: Formats | None = None, tp: int = 1, context: int = 8192) -> Traffic:
    config = from_dict(preset(name))
    formats = formats or Formats("fp8", "bf16")
    return Traffic(lines(plan(config, formats, tp=tp).fields.values()), cache_reads(config, formats, context), context)


def by_name(of: Traffic, rows: int = 1) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in of.lines:
        found[line.name] = found.get(line.name, 0) + line.reads[rows]
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_bytes_of_one_token_are_those_counted_by_hand(tp):
    found = by_name(traffic(tp=tp))
    for name, (size, split) in BY_HAND.items():
        assert found.pop(name) == pytest.approx(size / tp if split else size, rel=3e-4), name  # partial scale blocks
    assert found.pop("embedding") == HIDDEN * BF16
    assert all(name.endswith(NORMS) for name in found)
    assert sum(found.values()) < 6e6


def test_totals_that_others_have_counted():
    """GB per token with kv_b in FP8 and without norms: 41.381 for GLM-5.2, 41.927 for GLM-5."""
    kv_b = LAYERS * 28672 * 512
    for name, total in {"glm-5.2": 41.381e9, "glm-5": 41.927e9}.items():
        found = by_name(traffic(name))
        counted = sum(size for field, size in found.items() if field in BY_HAND) - kv_b * (BF16 - FP8)
        assert counted == pytest.approx(total, rel=1e-4)


def test_mxfp4_experts():
    mixture = [line for line in traffic(formats=Formats("fp8", "bf16", "mxfp4")).lines if line.format == "mxfp4"]
    assert [(line.name, line.matrices) for line in mixture] == [("gate_up", 75 * 514), ("down", 75 * 257)]
    # Eight routed experts and the shared one; 12.032 GB for the routed ones alone.
    assert sum(line.reads[1] for line in mixture) == pytest.approx(12.032e9 * 9 / 8, rel=1e-4)
    assert sum(line.reads[1] for line in mixture) == MIXTURE * 9 * 3 * 2048 * HIDDEN * MX4


def test_distinct_experts():
    assert distinct_experts(256, 8, 1) == pytest.approx(8)
    assert distinct_experts(256, 8, 4) == pytest.approx(256 * (1 - (31 / 32) ** 4))
    assert distinct_experts(8, 8, 3) == 8
    of = traffic()
    assert by_name(of, 4)["q_b"] == by_name(of, 1)["q_b"]
    one = LAYERS and (by_name(of)["gate_up"] - 3 * 2 * 12288 * HIDDEN * FP8) / 9
    many = by_name(of, 8)["gate_up"] - 3 * 2 * 12288 * HIDDEN * FP8
    assert many / one == pytest.approx(1 + distinct_experts(256, 8, 8), rel=1e-3)


def test_cache_and_limits():
    of = traffic(tp=8)
    assert of.cache == {"selected latents": 78 * 2048 * 576 * 2, "index keys": 21 * 8192 * 128 * 2}
    assert traffic(context=100).cache == {"selected latents": 78 * 100 * 576 * 2, "index keys": 0}
    assert of.step(4) == sum(line.reads[4] for line in of.lines) + 4 * sum(of.cache.values())
    assert BANDWIDTH == {"MI300X": 5.3e12, "MI355X": 8.0e12, "H200": 4.8e12}
    [limit] = [entry for entry in of.limits() if (entry["device"], entry["rows"]) == ("MI355X", 4)]
    assert limit["ms"] == pytest.approx(of.step(4) / 8e9)
    assert limit["tokens_per_second"] == pytest.approx(4 / (of.step(4) / 8e12))
    report = of.to_json()
    assert report["bytes_read_per_token"]["4"] == round(round(of.step(4)) / 4)
    assert sum(entry["bytes"] for entry in report["tensors"]) == report["bytes"] == of.bytes
