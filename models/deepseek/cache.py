"""DeepSeek's caches: pages of compressed entries, and per request a slot of state of fixed size.

An entry of `ratio` tokens lies in the page that holds its last token's position, so the block table of tokens finds it:
entry w is in page (ratio * (w + 1) - 1) // PAGE of the request, in place w % (PAGE // ratio) of it, or in the page's
only place where a page is not a whole entry. (Half of the pages of ratio 128 then have an empty place: 1 KB in 64
tokens of such a layer, against a second kind of block table.)

State is what a layer needs of the tokens before: a ring of the window's last entries, and rings of the compressors'
inputs, each at place `position % size`. What is older than the request is never read, so a slot needs no clearing.
A request's slot is found by its first page, which nobody else has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rocmega.cache import PAGE, Memory, PageTables
from rocmega.errors import RequestError

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import SharedBuffer
    from rocmega.models.deepseek.config import DeepseekConfig
    from rocmega.models.deepseek.records import Record


def places(ratio: int) -> int:
    """Entries of a page."""
    return max(1, PAGE // ratio)


@dataclass(frozen=True)
class Pool:
    """One layer's memory of a kind.

    Fields:
        shape: of a page's or of a slot's values.
        dtype: of the values.
        paged: a page's; else a slot's.
        record: how entries are stored, in which case the last of `shape` is a record's bytes; None: as values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    paged: bool
    record: Record | None = None

    def bytes(self) -> int:
        """Of one page or slot."""
        from math import prod

        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A pool's memory.

    Fields:
        pool: [pages or slots, *shape].
        record: how entries are stored; None: as values.
    """

    pool: torch.Tensor
    record: Record | None

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Values float32 [..., width] as the pool keeps them."""
        return values.to(self.pool.dtype) if self.record is None else self.record.encode(values)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """What the pool keeps, as float32 values [..., width]."""
        import torch

        return stored.to(torch.float32) if self.record is None else self.record.decode(stored)


@dataclass(frozen=True)
class LayerCache:
    """What one layer reads and writes; None for what there is not.

    Fields:
        window: its ring. pending, pending_keys: its compressors' rings.
        entries, keys: of the layer that makes them, which may be an earlier one.
    """

    window: Stored
    entries: Stored | None
    keys: Stored | None
    pending: torch.Tensor | None
    pending_keys: torch.Tensor | None


@dataclass(frozen=True)
class CacheSpec:
    """What is cached of a model.

    Fields:
        config: whose.
        format: of window, entries and index keys: "f32", "bf16", or "published", see records.py. Compressors' state is
            float32 always, as in the published implementation: a softmax over tokens is still to come.
    """

    config: DeepseekConfig
    format: str

    def pools(self) -> dict[str, Pool]:
        """Name -> pool: "window.3", "entries.3", "keys.3", "pending.3", "pending_keys.3", "recent"."""
        import torch

        c, out = self.config, {}
        for layer, kind in enumerate(c.compressed):
            out[f"window.{layer}"] = self._pool("window", c.sliding_window, c.head_dim, paged=False)
            if kind is None or not c.makes_entries(layer):
                continue
            own_keys = c.makes_keys(layer)
            out[f"entries.{layer}"] = self._pool("entries", places(kind.ratio), c.head_dim, paged=True)
            if own_keys:
                out[f"keys.{layer}"] = self._pool("keys", places(kind.ratio), c.index_head_dim, paged=True)
            twice = 2 if kind.overlap else 1
            if kind.gated:
                ring = (twice * kind.ratio, 2)  # a token's values and its gates
                out[f"pending.{layer}"] = Pool((*ring, twice * c.head_dim), torch.float32, False)
                if own_keys and not c.keys_from_latent:
                    out[f"pending_keys.{layer}"] = Pool((*ring, twice * c.index_head_dim), torch.float32, False)
        if c.engram is not None:
            out["recent"] = Pool((c.engram.max_ngram_size,), torch.int32, False)
        return out

    def record(self, kind: str) -> Record | None:
        """How "window", "entries" or "keys" are stored, None: as values."""
        from rocmega.models.deepseek.records import published_records

        return published_records(self.config)[kind] if self.format == "published" else None

    def entry_bytes(self, kind: str, width: int) -> int:
        """Bytes of one entry of "window", "entries" or "keys"."""
        record = self.record(kind)
        return width * {"f32": 4, "bf16": 2}[self.format] if record is None else record.bytes

    def _pool(self, kind: str, count: int, width: int, *, paged: bool) -> Pool:
        import torch

        record = self.record(kind)
        if record is not None:
            return Pool((count, record.bytes), torch.uint8, paged, record)
        return Pool((count, width), torch.float32 if self.format == "f32" else torch.bfloat16, paged)

    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(pool.bytes() for pool in self.pools().values() if pool.paged)

    def state_bytes(self) -> int:
        """Bytes of one request's state over all layers."""
        return sum(pool.bytes() for pool in self.pools().values() if not pool.paged)

    def open(self, pages: int, requests: int, memory: Memory) -> HybridCache:
        """A cache of `pages` pages, and state for `requests` requests at a time."""
        return HybridCache(self, pages, requests, memory)


