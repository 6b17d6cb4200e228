"""Linear maps at the ends of a layer's halves: into the residual stream, and to logits."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import inverse_rms, store_normed, store_outputs
from rocmega.fused.tiles import linear, product, tiles_at


@triton.jit
def load_residual(x, tile, rows, N: tl.constexpr, ROWS: tl.constexpr):
    """16 columns of the residual stream x [rows, N]: [16, ROWS]."""
    n = tile * 16 + tl.arange(0, 16)[:, None]
    m = tl.arange(0, ROWS)[None, :]
    return tl.load(x + m * N + n, mask=(n < N) & (m < rows), other=0.0)


@triton.jit
def add_linear(
    heads, x, gain, normed, squares, rows, tiles, scales,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds heads [rows, K] times a matrix [N, K] to x [rows, N], 16 columns a program; leaves x for its norm."""
    tile = tl.program_id(0)
    out = linear(heads, K, rows, tiles, scales, 0, tile, N, K, FORMAT, ROWS, BLOCK, STAGES)
    out += load_residual(x, tile, rows, N, ROWS)
    store_outputs(x, N, tile * 16, out, rows, N, ROWS)
    store_normed(normed, squares, gain, tile, out, rows, N, ROWS)


@triton.jit
def head(
    x, gain, squares, rows, tiles, logits,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr, GAIN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Logits float32 [rows, N] of x [rows, K], 16 a program. GAIN: x is the residual stream, not yet times `gain`."""
    tile = tl.program_id(0)
    own = tiles_at(tiles, 0, tile, N, K, FORMAT)
    out = product(x, K, gain, rows, own, own, 0, K, FORMAT, GAIN, 1, ROWS, BLOCK, STAGES)
    scale = inverse_rms(squares, rows, (K + 15) // 16, K, EPS, ROWS)[None, :]
    store_outputs(logits, N, tile * 16, out * scale, rows, N, ROWS)
