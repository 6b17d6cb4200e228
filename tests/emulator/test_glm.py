"""Whole tokens of a tiny GLM-5.2 by the code objects for MI300X and MI355X, in an emulator: equal to the CPU target."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from rocmega.checkpoint import Checkpoint
from rocmega.errors import DriverError, StepError
from rocmega.models.glm.config import GlmConfig, from_dir
from rocmega.models.glm.weights import GlmWeights, pack
from tests.emulator.compare import LENGTHS, Comparison
from tests.emulator.driver import ARCHS, emulator

emulator()

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("arch", ARCHS)]
# Of the weights, mxfp4: of the experts; and what they meet.
FORMATS = ("f32", "bf16", "fp8", "fp8-fp8", "mxfp4", "mxfp4-fp8", "mxfp4-f32")
PACKED_FOR_TARGET = ("fp8-fp8", "mxfp4", "mxfp4-fp8", "mxfp4-f32")  # gfx942: with FP8 as FNUZ, as `rocmega pack` does
SEEDS = (None, 1, 2)


class Make(Protocol):
    def __call__(self, arch: str, dtype: str, rows: int, blocks: int, **options: Any) -> Comparison: ...


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Callable[[str, str, str, str], tuple[GlmConfig, GlmWeights]]:
    @cache
    def load(name: str, dtype: str, arch: str, activations: str) -> tuple[GlmConfig, GlmWeights]:
        directory = tiny_checkpoint(name, dtype)
        config = from_dir(directory)
        return config, pack(Checkpoint(directory), config, arch=arch, activations=activations)

    return load


@pytest.fixture
def compared(model: Callable[[str, str, str, str], tuple[GlmConfig, GlmWeights]]) -> Iterator[Make]:
    made: list[Comparison] = []

    def make(arch: str, dtype: str, rows: int, blocks: int, **options: Any) -> Comparison:
        packed_for = arch if dtype in PACKED_FOR_TARGET else "host"
        dtype, _, activations = dtype.partition("-")
        options["activations"] = activations or "auto"
        config, weights = model(options.pop("name", "glm-5.2-tiny"), dtype, packed_for, options["activations"])
        lengths = options.pop("lengths", LENGTHS[rows])
        made.append(Comparison(config, weights, arch, blocks, lengths, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("blocks", [1, 3, 5])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", FORMATS)
def test_tokens(arch: str, dtype: str, rows: int, blocks: int, compared: Make) -> None:
    """Contexts beyond the selection, in several pages; each token in another order of waves."""
    comparison = compared(arch, dtype, rows, blocks)
    for seed in SEEDS:
        comparison.step(seed)


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_rows(arch: str, dtype: str, compared: Make) -> None:
    comparison = compared(arch, dtype, 16, 3)
    for seed in (3, 4):
        comparison.step(seed)


def test_many_orders(arch: str, compared: Make) -> None:
    """In slices from a few to thousands of instructions, so that blocks run into each other and far ahead."""
    comparison = compared(arch, "f32", 3, 5)
    for seed in range(20, 32):
        comparison.emulator.slice_instructions = (200, 20, 2000)[seed % 3]
        comparison.step(seed)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_depth_of_the_matrix_instruction(arch: str, dtype: str, compared: Make) -> None:
    """The host with the other architecture's instructions differs, in last bits: the comparison can tell."""
    other = {"gfx942": "gfx950", "gfx950": "gfx942"}[arch]
    comparison = compared(arch, dtype, 3, 3, host_as=other)
    host, emulated = (side.path.decode(comparison.batch()) for side in comparison.sides)
    found = comparison.differences(host, emulated)
    assert any(what.startswith("logits") for what in found)
    assert host.logits is not None
    assert emulated.logits is not None
    assert (host.logits - emulated.logits).norm() < 2e-2 * host.logits.norm()


def test_short_contexts(arch: str, compared: Make) -> None:
    """Up to the step in which the first selection is made."""
    comparison = compared(arch, "bf16", 3, 3, lengths=[3, 22, 7])
    for seed in (5, 6, 7, 8):
        comparison.step(seed)


def test_every_layer_with_an_indexer(arch: str, compared: Make) -> None:
    comparison = compared(arch, "f32", 3, 3, name="glm-5-tiny")
    for seed in (9, 10):
        comparison.step(seed)


def test_layer_by_layer(arch: str, compared: Make) -> None:
    """A launch per layer, every hand-off region compared after each: if bits ever differ, this tells the stage."""
    comparison = compared(arch, "fp8", 3, 3, mega_tasks=8)
    comparison.step(11)
    assert len(comparison.emulator.executions) == 8


def test_missing_producer(arch: str, compared: Make) -> None:
    """Layer 3 never runs: the kernel says who waited for what, on both sides the same; the next step is whole again."""
    comparison = compared(arch, "f32", 3, 3)
    errors = []
    for side in comparison.sides:
        path, whole = side.path, side.path.layer_splits
        path.layer_splits, path._args.poll_limit = [(0, 3), (4, comparison.config.num_hidden_layers)], 300
        with pytest.raises(StepError) as raised:
            path.decode(comparison.batch())
        errors.append(raised.value)
        path.layer_splits, path._args.poll_limit = whole, 10**6
        path.records.clear()
    host, emulated = errors
    assert emulated.stage == host.stage == "down"
    assert (emulated.expected, emulated.seen) == (host.expected, host.seen)
    assert emulated.expected == emulated.seen + 2  # x has two slots: what is there was written two versions ago
    assert 0 <= emulated.block < 3
    comparison.step(12)


@pytest.mark.parametrize("region", ["x", "partial_out", "logits"])
def test_buffer_too_short(arch: str, region: str, compared: Make) -> None:
    comparison = compared(arch, "f32", 1, 3)
    path, driver = comparison.sides[1].path, comparison.emulator
    buffer = path._regions[region]
    driver._shared[buffer.address] = 128
    with pytest.raises(DriverError, match="outside memory that is not allowed") as raised:
        path.decode(comparison.batch())
    found = re.search(r"accesses \d+ bytes at (0x[0-9a-f]+)", str(raised.value))
    assert found
    assert buffer.address + 128 <= int(found[1], 16) < buffer.address + buffer.nbytes
    driver._shared[buffer.address] = buffer.nbytes
