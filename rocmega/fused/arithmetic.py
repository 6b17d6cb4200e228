"""What several kernels compute: rounding, matrix units, norms and rotations."""

import triton
import triton.language as tl

# Triton's interpreter truncates where it should round to bf16, and multiplies the bits of bf16 matrices as integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 x in another dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def ordered(values):
    """Float32 as uint32 of the same order; -0 counts as 0."""
    bits = (values + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def matmul(a, b):
    """A @ b of one dtype, float32 or bf16, summed in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def wide_matmul(w, x):
    """W @ x where a float32 x may meet narrower weights: then it goes in as two halves."""
    if w.dtype == x.dtype:
        return matmul(w, x)
    high = narrow(x, w.dtype)
    return matmul(w, high) + matmul(w, narrow(x - high.to(tl.float32), w.dtype))


@triton.jit
def inverse_rms(squares, rows, PARTS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr):
    """1 / sqrt(mean of squares + eps), [ROWS], from the sums of squares [rows, PARTS] that a vector's makers left."""
    m = tl.arange(0, ROWS)[:, None]
    p = tl.arange(0, triton.next_power_of_2(PARTS))[None, :]
    parts = tl.load(squares + m * PARTS + p, mask=(m < rows) & (p < PARTS), other=0.0)
    return 1.0 / tl.sqrt(tl.sum(parts, 1) / WIDTH + EPS)


@triton.jit
def rotate(even, odd, cos, sin):
    """Adjacent channels (even, odd) turned by their angles."""
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def rotate_outputs(values, channel, angles, positions, rows, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Rotates 16 outputs of a product, [16, ROWS], that are channels `channel` to `channel + 15` of those that turn.

    angles: float32 [positions, HALF, 2] cosines and sines.
    """
    pair = channel // 2 + tl.arange(0, 8)[:, None]
    m = tl.arange(0, ROWS)[None, :]
    at = tl.load(positions + m, mask=m < rows, other=0)
    cos = tl.load(angles + (at * HALF + pair) * 2)
    sin = tl.load(angles + (at * HALF + pair) * 2 + 1)
    even, odd = tl.split(tl.permute(tl.reshape(values, [8, 2, ROWS]), (0, 2, 1)))
    even, odd = rotate(even, odd, cos, sin)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [16, ROWS])


@triton.jit
def store_outputs(out, stride, first, values, rows, N: tl.constexpr, ROWS: tl.constexpr):
    """Stores 16 outputs [16, ROWS] at columns `first` and up of out [rows, N], rounded to its dtype."""
    n = first + tl.arange(0, 16)[:, None]
    m = tl.arange(0, ROWS)[None, :]
    tl.store(out + m * stride + n, narrow(values, out.dtype.element_ty), mask=(n < N) & (m < rows))


@triton.jit
def store_normed(normed, squares, gain, tile, values, rows, N: tl.constexpr, ROWS: tl.constexpr):
    """Leaves 16 outputs for a norm: value * gain, rounded, and the sum of squares; the division is the reader's."""
    n = tile * 16 + tl.arange(0, 16)[:, None]
    m = tl.arange(0, ROWS)
    scaled = values * tl.load(gain + n, mask=n < N, other=0.0)
    store_outputs(normed, N, tile * 16, scaled, rows, N, ROWS)
    own = tl.where(n < N, values, 0.0)
    tl.store(squares + m * ((N + 15) // 16) + tile, tl.sum(own * own, 0), mask=m < rows)