class HybridCache(PageTables):
    """The caches of all layers, with a block table and a slot of state per request.

    Fields:
        pools: name -> [pages or slots, *shape], named as in `CacheSpec.pools`.
    """

    shares_prefixes: ClassVar[bool] = False  # what follows a page needs the state at its end, which nobody keeps
    undoes: ClassVar[bool] = False  # a token takes the place in its rings of one that earlier tokens still need

    def __init__(self, spec: CacheSpec, pages: int, requests: int, memory: Memory):
        import torch

        super().__init__(pages)
        self.spec, self.requests = spec, requests
        self._buffers: dict[str, SharedBuffer] = {}
        self.pools: dict[str, torch.Tensor] = {}
        for name, pool in spec.pools().items():
            count = pages if pool.paged else requests
            buffer = self._buffers[name] = memory.shared(_region(name), count * pool.bytes())
            self.pools[name] = buffer.tensor.view(pool.dtype).view(count, *pool.shape)
        self._records = {name: pool.record for name, pool in spec.pools().items()}
        self._free_slots = list(reversed(range(requests)))
        self._slots: dict[Hashable, int] = {}
        self._slot_of_page = torch.full((pages,), -1, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self.pools["window.0"].device

    def address(self, name: str) -> int:
        """What kernels are given for a pool; 0 for one that the layer does not have."""
        return self._buffers[name].address if name in self._buffers else 0

    def of_layer(self, layer: int) -> LayerCache:
        """What a layer reads and writes."""
        kind = self.spec.config.compressed[layer]
        source = layer if kind is None else kind.source
        window, entries, keys = (
            Stored(self.pools[name], self._records[name]) if name in self.pools else None
            for name in (f"window.{layer}", f"entries.{source}", f"keys.{source}")
        )
        assert window is not None
        pending, pending_keys = (self.pools.get(f"{name}.{layer}") for name in ("pending", "pending_keys"))
        return LayerCache(window, entries, keys, pending, pending_keys)

    def memory(self) -> Iterator[torch.Tensor]:
        """All that is cached, pool by pool."""
        yield from self.pools.values()

    def bytes(self) -> int:
        """Device bytes of everything."""
        return self.pages * self.spec.page_bytes() + self.requests * self.spec.state_bytes()

    def slots(self, first_pages: torch.Tensor) -> torch.Tensor:
        """State slots, int64 on the CPU, of the requests that have these first pages.

        Raises RequestError for a page that is no request's first.
        """
        pages = first_pages.long().cpu()
        slots = self._slot_of_page[pages.clamp_min(0)].where(pages >= 0, -1)
        if bool((slots < 0).any()):
            page = int(pages[slots < 0][0])
            raise RequestError(f"page {page} is not the first of any request: grow the request first.")
        return slots

    def grow(self, request: Hashable, tokens: int) -> list[int]:
        """As `PageTables.grow`; a request's first growth takes a slot of state, too."""
        if request not in self._slots and not self._free_slots:
            raise RequestError(
                f"{self.requests} requests have state in the cache and there is room for no more: end one, or "
                "configure more rows (max_rows)."
            )
        table = super().grow(request, tokens)
        if table and request not in self._slots:
            self._slots[request] = self._free_slots.pop()
            self._slot_of_page[table[0]] = self._slots[request]
        return table

    def adopt(self, request: Hashable, pages: Sequence[int]) -> None:
        """As `PageTables.adopt`, for no pages: those of others come without their state."""
        assert not pages, f"request {request} would begin with {len(pages)} pages and no state"
        super().adopt(request, pages)

    def release(self, request: Hashable) -> None:
        """Gives all pages of a request and its state back; a request without any is fine."""
        if request in self._slots:
            self._free_slots.append(self._slots.pop(request))
            self._slot_of_page[self._tables[request][0]] = -1
        super().release(request)

    def close(self) -> None:
        """Frees the memory; the views must not be used afterwards."""
        for buffer in self._buffers.values():
            buffer.close()


def _region(pool: str) -> str:
    """A pool as the region of memory that it is: "window[3]" for "window.3"."""
    kind, _, layer = pool.partition(".")
    return f"{kind}[{layer}]" if layer else kind
