"""The sum over ranks, alone: the numbers, the same bits on every rank in any order, and no bug unseen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, StepError
from rocmega.parallel import Loopback
from rocmega.parallel.threads import ThreadRanks
from rocmega.toolchain import assembly, search
from tests.parallel.chain import EXCHANGES, SPAN, RankChain, reference, unit

SEEDS = 30


class Chains:
    def __init__(self, size: int, bug: tuple[str, str] | None = None, blocks: int = 2, exchange: str = "PUSH") -> None:
        self.ranks = ThreadRanks(size)
        members, drivers = self.ranks.members, self.ranks.drivers
        self.chains = self.ranks.run(lambda rank: RankChain(members[rank], drivers[rank], blocks, bug, exchange))

    def step(self, rows: int = 3, *, seed: int = 0, check: bool = True, mute: int | None = None) -> list[np.ndarray]:
        self.ranks.driver.seed, self.ranks.driver.check = seed, check
        return self.ranks.run(lambda rank: self.chains[rank].step(rows, mute=rank == mute))

    def close(self) -> None:
        self.ranks.run(lambda rank: self.chains[rank].close())


@pytest.fixture(
    params=[(2, "PUSH"), (3, "PUSH"), (8, "PUSH"), (2, "PULL"), (3, "FLAGGED")], ids=lambda p: f"{p[0]}-{p[1]}"
)
def chains(request: pytest.FixtureRequest) -> Iterator[Chains]:
    size, exchange = request.param
    made = Chains(size, exchange=exchange)
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
NO_BARRIER = "    if (!s.all_ok(ok)) return false;\n"
SENT, WAITED = "    drain();\n" + NO_BARRIER, NO_BARRIER + "    acquire_system();\n"
ORDER = "missing: anything that orders the load behind the store"
DIFFERS = "the result differs"
# Where the bug is, what becomes of it, and what is said.
BUGS = {
    "pushed at device scope": (
        "PUSH",
        "store_pair_system(there + j,",
        "store_pair(there + j,",
        "parts.* less than system scope",
    ),
    "polled at device scope": ("PUSH", "load_pair_system(at(i", "load_pair(at(i", "parts.* less than system scope"),
    "one slot": ("PUSH", PLACE, "(0ull * RANKS + rank)", "stage (reduce|share)"),
    "a rank left out": ("PUSH", "i <= RANKS; ++i", "i <= RANKS - (rank == 1); ++i", "stage reduce"),
    "everybody pushes to one place": ("PUSH", PLACE, "((u64)(version & 1) * RANKS)", "stored tag"),
    "a share is not waited for": ("PUSH", MISSING, MISSING.replace("got", "i < N && got", 1), "of parts for epoch"),
    "a tag is not looked at": ("PUSH", MISSING, MISSING.replace("got", "i / N && got", 1), DIFFERS),
    "one slot to pull from": ("PULL", PLACE, "(0ull * RANKS + rank)", "stage (reduce|share)"),
    "offered at device scope": (
        "PULL",
        "store_pair_system(own + j,",
        "store_pair(own + j,",
        "parts.* less than system scope",
    ),
    "pulled from oneself": ("PULL", "place(of, of)", "place(rank, of)", "waited in stage reduce"),
    "one slot for flagged pieces": ("FLAGGED", PLACE, "(0ull * RANKS + rank)", "stage (reduce|share)"),
    "the flag overtakes the piece": ("FLAGGED", SENT, NO_BARRIER, r"missing: drain\(\)"),
    "a flag before the block is done": ("FLAGGED", SENT, "    drain();\n", f"{ORDER}|missing: drain"),
    "a piece is not waited for": ("FLAGGED", "if (got.tag == tag) break;", "break;", f"of parts for epoch|{ORDER}"),
    "waves go on without the one that waited": (
        "FLAGGED",
        WAITED,
        "    acquire_system();\n",
        f"of parts for epoch|{ORDER}",
    ),
    "one flag for all pieces": (
        "FLAGGED",
        "publish_system(place(other, rank) + FLAGS + task",
        "publish_system(place(other, rank) + FLAGS",
        "stored tag|waited in stage reduce",
    ),
    "a piece sent at device scope": ("FLAGGED", "store_system((u64*)", "store_device((u64*)", "less than system scope"),
}


def steps(chains: Chains, *, compared: bool) -> None:
    for seed in range(60):
        rows = (3, 16)[seed % 2]
        made, expected = chains.step(rows, seed=seed), reference(2, 1 + seed * SPAN, rows)
        if compared and any(np.abs(x.view(np.float32) - expected).max() > 1e-3 * np.abs(expected).max() for x in made):
            raise DriverError(DIFFERS)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug: str) -> None:
    """By a report; by what comes out only where a value is used without a look at its tag."""
    exchange, old, new, message = BUGS[bug]
    wrong = Chains(2, (old, new), exchange=exchange)
    try:
        with pytest.raises((DriverError, StepError), match=message):
            steps(wrong, compared=message == DIFFERS)
    finally:
        wrong.close()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.skipif(search("gfx942").found is None, reason="no compiler for AMD GPUs")
def test_what_crosses_a_link_is_at_system_scope(arch: str, exchange: str) -> None:
    """Shares, flags and alarms: every 8-byte access but the local hand-offs of x, which are at device scope."""
    text = assembly(unit(2, exchange=exchange), arch)
    pairs = re.findall(r"global_(load|store)_dwordx2 (.*)", text)
    system = {kind: [line for of, line in pairs if of == kind and "sc0 sc1" in line] for kind in ("load", "store")}
    device = [line for _, line in pairs if "sc1" in line and "sc0" not in line]
    assert len(system["load"]) >= 2
    assert system["store"]
    plain = [kind for kind, line in pairs if "sc1" not in line]
    assert plain == ["load"] * (exchange == "FLAGGED")  # of the address of another rank's buffer, one a lane
    assert device
    waits = [line.strip() for line in text.splitlines() if "s_waitcnt vmcnt(0)" in line or "s_barrier" in line]
    if exchange == "FLAGGED":  # drain, barrier, flag; and after the wait every wave forgets what it has cached
        assert any("vmcnt(0)" in one and "s_barrier" in two for one, two in pairwise(waits))
        assert re.search(r"buffer_inv sc0 sc1", text)


def test_a_wait_that_ends_nowhere_names_the_rank_that_is_waited_for() -> None:
    """By the kernel's own limit: every rank leaves, the others because they are told."""
    chains = Chains(3)
    for chain in chains.chains:
        chain.limit = 300
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
