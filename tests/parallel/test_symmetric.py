"""Buffers that every rank has: opened by all or by none, given back in order, on stand-ins for both GPU libraries."""

from __future__ import annotations

from typing import Any

import pytest

from rocmega.drivers.gpu import GpuDriver
from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, PeerError, RequestError
from rocmega.parallel import Loopback, TorchGroup
from rocmega.parallel.symmetric import SymmetricBuffer, open_symmetric
from rocmega.parallel.threads import ThreadRanks
from tests.drivers.fakes import Result, open_driver

CALLS = {
    "hip": ("hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipIpcCloseMemHandle", "hipFree"),
    "cuda": ("cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle", "cuMemFree"),
}


class Ranks:
    """Two ranks as threads, each with a GPU that is a stand-in."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = [open_driver(kind, monkeypatch) for _ in range(2)]
        self.drivers: list[GpuDriver] = [driver for driver, _ in opened]
        self.fakes: list[Any] = [fake for _, fake in opened]
        self.threads = ThreadRanks(2)
        self.export, self.open, self.close, self.free = CALLS[kind]

    def symmetric(self) -> list[SymmetricBuffer]:
        members = self.threads.members
        return self.threads.run(lambda rank: open_symmetric(members[rank], self.drivers[rank], "parts", 1000))

    def outcomes(self) -> list[BaseException | None]:
        """What each rank's attempt ended in."""
        members, ended = self.threads.members, [None, None]

        def attempt(rank: int) -> None:
            try:
                open_symmetric(members[rank], self.drivers[rank], "parts", 1000)
            except (DriverError, PeerError) as error:
                ended[rank] = error

        self.threads.run(attempt)
        return ended


@pytest.fixture(params=["hip", "cuda"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(request.param, monkeypatch)


def test_every_rank_opens_every_other_and_closes_in_the_reverse_order(ranks: Ranks) -> None:
    buffers = ranks.symmetric()
    for rank, (buffer, fake) in enumerate(zip(buffers, ranks.fakes, strict=True)):
        assert buffer.addresses[rank] == buffer.own.address
        assert buffer.addresses[1 - rank] == buffers[1 - rank].own.address  # one process: the stand-in's is the same
        assert len(fake.named(ranks.open)) == 1
        assert not fake.named(ranks.close)
    ranks.threads.run(lambda rank: buffers[rank].close())
    for fake in ranks.fakes:
        order = [call[0] for call in fake.calls if call[0] in (ranks.close, ranks.free)]
        assert order == [ranks.close, ranks.free]


@pytest.mark.parametrize("step", ["export", "open"])
def test_what_fails_on_one_rank_fails_on_all_with_its_reason(step: str, ranks: Ranks) -> None:
    ranks.fakes[1].fail[getattr(ranks, step)] = Result.INVALID
    other, failed = ranks.outcomes()
    assert isinstance(failed, DriverError)
    assert isinstance(other, PeerError)
    assert other.rank == 1
    what = {"export": "allocate the shared buffer 'parts'", "open": "open the other ranks' 'parts'"}[step]
    assert str(other).startswith(f"rank 1 could not {what}: {getattr(ranks, step)} failed")
    for fake in ranks.fakes:
        assert len(fake.named(ranks.free)) == 1  # and nothing is left
        assert len(fake.named(ranks.close)) == len(fake.named(ranks.open)) - (step == "open" and fake is ranks.fakes[1])


def test_agreements_may_be_nested() -> None:
    """Rank 1 fails outside, while the others wait inside."""
    threads = ThreadRanks(3)

    def work(rank: int) -> BaseException | None:
        group = threads.members[rank]

        def inner() -> int:
            if rank == 1:
                raise DriverError("no device")
            return group.agree("do more", lambda: 5)

        try:
            group.agree("begin", inner)
        except (DriverError, PeerError) as error:
            return error
        return None

    first, second, third = threads.run(work)
    assert isinstance(second, DriverError)
    assert str(first) == str(third) == "rank 1 could not begin: no device"


def test_a_loopback_moves_addresses_by_the_distance_of_ranks() -> None:
    driver = HostDriver()
    buffer = Loopback(4, 1).symmetric(driver, "parts", 4096, 100)
    own = buffer.own.address
    assert buffer.addresses == [own - 100, own, own + 100, own + 200]
    buffer.close()
    with pytest.raises(RequestError, match="rank 4 of 4"):
        Loopback(4, 4)


def test_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        RequestError, match="this process is alone: start the program with `torchrun --nproc-per-node 2"
    ):
        TorchGroup(2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="2 ranks are wanted and this process is one of 4"):
        TorchGroup(2)
