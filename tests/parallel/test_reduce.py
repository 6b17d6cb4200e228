"""The sum over ranks, alone: the numbers, the same bits on every rank in any order, and no bug unseen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, StepError
from rocmega.parallel import Loopback
from rocmega.parallel.threads import ThreadRanks
from tests.parallel.chain import SPAN, RankChain, reference

SEEDS = 30


class Chains:
    def __init__(self, size: int, bug: tuple[str, str] | None = None, blocks: int = 2) -> None:
        self.ranks = ThreadRanks(size)
        members, drivers = self.ranks.members, self.ranks.drivers
        self.chains = self.ranks.run(lambda rank: RankChain(members[rank], drivers[rank], blocks, bug))

    def step(self, rows: int = 3, *, seed: int = 0, check: bool = True, mute: int | None = None) -> list[np.ndarray]:
        self.ranks.driver.seed, self.ranks.driver.check = seed, check
        return self.ranks.run(lambda rank: self.chains[rank].step(rows, mute=rank == mute))

    def close(self) -> None:
        self.ranks.run(lambda rank: self.chains[rank].close())


@pytest.fixture(params=[2, 3, 8])
def chains(request: pytest.FixtureRequest) -> Iterator[Chains]:
    made = Chains(request.param)
    yield made
    made.close()


def test_the_sum(chains: Chains) -> None:
    first, *others = chains.step()
    assert all(np.array_equal(first, other) for other in others)
    expected = reference(len(chains.chains))
    assert np.abs(first.view(np.float32) - expected).max() < 1e-5 * np.abs(expected).max()  # f32 sums of 40 products


def test_any_order_gives_the_same_bits_on_every_rank(chains: Chains) -> None:
    size = len(chains.chains)
    for seed in range(SEEDS if size < 8 else 6):
        rows = (3, 16, 1)[seed % 3]
        first, *others = chains.step(rows, seed=seed)
        assert all(np.array_equal(first, other) for other in others), seed
        expected = reference(size, 1 + seed * SPAN, rows)
        assert np.abs(first.view(np.float32) - expected).max() < 1e-5 * np.abs(expected).max(), seed


PLACE = "((u64)(version & 1) * RANKS + rank)"
MISSING = "if (got[i].tag != tag) missing"
BUGS = {
    "pushed at device scope": (
        "store_pair_system(there + j,",
        "store_pair(there + j,",
        "parts.* less than system scope",
    ),
    "polled at device scope": ("load_pair_system(at(i", "load_pair(at(i", "parts.* less than system scope"),
    "one slot": (PLACE, "(0ull * RANKS + rank)", "stage (reduce|share)"),
    "a rank left out": ("i <= RANKS; ++i", "i <= RANKS - (rank == 1); ++i", "stage reduce"),
    "everybody pushes to one place": (PLACE, "((u64)(version & 1) * RANKS)", "stored tag"),
    "a share is not waited for": (MISSING, MISSING.replace("got", "i < N && got", 1), "of parts for epoch"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug: str) -> None:
    old, new, message = BUGS[bug]
    wrong = Chains(2, (old, new))
    try:
        with pytest.raises((DriverError, StepError), match=message):
            [wrong.step(seed=seed) for seed in range(60)]
    finally:
        wrong.close()


def test_a_wait_that_ends_nowhere_names_the_rank_that_is_waited_for() -> None:
    """By the kernel's own limit: every rank leaves, the others because they are told."""
    chains = Chains(3)
    for chain in chains.chains:
        chain.group.poll_limit = lambda driver: 300
    with pytest.raises(StepError, match=r"on rank \d, .* waited in stage reduce, task 0, for rank 1 and tag 4 and saw"):
        chains.step(check=False, mute=1)
    chains.close()


def test_loopback_runs_the_same_kernel_alone() -> None:
    """What it pushes to rank 2 comes back as rank 2's share: four times its own."""
    chain = RankChain(Loopback(4, 1), HostDriver(check=True, xcds=2))
    x = chain.step().view(np.float32).astype(np.float64)
    k, j = np.meshgrid(np.arange(40), np.arange(40), indexing="ij")
    weights = 4 * ((k * 7 + j * 3 + 5) % 3 - 1)
    expected = x[0] + x[0] @ weights / 40
    assert np.abs(x[1] - expected).max() < 1e-5
    chain.close()
