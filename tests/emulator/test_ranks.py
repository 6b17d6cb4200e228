"""Two ranks' code objects, interleaved in one emulated run, against the host target."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from rocmega.drivers.base import Function, SharedBuffer
from rocmega.parallel.threads import ThreadRanks
from tests.emulator.driver import ARCHS, EmulatorDriver, emulator
from tests.parallel.chain import RankChain

ce = emulator()
pytestmark = pytest.mark.slow
SEEDS = 3


class EmulatedRank(EmulatorDriver):
    """One of several ranks: rank 0 launches for all, with the memory of all."""

    def __init__(self, arch: str, ranks: ThreadRanks, rank: int, team: list[EmulatedRank]) -> None:
        super().__init__(arch)
        self.ranks, self.rank, self.team = ranks, rank, team

    def export(self, buffer: SharedBuffer) -> bytes:
        return struct.pack("<Q", buffer.address)

    def open(self, name: str, handle: bytes, nbytes: int) -> SharedBuffer:
        [address] = struct.unpack("<Q", handle)
        return SharedBuffer(name, address, lambda: pytest.fail("nobody looks at it"), lambda: None, nbytes)

    def launch(self, function: Function, args_address: int, blocks: int, threads: int, *_: Any) -> None:
        arguments = self.ranks.launches.exchange(self.rank, args_address)
        error: Exception | None = None
        if self.rank == 0:
            code, name = function.handle
            launches = [
                ce.Launch(code, name, blocks, threads, struct.pack("<Q", address), rank=rank)
                for rank, address in enumerate(arguments)
            ]
            memory = [part for driver in self.team for part in (*driver._shared.items(), *driver._constants.keys())]
            try:
                ce.launch_many(
                    launches, seed=self.seed, slice_insts=self.slice_instructions, allowed=memory, verbose=False
                )
            except ce.EmulationError as failed:
                error = failed
        error = self.ranks.launches.exchange(self.rank, error)[0]
        if error is not None:
            raise error


def steps(ranks: ThreadRanks, drivers: list[Any], seeds: int) -> list[np.ndarray]:
    """What rank 0 and all others have after each step; the same, or it fails."""
    chains = ranks.run(lambda rank: RankChain(ranks.members[rank], drivers[rank], 2))
    seen = []
    for seed in range(seeds):
        drivers[0].seed = seed
        first, *others = ranks.run(lambda rank: chains[rank].step(3))
        assert all(np.array_equal(first, other) for other in others)
        seen.append(first)
    ranks.run(lambda rank: chains[rank].close())
    return seen


@pytest.mark.parametrize("arch", ARCHS)
def test_two_ranks_agree_with_the_host_target(arch: str) -> None:
    on_host = ThreadRanks(2)
    expected = steps(on_host, on_host.drivers, SEEDS)
    emulated = ThreadRanks(2)
    team: list[EmulatedRank] = []
    team += [EmulatedRank(arch, emulated, rank, team) for rank in range(2)]
    got = steps(emulated, team, SEEDS)
    assert all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))
