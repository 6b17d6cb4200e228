"""The router, and each row's choice of experts."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import ordered, store_outputs
from rocmega.fused.tiles import island_part


@triton.jit
def router(
    x, gain, squares, rows, tiles, parts,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """16 experts over one part of the inputs a program, grid (EXPERTS / 16, PARTS): parts [PARTS, rows, EXPERTS]."""
    tile, part = tl.program_id(0), tl.program_id(1)
    out = island_part(
        x, gain, squares, rows, tiles, tile, part, EXPERTS, HIDDEN, EPS, FORMAT, PARTS, ROWS, BLOCK, STAGES
    )
    store_outputs(parts + part * rows * EXPERTS, EXPERTS, tile * 16, out, rows, EXPERTS, ROWS)


@triton.jit
def route(
    parts, bias, weights, experts, rows,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, FACTOR: tl.constexpr, PARTS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One program a row: weights float32 [rows, EXPERTS] of the TOPK chosen experts, 0 for all others.

    Chosen by score plus bias, of equal sums the lowest expert; weighed by score alone. ALONE: the step has no other
    row, and its slots are known (`experts.gate_up`): experts gets their number, the shared expert and the chosen ones.
    """
    row = tl.program_id(0)
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))
    p = tl.arange(0, PARTS)[:, None]
    logits = tl.sum(tl.load(parts + (p * rows + row) * EXPERTS + e[None, :], mask=e[None, :] < EXPERTS, other=0.0), 0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    biased = ordered(scores + tl.load(bias + e, mask=e < EXPERTS, other=0.0)).to(tl.int64)
    # One number that orders by score and then by the lower expert; no two are equal.
    rank = tl.where(e < EXPERTS, biased * 65536 + (65535 - e), -1)
    chosen = e < 0
    for _ in range(TOPK):
        best = rank == tl.max(rank, 0)
        chosen = chosen | best
        rank = tl.where(best, -1, rank)
    taken = tl.where(chosen, scores, 0.0)
    out = taken / (tl.sum(taken, 0) + 1e-20) * FACTOR
    tl.store(weights + row * EXPERTS + e, out, mask=e < EXPERTS)
    if ALONE:
        tl.store(experts, TOPK + 1)
        tl.store(experts + 1, EXPERTS)
        tl.store(experts + 1 + tl.cumsum(chosen.to(tl.int32), 0), e, mask=chosen)
