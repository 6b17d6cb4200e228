"""The devices that the primitives are tested on."""

from __future__ import annotations

import pytest

from rocmega.drivers import Driver, kind_for, pick
from rocmega.drivers.host import HostDriver


@pytest.fixture(scope="session")
def gpu() -> Driver:
    if kind_for() == "host":
        pytest.skip("no GPU here")
    return pick()


@pytest.fixture(params=["host", "host-seed", "host-check", "gpu"])
def driver(request: pytest.FixtureRequest) -> Driver:
    if request.param == "gpu":
        return request.getfixturevalue("gpu")
    seed = {"host": 0, "host-seed": 4, "host-check": 2}[request.param]
    return HostDriver(seed, check=request.param == "host-check")


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest) -> Driver:
    return request.getfixturevalue("gpu") if request.param == "gpu" else HostDriver()
