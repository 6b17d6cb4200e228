"""The paged cache: per layer one pool of pages, which requests share through their block tables.

A page holds PAGE neighbouring positions of one request. Kernels and PyTorch see the same memory: each pool is a
driver's shared buffer, and `latent[layer]` and `index[layer]` are views of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import SharedBuffer

PAGE = 64  # positions in a page
NO_PAGE = -1  # block table entry where a request has no page


def pages_for(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE)


class Memory(Protocol):
    """Whatever hands out memory that kernels and PyTorch both see: every driver does."""

    def shared(self, name: str, nbytes: int) -> SharedBuffer: ...


@dataclass(frozen=True)
class TorchMemory:
    """Plain torch memory: for runs of the standard path alone, without a driver."""

    device: str = "cpu"

    def shared(self, name: str, nbytes: int) -> SharedBuffer:
        """Zeroed memory; torch frees it."""
        import torch

        from rocmega.drivers.base import SharedBuffer

        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return SharedBuffer(name, tensor.data_ptr(), tensor, release=lambda: None)


@dataclass(frozen=True)
class CacheSpec:
    """What one cached token is.

    Fields:
        latent_dim: values of a layer's entry: latent, then rotated rope channels.
        index_dim: values of an index key.
        full_index: per layer, whether it has index keys of its own.
        dtype: of all entries, float32 or bfloat16.
        section: the layers that are here, None for all: of the others a cache has empty pools.
    """

    latent_dim: int
    index_dim: int
    full_index: tuple[bool, ...]
    dtype: torch.dtype
    section: range | None = None

    @property
    def layers(self) -> range:
        """The layers that are here."""
        return range(len(self.full_index)) if self.section is None else self.section

    def state_bytes(self) -> int:
        """Bytes of one request beside its pages: none."""
        return 0

    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        layers = self.layers
        values = len(layers) * self.latent_dim + sum(self.full_index[layer] for layer in layers) * self.index_dim
        return PAGE * values * self.dtype.itemsize

    def open(self, pages: int, requests: int, memory: Memory) -> PagedCache:
        """A cache of `pages` pages; requests need nothing beside their pages."""
        return PagedCache(self, pages, memory)


class PageAllocator:
    """A free list of page numbers; the page given back last is given out first. Several may hold a page."""

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(reversed(range(pages)))
        self._holders: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Pages nobody has."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, or raises RequestError and takes none."""
        if count > len(self._free):
            raise RequestError(
                f"the cache is full: {count} more pages of {PAGE} tokens are needed and {len(self._free)} of "
                f"{self.pages} are free. Run fewer or shorter requests at once, or configure a larger cache."
            )
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of pages that are in use."""
        for page in pages:
            self._holders[self._in_use(page)] += 1

    def holders(self, page: int) -> int:
        """How many hold a page; 0 if it is free."""
        return self._holders.get(page, 0)

    def free(self, pages: Iterable[int]) -> None:
        """One holder less; pages that nobody holds are free. A page that is not in use is a bug of the caller."""
        for page in pages:
            self._holders[self._in_use(page)] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)

    def _in_use(self, page: int) -> int:
        if page not in self._holders:
            raise ValueError(f"page {page} is not in use")
        return page


class PageTables:
    """Which pages each request has: what every cache keeps of them.

    Fields:
        pages: how many there are.
        shares_prefixes: whether a request's pages are all that another needs to go on from them.
        undoes: whether a request may go back to an earlier token and write anew what follows: guesses can be wrong.
    """

    shares_prefixes: ClassVar[bool] = True
    undoes: ClassVar[bool] = True

    def __init__(self, pages: int):
        if pages < 1:
            raise RequestError(f"a cache needs at least one page, not {pages}.")
        self.pages = pages
        self.allocator = PageAllocator(pages)
        self._tables: dict[Hashable, list[int]] = {}

    def grow(self, request: Hashable, tokens: int) -> list[int]:
        """Makes room for the request's first `tokens` positions; returns its pages, in order.

        A request begins with its first growth. Raises RequestError, changing nothing, if the cache is full.
        """
        table = self._tables.get(request, [])
        missing = pages_for(tokens) - len(table)
        if missing > 0:
            table = self._tables[request] = table + self.allocator.allocate(missing)
        return list(table)

    def adopt(self, request: Hashable, pages: Sequence[int]) -> None:
        """Begins a request with full pages of others: their contents are its first positions, and stay as they are."""
        assert request not in self._tables, f"request {request} has begun"
        self.allocator.share(pages)
        self._tables[request] = list(pages)

    def pages_of(self, request: Hashable) -> list[int]:
        """The request's pages, in order."""
        return list(self._tables.get(request, []))

    def release(self, request: Hashable) -> None:
        """Gives all pages of a request back; a request without pages is fine."""
        self.allocator.free(self._tables.pop(request, []))

    def block_table(self, requests: Sequence[Hashable], max_pages: int | None = None) -> torch.Tensor:
        """The requests' pages, int32 [len(requests), max_pages] on the CPU, padded with NO_PAGE.

        max_pages: width of the table; the longest request's pages if not given.
        """
        import torch

        tables = [self._tables.get(request, []) for request in requests]
        longest = max((len(table) for table in tables), default=0)
        width = longest if max_pages is None else max_pages
        if longest > width:
            raise RequestError(
                f"a request has {longest} pages and the block table is {width} wide: raise max_model_len."
            )
        out = torch.full((len(tables), width), NO_PAGE, dtype=torch.int32)
        for row, table in enumerate(tables):
            out[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        return out


class PagedCache(PageTables):
    """Latent and index caches of all layers, with a block table per request.

    Fields:
        latent: per layer, spec.dtype [pages, PAGE, latent_dim].
        index: per layer, spec.dtype [pages, PAGE, index_dim], None in layers that share another's selection.
    """

    def __init__(self, spec: CacheSpec, pages: int, memory: Memory):
        super().__init__(pages)
        self.spec = spec
        self._latent_buffers: list[SharedBuffer | None] = []
        self._index_buffers: list[SharedBuffer | None] = []
        for layer, full in enumerate(spec.full_index):
            here = layer in spec.layers
            latents = memory.shared(f"latent_cache[{layer}]", self._nbytes(spec.latent_dim)) if here else None
            keys = memory.shared(f"index_cache[{layer}]", self._nbytes(spec.index_dim)) if here and full else None
            self._latent_buffers.append(latents)
            self._index_buffers.append(keys)
        self.latent = [self._view(buffer, spec.latent_dim) for buffer in self._latent_buffers]
        self.index = [
            self._view(buffer, spec.index_dim) if full else None
            for buffer, full in zip(self._index_buffers, spec.full_index, strict=True)
        ]

    def _nbytes(self, width: int) -> int:
        return self.pages * PAGE * width * self.spec.dtype.itemsize

    def _view(self, buffer: SharedBuffer | None, width: int) -> torch.Tensor:
        if buffer is None:
            import torch

            return torch.empty(0, PAGE, width, dtype=self.spec.dtype)
        return buffer.tensor.view(self.spec.dtype).view(self.pages, PAGE, width)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self.latent[self.spec.layers[0]].device

    def latent_address(self, layer: int) -> int:
        """What kernels are given for `latent[layer]`; 0 if it is not here."""
        return _address(self._latent_buffers[layer])

    def index_address(self, layer: int) -> int:
        """What kernels are given for `index[layer]`; 0 in layers without index keys, or not here."""
        return _address(self._index_buffers[layer])

    def memory(self) -> Iterator[torch.Tensor]:
        """All that is cached, pool by pool."""
        for pool in (*self.latent, *self.index):
            if pool is not None:
                yield pool

    def bytes(self) -> int:
        """Device bytes of all pages."""
        return self.pages * self.spec.page_bytes()

    def close(self) -> None:
        """Frees the memory; the views must not be used afterwards."""
        for buffer in (*self._latent_buffers, *self._index_buffers):
            if buffer is not None:
                buffer.close()


def _address(buffer: SharedBuffer | None) -> int:
    return 0 if buffer is None else buffer.address
