"""What doctor and set-up say of machines on which ranks cannot share memory."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from rocmega.drivers.host import HostDriver
from rocmega.errors import RequestError
from rocmega.parallel import traps

MI300X, MI355X, PARTITION = ("gfx942", 304), ("gfx950", 256), ("gfx942", 38)


def test_a_good_machine_has_no_trap() -> None:
    assert not list(traps.of_environment({"HIP_VISIBLE_DEVICES": "0,1"}, [MI300X] * 8))


@pytest.mark.parametrize(
    ("environment", "gpus", "name", "says"),
    [
        ({}, [MI300X, MI355X], "GPU types", "gfx942 with 304 compute units, gfx950 with 256"),
        ({}, [PARTITION] * 8, "partitions", "GPUs of 38 compute units are single XCDs"),
        ({"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}, [], "visible devices", "ROCR_VISIBLE_DEVICES=1"),
        ({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, [], "expandable segments", "cannot be exported"),
    ],
)
def test_traps_of_the_environment(environment, gpus, name, says) -> None:
    [trap] = traps.of_environment(environment, gpus)
    assert trap.name == name
    assert says in trap.detail
    assert bool(trap.cost) == (name != "expandable segments")  # which are torch's, and the buffers are not


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total")
    for total, costs in ((64 << 20, True), (8 << 30, False)):
        monkeypatch.setattr(traps.shutil, "disk_usage", lambda path, total=total: usage(total))
        [trap] = traps.of_shared_memory(tmp_path)
        assert bool(trap.cost) == costs
    assert not list(traps.of_shared_memory(tmp_path / "none"))


def test_another_process_opens_what_this_one_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver()
    assert traps.of_handles(driver) == traps.Trap(
        "memory between processes", "another process opens what this one exports"
    )
    export = driver.export
    monkeypatch.setattr(driver, "export", lambda buffer: export(buffer)[:8] + bytes([255] * 3) + bytes(21))
    trap = traps.of_handles(driver)
    assert "cannot be opened: No such file" in trap.detail
    assert "--pid=host" in trap.cost


def test_ranks_that_differ_are_told_in_what() -> None:
    mine = traps.account(HostDriver())
    traps.check_equal([mine, dict(mine)])
    with pytest.raises(RequestError, match=r"not\. torch: \S+ \(rank 0\), 1\.0 \(rank 1\)\.$"):
        traps.check_equal([mine, {**mine, "torch": "1.0"}])
