"""The indexer: scores of all cached positions, and the best TOPK of them by radix selection over all programs.

A score is kept as a uint32 of the same order (a key). Three passes count the keys' digits of 11, 11 and 10 bits, each
among the keys that share the digits found before; then the lowest key that is taken is known, and how many of its
equals are. Two more passes write the chosen positions' cache slots in ascending order. Counting is exact whatever the
order of the programs, so the choice is too: the best scores, of equal ones the lowest positions.
"""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import matmul, ordered

BINS = 2048
COUNTS = 3 * BINS  # of one row: a histogram for each digit


@triton.constexpr_function
def digit_shift(digit):
    """Where a digit begins in a key."""
    return (21, 10, 0)[digit]


@triton.constexpr_function
def digit_bins(digit):
    """Values of a digit."""
    return 1024 if digit == 2 else 2048


@triton.jit
def count_digits(keys, counted, counts, DIGIT: tl.constexpr):
    """Adds the digit's histogram of the keys that are counted to counts [3, 2048]."""
    NUMBER: tl.constexpr = digit_bins(DIGIT)
    digits = ((keys >> digit_shift(DIGIT)) & (NUMBER - 1)).to(tl.int32)
    bins = tl.arange(0, NUMBER)
    # Keys that do not count are counted as digit 0 and taken off again.
    found = tl.histogram(tl.where(counted, digits, 0), NUMBER)
    found -= tl.where(bins == 0, tl.sum(1 - counted.to(tl.int32), 0), 0)
    tl.atomic_add(counts + DIGIT * 2048 + bins, found, mask=found > 0, sem="relaxed")


@triton.jit
def last_digit(counts, room, DIGIT: tl.constexpr):
    """The digit of the lowest key that is taken when `room` keys are, and how many keys with this digit are taken."""
    NUMBER: tl.constexpr = digit_bins(DIGIT)
    bins = tl.arange(0, NUMBER)
    found = tl.load(counts + DIGIT * 2048 + bins)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)  # keys of higher digits
    here = (above < room) & (room <= above + found)
    return tl.sum(tl.where(here, bins, 0), 0), room - tl.sum(tl.where(here, above, 0), 0)


@triton.jit
def prefix(counts, room, DIGITS: tl.constexpr):
    """The lowest key that is taken, of which DIGITS digits are known, zeros behind; and the room among its equals."""
    key = tl.zeros([], tl.uint32)
    for digit in tl.static_range(DIGITS):
        own, room = last_digit(counts, room, digit)
        key = key | (own.to(tl.uint32) << digit_shift(digit))
    return key, room


@triton.jit
def index_scores(
    query, pool, table, positions, weights, keys, counts, rows, max_pages, length, scale, weight_scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One page of a row a program, grid (rows, pages): its keys into keys [rows, length], their first digit counted.

    query [rows, HEADS, WIDTH]; pool [pages, PAGE, WIDTH]; weights float32 [PARTS, rows, HEADS], to be summed.
    """
    row, page = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if page * PAGE > position:
        return
    h, n, j = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    p = tl.arange(0, PARTS)[:, None]
    factors = tl.sum(tl.load(weights + (p * rows + row) * HEADS + h[None, :]), 0) * weight_scale
    queries = tl.load(query + (row * HEADS + h[:, None]) * WIDTH + n[None, :])
    number = tl.load(table + row * max_pages + page).to(tl.int64)
    entries = tl.load(pool + (number * PAGE + j[:, None]) * WIDTH + n[None, :])
    products = tl.maximum(matmul(entries, tl.trans(queries)) * scale, 0.0)
    own = ordered(tl.sum(products * factors[None, :], 1))
    at = page * PAGE + j
    tl.store(keys + row * length + at, own.to(tl.int32, bitcast=True))
    count_digits(own, at <= position, counts + row * 6144, 0)


@triton.jit
def load_keys(keys, positions, row, chunk, length, CHUNK: tl.constexpr):
    """A chunk of a row's keys, their positions, and which of them are up to the row's own."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    seen = at <= tl.load(positions + row)
    own = tl.load(keys + row * length + at, mask=seen, other=0).to(tl.uint32, bitcast=True)
    return own, at, seen


@triton.jit
def count_next(
    keys, positions, counts, length, TOPK: tl.constexpr, DIGIT: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Counts digit DIGIT (1 or 2) of the keys that share the digits before it, grid (rows, chunks)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if chunk * CHUNK > position:
        return
    found, _ = prefix(counts + row * 6144, tl.minimum(position + 1, TOPK), DIGIT)
    own, _, seen = load_keys(keys, positions, row, chunk, length, CHUNK)
    shift: tl.constexpr = digit_shift(DIGIT - 1)
    count_digits(own, seen & (own >> shift == found >> shift), counts + row * 6144, DIGIT)


@triton.jit
def count_taken(keys, positions, counts, taken, length, chunks, TOPK: tl.constexpr, CHUNK: tl.constexpr):
    """How many keys of a chunk are above the lowest that is taken, and equal to it: taken [rows, chunks, 2]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if chunk * CHUNK > position:
        return
    lowest, _ = prefix(counts + row * 6144, tl.minimum(position + 1, TOPK), 3)
    own, _, seen = load_keys(keys, positions, row, chunk, length, CHUNK)
    out = taken + (row * chunks + chunk) * 2
    tl.store(out, tl.sum((seen & (own > lowest)).to(tl.int32), 0))
    tl.store(out + 1, tl.sum((seen & (own == lowest)).to(tl.int32), 0))


@triton.jit
def collect(
    keys, positions, table, counts, taken, selection, length, chunks, max_pages,
    TOPK: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Writes the cache slots of a chunk's chosen positions to their places in selection [rows, TOPK], ascending."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if chunk * CHUNK > position:
        return
    lowest, room = prefix(counts + row * 6144, tl.minimum(position + 1, TOPK), 3)
    c = tl.arange(0, CHUNKS)
    before = taken + (row * chunks + c) * 2
    above = tl.sum(tl.load(before, mask=c < chunk, other=0), 0)
    equal = tl.sum(tl.load(before + 1, mask=c < chunk, other=0), 0)
    own, at, seen = load_keys(keys, positions, row, chunk, length, CHUNK)
    same = (seen & (own == lowest)).to(tl.int32)
    chosen = (seen & (own > lowest)) | ((same != 0) & (equal + tl.cumsum(same, 0) <= room))
    place = above + tl.minimum(equal, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    page = tl.load(table + row * max_pages + at // PAGE, mask=chosen, other=0)
    tl.store(selection + row * TOPK + place, page * PAGE + at % PAGE, mask=chosen)
