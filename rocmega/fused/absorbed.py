"""Products of each head with its own matrix: key_up and value_up."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import store_outputs
from rocmega.fused.tiles import linear


@triton.jit
def absorbed(
    x, tiles, out, rows,
    HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program for a head's 16 outputs, grid (HEADS, N / 16): x [rows, HEADS, K] times HEADS matrices [N, K].

    out: [rows, HEADS, STRIDE], of which the first N are written.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    values = linear(x + head * K, HEADS * K, rows, tiles, tiles, head, tile, N, K, FORMAT, ROWS, BLOCK, STAGES)
    store_outputs(out + head * STRIDE, HEADS * STRIDE, tile * 16, values, rows, N, ROWS)
