"""Attention in latent space over the paged cache: split over positions, then merged."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import matmul, narrow


@triton.jit
def attend(
    query, pool, selection, table, positions, partial, stats, scale,
    max_pages, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TOPK: tl.constexpr, PAGE: tl.constexpr,
    SELECTED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, HEAD_ROWS: tl.constexpr,
):  # fmt: skip
    """All heads of a row over SPLIT of its positions, grid (rows, SPLITS).

    SELECTED: the positions are the slots selection [rows, TOPK], min(TOPK, position + 1) of them; else all up to the
    row's own. query [rows, HEADS, LATENT + ROPE]; pool [slots, LATENT + ROPE]. Leaves partial float32 [rows, SPLITS,
    HEADS, LATENT], not normalized, and stats [rows, SPLITS, HEADS, 2]: the maximum and the sum. Splits behind the last
    position leave nothing.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = LATENT + ROPE
    count = tl.load(positions + row) + 1
    if SELECTED:
        count = tl.minimum(count, TOPK)
    begin = split * SPLIT
    if begin >= count:
        return
    h = tl.arange(0, HEAD_ROWS)
    n, r, j = tl.arange(0, LATENT), tl.arange(0, ROPE), tl.arange(0, BLOCK)
    own = query + (row * HEADS + h[:, None]) * WIDTH
    latent_query = tl.load(own + n[None, :], mask=h[:, None] < HEADS, other=0.0)
    rope_query = tl.load(own + LATENT + r[None, :], mask=h[:, None] < HEADS, other=0.0)
    most = tl.full([HEAD_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_ROWS], tl.float32)
    acc = tl.zeros([HEAD_ROWS, LATENT], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + SPLIT, count), BLOCK, num_stages=1):  # one or two turns
        at = first + j
        seen = at < count
        if SELECTED:
            slot = tl.load(selection + row * TOPK + at, mask=seen, other=0).to(tl.int64)
        else:
            page = tl.load(table + row * max_pages + at // PAGE, mask=seen, other=0)
            slot = page.to(tl.int64) * PAGE + at % PAGE
        entries = pool + slot[:, None] * WIDTH
        latent = tl.load(entries + n[None, :], mask=seen[:, None], other=0.0)
        rope = tl.load(entries + LATENT + r[None, :], mask=seen[:, None], other=0.0)
        scores = matmul(latent_query, tl.trans(latent)) + matmul(rope_query, tl.trans(rope))
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + matmul(narrow(weights, latent.dtype), latent)
        most = higher
    at = (row * SPLITS + split) * HEADS + h
    tl.store(partial + at[:, None] * LATENT + n[None, :], acc, mask=h[:, None] < HEADS)
    tl.store(stats + at * 2, most, mask=h < HEADS)
    tl.store(stats + at * 2 + 1, total, mask=h < HEADS)


@triton.jit
def merge(
    partial, stats, positions, out,
    HEADS: tl.constexpr, LATENT: tl.constexpr, TOPK: tl.constexpr, SELECTED: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's head from its splits, grid (rows * HEADS, LATENT / BLOCK): out [rows, HEADS, LATENT]."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    count = tl.load(positions + row) + 1
    if SELECTED:
        count = tl.minimum(count, TOPK)
    s = tl.arange(0, triton.next_power_of_2(SPLITS))
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = s * SPLIT < count
    at = (row * SPLITS + s) * HEADS + head
    most = tl.load(stats + at * 2, mask=there, other=float("-inf"))
    factor = tl.exp(most - tl.max(most, 0))
    total = tl.sum(factor * tl.load(stats + at * 2 + 1, mask=there, other=0.0), 0)
    parts = tl.load(partial + at[:, None] * LATENT + n[None, :], mask=there[:, None], other=0.0)
    merged = tl.sum(parts * factor[:, None], 0) / total
    tl.store(out + (row * HEADS + head) * LATENT + n, narrow(merged, out.dtype.element_ty))
