"""The same kernel on a GPU: any number of blocks gives the same bits, close to the host's."""

from __future__ import annotations

import numpy as np
import pytest

from rocmega.drivers import kind_for, pick
from rocmega.drivers.host import HostDriver
from tests.host.chain import Chain

pytestmark = pytest.mark.skipif(kind_for() == "host", reason="needs a GPU")


def test_same_bits() -> None:
    chain, driver = Chain(layers=3, steps=3), pick()
    units = driver.facts().compute_units
    host, tokens = chain.run(HostDriver(), rows=16, blocks=4)
    for rows in (1, 3, 16):
        first, _ = chain.run(driver, rows=rows, blocks=1)
        for blocks in (1, 2, 3, 5, 7, 16, 33, 64, units - 1, units):
            for _ in range(10):
                out, chosen = chain.run(driver, rows=rows, blocks=blocks)
                assert not any(chain.error)
                assert np.array_equal(out, first), blocks
                assert np.array_equal(chosen, tokens[:, :rows])
        want = host[:, :rows].view(np.float32)
        assert np.abs(first.view(np.float32) - want).max() < 1e-2 * np.abs(want).max()
