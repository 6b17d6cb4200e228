"""The platform's primitives, and the small kernel with every kind of hand-off, as compiled for AMD.

They have to pass the tests of the host, and to give the host's bits where those tests allow more than one result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rocmega.drivers.host import HostDriver
from rocmega.selftest.handoff import KINDS, Handoffs
from rocmega.selftest.primitives import PRODUCTS, numbers, pack
from rocmega.toolchain import Unit, compile
from tests.emulator.driver import ARCHS, MMA_K, EmulatorDriver, emulator
from tests.host.chain import SOURCE, STAGES, Chain
from tests.platform import kit
from tests.platform.test_formats import test_all_codes, test_functions, test_rounding, test_widening  # noqa: F401
from tests.platform.test_memory import test_copies, test_streams_and_claims  # noqa: F401
from tests.platform.test_quantize import test_groups  # noqa: F401
from tests.platform.test_tiles import test_widened_products  # noqa: F401
from tests.platform.test_wave_and_lds import test_lds, test_wave  # noqa: F401

emulator()

pytestmark = pytest.mark.slow


@cache
def opened(arch: str) -> EmulatorDriver:
    return EmulatorDriver(arch)


@pytest.fixture(params=ARCHS)
def driver(request: pytest.FixtureRequest) -> EmulatorDriver:
    """One of each architecture, so that kernels are loaded once. Takes the place of the fixture of the host's tests."""
    one = opened(request.param)
    one.seed = 0
    return one


@pytest.fixture
def device(driver: EmulatorDriver) -> EmulatorDriver:
    return driver


def compare(driver: EmulatorDriver, name: str, a: torch.Tensor, *more: torch.Tensor, **options: Any) -> None:
    """Both outputs of both targets, in every bit."""
    emulated = kit.run(name, a, *more, driver=driver, **options)
    host = kit.run(name, a, *more, mma_k=MMA_K[driver.arch], **options)
    for theirs, ours in zip(emulated, host, strict=True):
        assert torch.equal(theirs, ours), torch.nonzero(theirs != ours).flatten()[:10]


def test_hand_over(driver: EmulatorDriver) -> None:
    for driver.seed in range(4):
        compare(driver, "hand_over", torch.zeros(1), words=(3 * kit.THREADS, 4), blocks=2)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products(driver: EmulatorDriver, kind: str) -> None:
    n, dtype = PRODUCTS[kind]
    if kind == "fp8" and driver.arch == "gfx942":
        dtype = torch.float8_e4m3fnuz
    compare(driver, "tiles", pack(numbers(dtype, 1)), pack(numbers(dtype, 2)), words=(256, 1), n=n)


def test_bits_of_functions(driver: EmulatorDriver) -> None:
    """But for the sigmoids that are subnormal: there the emulator's steps of a division end in 0."""
    x = torch.cat([torch.linspace(-140, 140, 4001), torch.linspace(-2, 2, 2001), torch.tensor([0.0, float("nan")])])
    x = x[~((x > -88.8) & (x < -87.3))]
    n = x.numel()
    compare(driver, "functions", x, words=(2 * n, 2 * n), n=n)


@cache
def chain(arch: str) -> Chain:
    """On the host it has the architecture's matrix instructions."""
    both = Chain()
    built = compile(Unit("chain", SOURCE, {}, {"MMA_K": MMA_K[arch]}), "host")
    both.functions["host"] = HostDriver().load(built).function("chain", STAGES)
    return both


@pytest.mark.parametrize(("rows", "blocks"), [(16, 1), (16, 5), (3, 3), (1, 5)])
def test_chain(driver: EmulatorDriver, rows: int, blocks: int) -> None:
    both = chain(driver.arch)
    out, tokens = both.run(HostDriver(), rows=rows, blocks=blocks)
    for driver.seed in (None, 1, 2):
        theirs = both.run(driver, rows=rows, blocks=blocks)
        assert np.array_equal(theirs[0], out)
        assert np.array_equal(theirs[1], tokens)
        assert not any(both.error)


def test_chain_without_a_producer(driver: EmulatorDriver) -> None:
    """Mutant 6: every block leaves, and the error word says what was waited for."""
    both = chain(driver.arch)
    both.run(driver, rows=3, blocks=3, mutant=6, limit=300)
    claimed, block, stage, _, expected, seen = both.error
    assert claimed == 1
    assert block < 3
    assert STAGES[stage] == "narrow"
    assert (expected, seen) == (2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_stress_of_hand_offs(driver: EmulatorDriver, kind: str) -> None:
    """The self test's kernel, which a person with an AMD GPU runs first."""
    run = Handoffs(driver).stress(kind, 4, blocks=3)
    assert run.xcds == (0, 1, 2)
