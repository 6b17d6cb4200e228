"""Caches of a step in PyTorch: the window's ring, compressors and what they leave in pages, Engram's last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rocmega.cache import PAGE
from rocmega.models.common.choices import Numbers
from rocmega.models.common.formulas import Normed, pair_angles
from rocmega.models.deepseek.cache import LayerCache, Stored, places
from rocmega.models.deepseek.formulas import rope_trailing
from rocmega.models.deepseek.stages import LayerStages


@dataclass(frozen=True)
class Span:
    """The tokens of one forward: B sequences of Q neighbouring tokens each, all at known positions.

    Fields:
        tokens, positions: int64 [B, Q].
        table: int64 [B, P], the sequences' pages for positions 0 to length - 1; unused entries are 0.
        slots: int64 [B], the sequences' slots of state.
        length: positions of the longest sequence once these tokens are in.
        plain, stretched: float32 [B, Q, rope / 2, 2], angles of layers with a window alone, and of the others.
        finished: for each ratio, which tokens end an entry: int64 [F, 2], sequence and token. Found where positions are
            on the host, so that nothing has to come back from a GPU.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    length: int
    plain: torch.Tensor
    stretched: torch.Tensor
    finished: Mapping[int, torch.Tensor]

    def counts(self, ratio: int) -> torch.Tensor:
        """Entries that each token sees, its own among them if it finished one: int64 [B, Q]."""
        return (self.positions + 1) // ratio

    def before(self, size: int) -> torch.Tensor:
        """The `size` positions before each sequence's first token, int64 [B, size]; negative ones do not exist."""
        return self.positions[:, :1] + torch.arange(-size, 0, device=self.positions.device)


@dataclass
class Selection:
    """The entries that each token attends to, shared by a selecting layer and those that follow it.

    Fields, both for blocks of tokens, and empty while everything is chosen:
        parts: places int64 [B, q, K], ascending, and which of them count, bool [B, q, K].
        bounds: likewise, the candidates: blocks of entries that later selections are bound to.
    """

    parts: list[Numbers] = field(default_factory=list)
    bounds: list[Numbers] = field(default_factory=list)

    def clear(self, keep_candidates: bool) -> None:
        """Everything is selected until something is added."""
        self.parts = []
        if not keep_candidates:
            self.bounds = []

    def chosen(self) -> Numbers | None:
        """Places and validity [B, Q, K], None for everything."""
        return _of_all_tokens(self.parts)

    def candidates(self) -> Numbers | None:
        """Blocks and validity [B, Q, K], None for everything."""
        return _of_all_tokens(self.bounds)


def _of_all_tokens(parts: list[Numbers]) -> Numbers | None:
    if not parts:
        return None
    chosen, valid = (torch.cat(of, dim=1) for of in zip(*parts, strict=True))
    return chosen, valid


# Rings of state.


