from __future__ import annotations

import pytest
import torch

from rocmega.cache import PAGE, TorchMemory
from rocmega.errors import RequestError
from rocmega.models.deepseek.cache import CacheSpec, places
from rocmega.models.deepseek.config import from_dict
from rocmega.models.deepseek.presets import preset
from rocmega.models.deepseek.published import published_formats
from rocmega.models.deepseek.traffic import cache_reads


def spec(name: str) -> CacheSpec:
    return from_dict(preset(name)).cache_spec("bf16")


def test_pools():
    v4 = spec("deepseek-v4-flash").pools()
    assert v4["window.0"].shape == (128, 512)
    assert v4["entries.2"].shape == (16, 512)
    assert v4["keys.2"].shape == (16, 128)
    assert v4["entries.3"].shape == (1, 512)
    assert v4["pending.2"].shape == (8, 2, 1024)
    assert v4["pending_keys.2"].shape == (8, 2, 256)
    assert v4["pending.3"].shape == (128, 2, 512)
    assert "keys.3" not in v4
    assert "recent" not in v4
    v41 = spec("deepseek-v4.1-flash").pools()
    assert [name for name in v41 if name.startswith(("entries", "keys"))] == [
        f"{kind}.{layer}" for layer in (2, 8, 14, 20) for kind in ("entries", "keys")
    ]
    assert v41["entries.20"].shape == (64, 512)
    assert [name for name in v41 if name.startswith("pending")] == ["pending.2", "pending.8", "pending.14"]
    assert v41["recent"].shape == (4,)


def test_growth_per_token():
    """Of bf16 entries: what a page adds, by hand."""
    assert spec("deepseek-v4-flash").page_bytes() == 2 * (21 * 16 * (512 + 128) + 20 * 512)
    assert spec("deepseek-v4.1-flash").page_bytes() == 2 * (3 * 32 + 64) * (512 + 128)


@pytest.mark.parametrize("ratio", [1, 2, 4, 16, 64, 128, 256])
def test_every_entry_has_a_place_of_its_own(ratio):
    taken = {((ratio * (entry + 1) - 1) // PAGE, entry % places(ratio)) for entry in range(1024 // ratio)}
    assert len(taken) == 1024 // ratio
    assert max(page for page, _ in taken) < 1024 // PAGE


def test_state_belongs_to_requests():
    cache = spec("deepseek-v4-flash-tiny").open(pages=8, requests=2, memory=TorchMemory())
    first, second = cache.grow("a", 65), cache.grow("b", 1)
    slots = cache.slots(torch.tensor([first[0], second[0]]))
    assert sorted(slots.tolist()) == [0, 1]
    with pytest.raises(RequestError, match="2 requests have state"):
        cache.grow("c", 1)
    assert cache.grow("a", 130)[:2] == first
    assert cache.slots(torch.tensor([first[0]])) == slots[0]
    for page in (first[1], 7, -1):
        with pytest.raises(RequestError, match="is not the first of any request"):
            cache.slots(torch.tensor([page]))
    cache.release("a")
    cache.release("a")
    cache.adopt("c", [])
    assert cache.slots(torch.tensor([cache.grow("c", 1)[0]])) == slots[0]


def test_pages_alone_are_no_beginning():
    cache = spec("deepseek-v4-flash-tiny").open(pages=8, requests=2, memory=TorchMemory())
    assert not cache.shares_prefixes
    pages = cache.grow("a", 64)
    with pytest.raises(AssertionError, match="no state"):
        cache.adopt("b", pages)


def test_a_full_cache_takes_no_state():
    cache = spec("deepseek-v4-flash-tiny").open(pages=1, requests=2, memory=TorchMemory())
    with pytest.raises(RequestError, match="the cache is full"):
        cache.grow("a", 65)
    cache.grow("b", 1)
    cache.release("b")
    assert cache.grow("c", 1) == [0]


def test_reads():
    """What a token reads at 8192 tokens, by hand."""
    v4 = from_dict(preset("deepseek-v4-flash"))
    reads = cache_reads(v4, published_formats(v4), 8192)
    assert reads["window entries"] == 43 * 128 * 512 * 2
    assert reads["compressed entries"] == (21 * 512 + 20 * 64) * 512 * 2
    assert reads["index keys"] == 21 * 2048 * 128 * 2
    v41 = from_dict(preset("deepseek-v4.1-flash"))
    reads = cache_reads(v41, published_formats(v41), 60000)
    assert reads["compressed entries"] == 38 * 512 * 512 * 2
    assert reads["index keys"] == (3 * 30000 + 60000 + 4 * 16384) * 128 * 2
