"""How many polls are a second: measured by a kernel that waits, with the loads of a wait between ranks."""

from __future__ import annotations

import re
import time

import pytest

from rocmega.drivers.host import HostDriver
from rocmega.drivers.polls import per_second, unit
from rocmega.errors import DriverError
from rocmega.toolchain import assembly, search


def test_polls_are_counted_and_timed() -> None:
    """Twice as many take twice as long; so what is given is a rate, and the kernel does wait."""
    driver = HostDriver(watch=False)
    few, many = (min(timed(driver, polls) for _ in range(3)) for polls in (500, 8000))
    assert many > 4 * few


def timed(driver: HostDriver, polls: int) -> float:
    rate = per_second(driver, polls)
    assert driver.last_report is not None
    assert polls / rate < 2 * driver.last_report.seconds + 0.01
    return polls / rate


def test_a_kernel_that_does_not_wait_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver()
    monkeypatch.setattr(driver, "launch", lambda *_: time.sleep(0.001))
    with pytest.raises(DriverError, match="ended without having waited"):
        per_second(driver)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.skipif(search("gfx942").found is None, reason="no compiler for AMD GPUs")
def test_it_polls_past_all_caches(arch: str) -> None:
    loads = re.findall(r"global_load_dwordx2 .*", assembly(unit(), arch))
    assert len(loads) == 2
    assert all("sc0 sc1" in load for load in loads)
