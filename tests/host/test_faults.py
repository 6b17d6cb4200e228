"""Single faults, and what the host target says about them."""

from __future__ import annotations

import ctypes
import gc
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from rocmega.drivers.base import Function
from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, StepError
from rocmega.toolchain import Unit, compile
from tests.platform.kit import module as primitives

SOURCE = Path(__file__).with_name("faults.hip")


class Args(ctypes.Structure):
    _fields_ = [("fault", ctypes.c_uint32), *[(name, ctypes.c_uint64) for name in ("flags", "data", "lost")]]


@cache
def function() -> Function:
    return HostDriver().load(compile(Unit("faults", SOURCE, {}, {}), "host")).function("faults", ("first", "second"))


def run(driver: HostDriver, fault: int, *, blocks: int = 1, lost: int = 0x10, peers: bool = False) -> torch.Tensor:
    with driver.shared("flags", 64) as flags, driver.shared("data", 4096, peers=peers) as data:
        args = Args(fault, flags.address, data.address, lost)
        driver.launch(function(), ctypes.addressof(args), blocks, 256)
        return data.tensor.view(torch.int32).clone()


both = pytest.mark.parametrize("check", [False, True])


@both
def test_no_fault(check: bool) -> None:
    for seed in range(3):
        driver = HostDriver(seed, check)
        run(driver, 0, blocks=3)
        assert driver.last_report is not None
        assert driver.last_report.finished
        assert driver.last_report.reports == 0


@both
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"stage first task 0 thread 200: words\[300\] of an array of 256 words"),
        (2, "wave 0 stage first task 0: lanes meet in different collectives"),
        (3, r"polls again and again without pause\(\)"),
        (4, "touches address 0x10, which is not shared memory"),
        (5, "waits for 1 threads at a barrier"),
        (6, "block 0 stage first task 0 thread 0 overflowed its stack"),
        (12, "lanes meet in products of different kinds"),
        (15, r"first task 0 (touches|loads or stores) memory \d+ bytes past the end of data, which has 4096 bytes"),
    ],
)
def test_reported(fault: int, message: str, check: bool) -> None:
    with pytest.raises(DriverError if fault != 5 else StepError, match=message):
        run(HostDriver(0, check), fault)


@pytest.mark.parametrize(
    ("fault", "blocks", "message"),
    [
        (7, 2, r"loads byte 0 of data \(plain\), which block 1 .* stored for epoch 1; missing: acquire_device"),
        (9, 1, "stores byte 0 of data for epoch 1, which block 0 stage first task 0 stored too"),
        (10, 1, r"LDS race: .* count\[0\], which another thread .* in stage second task 3"),
        (13, 1, "loads or stores byte 2 of data"),
        (19, 1, r"LDS race: .* thread [37] .* words\[0\], which another thread"),
        (21, 1, r"LDS race: .* thread (3|200) .* words\[0\], which another thread"),
    ],
)
def test_reported_by_the_checker(fault: int, blocks: int, message: str) -> None:
    with pytest.raises(DriverError, match=message):
        run(HostDriver(1, True), fault, blocks=blocks)


def test_memory_of_other_ranks_is_for_system_scope() -> None:
    with pytest.raises(DriverError, match=r"stage first .* data, which other ranks write, with less than system scope"):
        run(HostDriver(1, True), 9, peers=True)


def test_not_reported() -> None:
    """An acquire makes a plain load good, a barrier an atomic, a wave's barrier what other lanes of the wave wrote."""
    for seed in range(12):
        for fault, blocks in ((8, 2), (11, 1), (20, 1)):
            run(HostDriver(seed, True), fault, blocks=blocks)


@both
def test_wait_that_never_ends(check: bool) -> None:
    start = time.perf_counter()
    message = "block 0 thread 0 stage second task 5 epoch 2 waits for tag 9 of byte 24 of flags"
    with pytest.raises(StepError, match=message) as e:
        run(HostDriver(0, check, watch=True), 16)
    assert (e.value.stage, e.value.task, e.value.expected, e.value.seen) == ("second", 5, 9, 0)
    with pytest.raises(StepError, match="waits for something that it does not load as a pair"):
        run(HostDriver(0, check, watch=True), 17)
    assert time.perf_counter() - start < 5


def test_patience() -> None:
    start = time.perf_counter()
    with pytest.raises(StepError):
        run(HostDriver(patience=0.3), 16)
    assert 0.3 <= time.perf_counter() - start < 5


@both
def test_late_products(check: bool) -> None:
    """Accumulators are looked at by some lanes before others, copied, and left undone."""
    for seed in range(4):
        data = run(HostDriver(seed, check), 18)
        lane = torch.arange(16)
        # Chunks of four k, two ones in each: 8 a product; 13 products into acc, 7 into other.
        assert torch.equal(data[lane], torch.full((16,), 13 * 8 + 1000 * 7 * 8, dtype=torch.int32))


@both
def test_freed_memory(check: bool) -> None:
    driver = HostDriver(0, check)
    buffer = driver.shared("gone", 4096)
    keep, address = buffer.tensor, buffer.address
    buffer.close()
    buffer.close()
    keep[0] = 1  # Python's view is still good
    with pytest.raises(DriverError, match=r"stage first task 0 (touches|loads or stores)"):
        run(driver, 14, lost=address)


def test_memory_is_given_back() -> None:
    driver, before = HostDriver(), Path("/proc/self/maps").read_text().count("memfd:many")
    for _ in range(50):
        buffers = [driver.shared(f"many {i}", 100_000 * (i + 1)) for i in range(3)]
        for buffer in buffers:
            assert not buffer.tensor.any()
            buffer.tensor.fill_(1)
            buffer.close()
    del buffers, buffer
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("memfd:many") == before


@both
def test_shared_between_modules(check: bool) -> None:
    """Memory, and what is known of its epochs, is the process's: two modules see each other's stores."""
    driver = HostDriver(0, check)
    a = torch.arange(4 * 256, dtype=torch.int32)
    with driver.shared("between", 7 * 1024) as between, driver.shared("out", 7 * 1024) as out:
        for module, name, first, second in (
            (primitives(32), "streams", between, out),
            (primitives(16), "copy_plain", out, between),
        ):
            args = (ctypes.c_uint64 * 5)(driver.constant(a), 0, first.address, second.address, 0)
            driver.launch(module.function(name), ctypes.addressof(args), 1, 256)
            assert torch.equal(first.tensor.view(torch.int32)[:1024], a)


def test_refusals() -> None:
    driver = HostDriver()
    with pytest.raises(DriverError, match="has no kernel 'nothing'"):
        primitives().function("nothing")
    with pytest.raises(DriverError, match="waves of 64 threads"):
        driver.launch(function(), 0, 1, 100)
    with pytest.raises(DriverError, match="at least one byte"):
        driver.shared("empty", 0)
    with pytest.raises(DriverError, match="contiguous"):
        driver.constant(torch.zeros(4, 4).t())
