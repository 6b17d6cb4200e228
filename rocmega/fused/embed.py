"""The residual stream of a step's tokens, and what the first norm needs of it."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import narrow


@triton.jit
def embed(tokens, embedding, gain, x, normed, squares, N: tl.constexpr):
    """One program a row. embedding [vocab, N], N a multiple of 16; leaves x float32 [rows, N], and it for its norm."""
    row = tl.program_id(0)
    PARTS: tl.constexpr = N // 16
    BLOCK: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, BLOCK)
    n = part[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = tl.load(embedding + tl.load(tokens + row).to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(x + row * N + n, values, mask=n < N)
    scaled = values * tl.load(gain + n, mask=n < N, other=0.0)
    tl.store(normed + row * N + n, narrow(scaled, normed.dtype.element_ty), mask=n < N)
    tl.store(squares + row * PARTS + part, tl.sum(values * values, 1), mask=part < PARTS)