def _read_ring(ring: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A ring's values [slots, size, ...] at positions [B, n]: [B, n, ...]. What does not exist is anything."""
    return ring[slots[:, None], positions % ring.shape[1]]


def _write_ring(ring: torch.Tensor, span: Span, values: torch.Tensor) -> None:
    """Puts what a ring keeps of a span's tokens, [B, Q, ...], into it; of more than it holds, the last."""
    size = ring.shape[1]
    ring[span.slots[:, None], span.positions[:, -size:] % size] = values[:, -size:].to(ring.dtype)


def window_of(window: Stored, span: Span, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the tokens' entries [B, Q, D] to a layer's ring.

    Returns entries float32 [B, K, D] that the span's tokens may see, and which of them each does, bool [B, Q, K].
    """
    ring, stored = window.pool, window.encode(own)
    size = ring.shape[1]
    before = span.before(size - 1)
    entries = torch.cat([_read_ring(ring, span.slots, before), stored], dim=1)
    _write_ring(ring, span, stored)
    at, now = torch.cat([before, span.positions], dim=1)[:, None], span.positions[..., None]
    return window.decode(entries), (at >= 0) & (at <= now) & (at > now - size)


def remember(ring: torch.Tensor, span: Span, size: int, pad: int) -> torch.Tensor:
    """Adds the span's tokens to the last ones of each request, [slots, size].

    Returns each token and those before it, int64 [B, Q, size], newest first; before the request's first, `pad`.
    """
    before = span.before(size - 1)
    known = torch.where(before >= 0, _read_ring(ring, span.slots, before).long(), pad)
    _write_ring(ring, span, span.tokens)
    return torch.cat([known, span.tokens], dim=1).unfold(1, size, 1).flip(-1)


# Entries.


def _places(ratio: int, table: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and place in it of entries int64 [B, n] of sequences with pages [B, P]."""
    pages = table.gather(1, (ratio * (numbers + 1) - 1) // PAGE)
    return pages, numbers % places(ratio)


def entries_of(of: Stored, ratio: int, span: Span) -> torch.Tensor:
    """Everything that the sequences have in a pool of entries of `ratio` tokens: float32 [B, length, D]."""
    numbers = torch.arange(span.length // ratio, device=of.pool.device)
    # A sequence shorter than the longest has fewer pages; what is read of page 0 instead, it does not see.
    numbers = numbers.expand(span.table.shape[0], -1)
    pages, at = _places(ratio, span.table, numbers)
    return of.decode(of.pool[pages, at])


def add_entries(layer: LayerStages, cache: LayerCache, span: Span, x: Normed, frequencies: torch.Tensor) -> None:
    """Runs a layer's compressors on normalized x [B, Q, hidden]: what is finished goes into pages, the rest waits."""
    kind = layer.compressed
    assert kind is not None
    assert cache.entries is not None
    finished = span.finished[kind.ratio]
    sequences, tokens = finished.T
    waiting, waiting_keys = (
        _pending(layer, ring, span, x, field, finished) if ring is not None else None
        for ring, field in ((cache.pending, "entry"), (cache.pending_keys, "key"))
    )
    if not len(finished):
        return
    entries = layer.single(x[sequences, tokens]) if waiting is None else layer.pool(*waiting, "entry")
    ends, table = span.positions[sequences, tokens], span.table[sequences]
    angles = pair_angles(ends + 1 - kind.ratio, frequencies)
    _write(cache.entries, kind.ratio, table, ends, rope_trailing(entries, angles))
    if cache.keys is not None:
        keys = layer.key_of_entry(entries) if waiting_keys is None else layer.pool(*waiting_keys, "key")
        _write(cache.keys, kind.ratio, table, ends, rope_trailing(keys, angles))


def _pending(
    layer: LayerStages, ring: torch.Tensor, span: Span, x: Normed, field: str, finished: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the tokens to a compressor's ring; gives what finished entries are made of, [F, T, 2, width], known [F, T].

    finished int64 [F, 2]: sequence and token at which an entry ends.
    """
    size, before = ring.shape[1], span.before(ring.shape[1])
    own = layer.pending(x, field, span.positions)
    known = torch.cat([_read_ring(ring, span.slots, before), own], dim=1)
    _write_ring(ring, span, own)
    sequences, ends = finished.T
    back = ends[:, None] + torch.arange(1, size + 1, device=ends.device)  # in `known`, which begins `size` earlier
    exists = torch.cat([before, span.positions], dim=1)[sequences[:, None], back] >= 0
    return known[sequences[:, None], back], exists


def _write(into: Stored, ratio: int, table: torch.Tensor, ends: torch.Tensor, entries: torch.Tensor) -> None:
    """Puts entries [F, D] that end at positions [F] of sequences with pages [F, P] into a pool."""
    pages, at = _places(ratio, table, (ends // ratio)[:, None])
    into.pool[pages[:, 0], at[:, 0]] = into.encode(entries)
