"""Gated MLPs: the experts that any row of the step chose, each streamed once for all its rows, and the shared one.

Slot 0 is the shared expert (or the only MLP of a dense layer), slots 1, 2, ... the chosen ones in ascending order. The
grid has room for as many as the rows can choose; programs of slots that nobody chose end at once.
"""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import inverse_rms, store_normed, store_outputs
from rocmega.fused.residual import load_residual
from rocmega.fused.tiles import (
    linear,
    row_pair,
    scale_of_slot,
    scales_at,
    scales_of_slots,
    slot_elements,
    slot_inputs,
    slots_of,
    slots_product,
    tiles_at,
    unit_product,
    unit_slots,
)


@triton.jit
def slot_expert(weights, rows, slot, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a slot (-1 if it has none), and how many slots there are."""
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))[None, :]
    m = tl.arange(0, ROWS)[:, None]
    chosen = tl.load(weights + m * EXPERTS + e, mask=(e < EXPERTS) & (m < rows), other=0.0) != 0
    active = tl.max(chosen.to(tl.int32), 0)
    place = tl.cumsum(active, 0)
    count = tl.sum(active, 0) + 1
    own = tl.max(tl.where((active != 0) & (place == slot), tl.arange(0, active.shape[0]), -1), 0)
    return tl.where(slot == 0, EXPERTS, own), count


@triton.jit
def gate_up(
    normed, squares, rows, weights, tiles, scales, middle, experts,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, EXPERTS: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up * weight, 16 outputs of a slot a program, grid (WIDTH / 16, slots): middle [slots, rows, WIDTH].

    EXPERTS: 0 in dense layers. experts [1 + slots] is the number of slots and then each slot's expert: the router's, if
    there is one row, else it is made here.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    expert, count = slot, slot
    if EXPERTS:
        if ROWS == 1:
            expert = tl.load(experts + 1 + slot)
        else:
            expert, count = slot_expert(weights, rows, slot, EXPERTS, ROWS)
    if expert < 0:
        return
    factor = tl.full([ROWS], 1.0, tl.float32)
    if EXPERTS:
        m = tl.arange(0, ROWS)
        factor = tl.load(weights + m * EXPERTS + expert, mask=m < tl.where(slot == 0, 0, rows), other=1.0)
        if ROWS > 1 and tile == 0:
            tl.store(experts + 1 + slot, expert)
            if slot == 0:
                tl.store(experts, count)
    if ROWS == 1:
        gate, up = row_pair(normed, tiles, scales, 2 * expert, tile, WIDTH, HIDDEN, FORMAT, BLOCK)
        gate, up = gate[:, None], up[:, None]
    else:
        gate = linear(normed, HIDDEN, rows, tiles, scales, 2 * expert, tile, WIDTH, HIDDEN, FORMAT, 16, BLOCK, STAGES)
        up = linear(normed, HIDDEN, rows, tiles, scales, 2 * expert + 1, tile, WIDTH, HIDDEN, FORMAT, 16, BLOCK, STAGES)
    scale = inverse_rms(squares, rows, (HIDDEN + 15) // 16, HIDDEN, EPS, ROWS)[None, :]
    gate, up = gate * scale, up * scale
    out = gate / (1.0 + tl.exp(-gate)) * up * factor[None, :]
    store_outputs(middle + slot * rows * WIDTH, WIDTH, tile * 16, out, rows, WIDTH, ROWS)


@triton.jit
def row_down(
    middle, experts, count, tile, tiles, scales,
    N: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's sum over experts, 16 outputs: their tiles' slots in one long row, BLOCK of them in flight."""
    EACH: tl.constexpr = slots_of(WIDTH, FORMAT)
    acc = tl.zeros([BLOCK, 16], tl.float32)
    for first in range(0, count * EACH, BLOCK):
        number = first + tl.arange(0, BLOCK)
        there = number < count * EACH
        expert = tl.load(experts + 1 + number // EACH, mask=there, other=0)
        slot = number % EACH
        own = tiles_at(tiles, expert, tile, N, WIDTH, FORMAT) + slot * (16 * slot_elements(FORMAT))
        k = slot * slot_inputs(FORMAT)
        x = middle + number // EACH * WIDTH
        part = slots_product(x[:, None], middle, own, k, there, WIDTH, FORMAT, False)
        if FORMAT != "f32" and FORMAT != "bf16":
            own_scales = scale_of_slot(scales_at(scales, expert, tile, N, WIDTH, FORMAT), slot, FORMAT)
            part = part * scales_of_slots(own_scales, there, FORMAT)
        acc += part
    return tl.sum(acc, 0)


@triton.jit
def down(
    middle, experts, x, gain, normed, squares, rows, tiles, scales,
    N: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to x [rows, N] the slots' middle [slots, rows, WIDTH] times their matrices [N, WIDTH], 16 columns each."""
    tile = tl.program_id(0)
    count = tl.load(experts)
    if ROWS == 1:
        out = row_down(middle, experts, count, tile, tiles, scales, N, WIDTH, FORMAT, BLOCK)[:, None]
    else:
        UNITS: tl.constexpr = (slots_of(WIDTH, FORMAT) + unit_slots(FORMAT) - 1) // unit_slots(FORMAT)
        out = tl.zeros([16, 16], tl.float32)
        for step in tl.range(0, count * UNITS, num_stages=STAGES):
            slot = step // UNITS
            expert = tl.load(experts + 1 + slot)
            own = tiles_at(tiles, expert, tile, N, WIDTH, FORMAT)
            own_scales = scales_at(scales, expert, tile, N, WIDTH, FORMAT)
            rows_of = middle + slot * rows * WIDTH
            out += unit_product(rows_of, WIDTH, gain, rows, own, own_scales, step % UNITS, WIDTH, FORMAT, False)
    out += load_residual(x, tile, rows, N, ROWS)
    store_outputs(x, N, tile * 16, out, rows, N, ROWS)
    store_normed(normed, squares, gain, tile, out, rows, N, ROWS)
