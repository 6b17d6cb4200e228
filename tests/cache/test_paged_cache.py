from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.cache import NO_PAGE, PAGE, CacheSpec, PageAllocator, PagedCache, TorchMemory
from rocmega.errors import RequestError

SPEC = CacheSpec(latent_dim=6, index_dim=4, full_index=(True, False, True), dtype=torch.bfloat16)


def make(pages: int = 4) -> PagedCache:
    return PagedCache(SPEC, pages, TorchMemory())


def test_pools_are_views_of_the_shared_memory():
    cache = make()
    assert [tuple(pool.shape) for pool in cache.latent] == [(4, PAGE, 6)] * 3
    assert [pool if pool is None else tuple(pool.shape) for pool in cache.index] == [(4, PAGE, 4), None, (4, PAGE, 4)]
    assert all(pool.dtype == torch.bfloat16 and not pool.any() for pool in cache.latent)
    assert cache.latent_address(1) == cache.latent[1].data_ptr()
    assert cache.index_address(1) == 0
    assert cache.index[2] is not None
    assert cache.index_address(2) == cache.index[2].data_ptr()
    assert cache.bytes() == 4 * PAGE * (3 * 6 + 2 * 4) * 2


def test_growth():
    cache = make()
    assert cache.grow("a", 1) == [0]
    assert cache.grow("a", PAGE) == [0]
    assert cache.grow("b", 0) == []
    assert cache.grow("b", 1) == [1]
    assert cache.grow("a", PAGE + 1) == [0, 2]
    assert cache.grow("a", 3) == [0, 2]
    table = cache.block_table(["a", "b", "nobody"], max_pages=3)
    assert table.dtype == torch.int32
    assert table.tolist() == [[0, 2, NO_PAGE], [1, NO_PAGE, NO_PAGE], [NO_PAGE] * 3]
    assert cache.block_table(["b", "a"]).tolist() == [[1, NO_PAGE], [0, 2]]
    with pytest.raises(RequestError, match=r"2 pages .* 1 wide"):
        cache.block_table(["a"], max_pages=1)


def test_a_full_cache_refuses_and_changes_nothing():
    cache = make()
    cache.grow("a", 2 * PAGE)
    with pytest.raises(RequestError, match=r"3 more pages of 64 tokens are needed and 2 of 4 are free"):
        cache.grow("b", 3 * PAGE)
    assert cache.block_table(["a", "b"]).tolist() == [[0, 1], [NO_PAGE, NO_PAGE]]
    cache.release("a")
    cache.release("a")
    assert len(cache.grow("b", 4 * PAGE)) == 4
    with pytest.raises(RequestError, match="at least one page"):
        make(0)


def test_pages_are_given_back_once():
    allocator = PageAllocator(2)
    [page] = allocator.allocate(1)
    allocator.free([page])
    with pytest.raises(ValueError, match="not in use"):
        allocator.free([page])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6 * PAGE)), max_size=40), st.integers(1, 12))
def test_requests_never_share_a_page(actions, pages):
    """Whatever requests grow, or are released (0 tokens): pages are distinct, kept in order, and none is lost."""
    cache = make(pages)
    tables: dict[int, list[int]] = {}
    for request, tokens in actions:
        before = tables.get(request, [])
        if tokens == 0:
            cache.release(request)
            tables[request] = []
        else:
            needed = max(len(before), -(-tokens // PAGE))
            try:
                tables[request] = cache.grow(request, tokens)
                assert tables[request][: len(before)] == before
                assert len(tables[request]) == needed
            except RequestError:
                assert needed - len(before) > cache.allocator.available
        used = [page for table in tables.values() for page in table]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(pages))
        assert len(used) + cache.allocator.available == pages
