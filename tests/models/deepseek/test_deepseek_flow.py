"""What is said of the mega-task's stages from outside."""

from __future__ import annotations

import pytest

from rocmega import descriptor
from rocmega.models.deepseek import check, flow, kernel
from rocmega.models.deepseek.config import from_dict
from rocmega.models.deepseek.plan import plan
from rocmega.models.deepseek.presets import preset
from rocmega.models.deepseek.weights import Formats


def test_every_stage_is_known():
    stages = {name.lower() for name in descriptor.load(kernel.FOLDER / "stages.h").enums["Stage"]}
    assert set(flow.PRODUCERS) == stages
    assert {stage for by in flow.PRODUCERS.values() for stage, _ in by} <= stages
    assert set(flow.FIELDS) | set(flow.CACHES.values()) <= stages
    assert set(check.WRITES) == stages


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4.1-flash"])
def test_every_byte_is_read_by_a_stage(name):
    config = from_dict(preset(name))
    formats = Formats("fp8" if config.scale_block == 128 else "fp8_32", "bf16", "mxfp4", "mxfp8" * bool(config.engram))
    fields = list(plan(config, formats, arch="gfx950").fields.values())
    reads = flow.stage_reads(config, formats, fields, 1, 8192)
    assert all(size > 0 for size in reads.values())
    assert 9e9 < sum(reads.values()) < 14e9
    assert max(reads, key=reads.__getitem__) in ("gate_up", "output_groups")
