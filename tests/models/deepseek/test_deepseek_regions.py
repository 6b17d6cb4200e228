"""Every region is as long as the kernel needs it: a shorter one is reported, with its name."""

from __future__ import annotations

import pytest
import torch

from rocmega.cache import PAGE
from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError
from rocmega.models.common.kernel import ROWS
from rocmega.models.deepseek import mega
from rocmega.step import StepBatch

LENGTH = 2 * PAGE  # of the longest row: all entries of all pages, and parts of attention, that there can be
LINE = 128  # bytes
# Of V4.1's layers those that compress and select are even, and have the first of two slots.
FIRST_SLOT = {"down_wide", "latent", "key_values", "index_query"}
# Written only where tokens are drawn or penalized, which GLM's tests ask of the code that both families share.
OF_CHOICES = {"logit_flags", "next_tokens", "adjusted"}


@pytest.mark.parametrize("name", ["deepseek-v4-flash-tiny", "deepseek-v4.1-flash-tiny"])
def test_a_region_that_is_too_short_is_reported(name, packed, monkeypatch):
    """Each in turn, by a line of memory, with as many rows and positions as it is made for."""
    config, weights = packed(name)
    driver = HostDriver()
    cache = config.cache_spec(weights.formats.cache).open(ROWS * LENGTH // PAGE, ROWS, driver)
    for row in range(ROWS):
        cache.grow(row, LENGTH)
    positions = torch.arange(LENGTH - ROWS, LENGTH, dtype=torch.int32)
    batch = StepBatch(torch.arange(ROWS, dtype=torch.int32), positions, cache.block_table(range(ROWS)))

    def step() -> None:
        path = mega.MegaPath(config, weights, cache, driver, blocks=3, max_model_len=LENGTH)
        try:
            path.decode(batch)
        finally:
            path.close()

    step()
    sizes = mega.region_bytes(
        config, 1, LENGTH // PAGE, mega.max_splits(config, LENGTH), 3, exact=weights.formats.cache == "f32"
    )
    for region, size in sizes.items():
        # A page's last line is only known to the checks. Those that V4.1 has too were its turn.
        if size <= LINE or region in {"error", *OF_CHOICES}:
            continue
        if name == "deepseek-v4-flash-tiny" and region != "query_squares":
            continue
        short = {**sizes, region: (size // 2 if region in FIRST_SLOT else size) - LINE}
        monkeypatch.setattr(mega, "region_bytes", lambda *_, short=short, **__: short)
        with pytest.raises(DriverError, match=rf"stage [a-z_]+ task \d+ .* past the end of {region}, which has"):
            step()
