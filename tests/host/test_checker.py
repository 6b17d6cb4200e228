"""The memory model against a kernel with all kinds of hand-off: clean on every seed, and no known bug gets past it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, StepError
from tests.host.chain import MUTANTS, Chain

BLOCKS = (2, 3, 7, 16)
SEEDS = 12

# What at least one of the reports says, and on how many of the seeds something is reported at least.
SAYS = {
    1: (r"loads byte .* missing: drain\(\) by block", 12),
    2: ("missing: anything that orders the load behind the store", 12),
    3: "no thread can go on: .* a plain store that XCD . has not released",
    4: (r"missing: acquire_device\(\) by this wave", 12),
    5: ("LDS race: .* part", 3),
    6: ("waited in stage narrow, task ., for tag 2 and saw 1", 12),
    7: ("epochs must grow|gets that of epoch", 12),
    8: (r"missing: release_device\(\) on XCD", 12),
    9: (r"missing: acquire_device\(\) by this wave", 12),
    10: ("has read of the epoch before; missing: .* a slot more", 12),
    11: (r"missing: drain\(\) by block . \(XCD .\) wave [123]", 12),
    12: ("LDS race|missing: anything that orders the load behind the store", 12),
    13: ("stage narrow task . touches byte .* of x past the accessors", 12),
}


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@pytest.fixture(scope="module")
def expected(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    return chain.run(HostDriver(), rows=16, blocks=1)


def driver(seed: int, check: bool = True) -> HostDriver:
    return HostDriver(seed, check, xcds=(8, 4, 2)[seed // 3 % 3])  # seed % 3 is the order of the scheduler


def test_reference(chain: Chain, expected: tuple[np.ndarray, np.ndarray]) -> None:
    out, tokens = expected
    assert len(np.unique(tokens)) > 16
    reference = chain.reference(tokens)
    assert np.linalg.norm(out.view(np.float32) - reference) < 1e-3 * np.linalg.norm(reference)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_same_bits(chain: Chain, expected: tuple[np.ndarray, np.ndarray], rows: int, check: bool) -> None:
    for seed in range(4):
        for blocks in (1, *BLOCKS):
            out, tokens = chain.run(driver(seed, check), rows=rows, blocks=blocks)
            assert np.array_equal(out, expected[0][:, :rows]), (seed, blocks)
            assert np.array_equal(tokens, expected[1][:, :rows])
            assert not any(chain.error)


def test_many_blocks(chain: Chain, expected: tuple[np.ndarray, np.ndarray]) -> None:
    out, _ = chain.run(driver(1), rows=3, blocks=304)
    assert np.array_equal(out, expected[0][:, :3])


def test_launches_go_on(chain: Chain) -> None:
    """Epochs live as long as the memory: the next launch goes on from them, and may not begin again."""
    for seed in range(3):
        chain.run(driver(seed), rows=3, blocks=3, launches=3)
        with pytest.raises(DriverError, match="epochs must grow"):
            chain.run(driver(seed), rows=3, blocks=3, launches=2, reuse=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[name.replace(" ", "_") for name in MUTANTS.values()])
def test_mutant(chain: Chain, mutant: int) -> None:
    pattern, at_least = SAYS[mutant] if isinstance(SAYS[mutant], tuple) else (SAYS[mutant], 12)
    said = []
    for seed in range(SEEDS):
        rows = 16 if mutant == 11 else (16, 3)[seed % 2]
        try:
            chain.run(driver(seed), rows=rows, blocks=BLOCKS[seed % 4], mutant=mutant)
        except (DriverError, StepError) as error:
            said.append(str(error))
    assert len(said) >= at_least, said
    assert any(re.search(pattern, text) for text in said), said
    assert all("missing: " in text for text in said if "past the accessors" not in text), said
    assert all(re.search("stage (embed|squeeze|widen|narrow)", text) for text in said)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("region", "stages"), [("x", "embed|narrow"), ("wide", "widen|narrow"), ("small", "squeeze|widen")]
)
def test_short_buffer(chain: Chain, region: str, stages: str, check: bool) -> None:
    message = rf"block \d+ stage ({stages}) task \d+ .* past the end of {region}, which has"
    with pytest.raises(DriverError, match=message):
        chain.run(driver(0, check), rows=16, blocks=3, short={region: 64})


def test_kernel_gives_up_by_itself(chain: Chain) -> None:
    """Where waits are not watched, the kernel's own limit ends them and its error word says who waited for what."""
    chain.run(HostDriver(0), rows=3, blocks=7, mutant=6, limit=1000)
    assert chain.error[0] == 1
    block, stage, task, wanted, seen = chain.error[1:]
    assert (stage, task, wanted, seen) == (3, 3, 2, 1)
    assert 0 <= block < 7
