"""A token's entries in the paged cache: normalized, rotated, rounded and written to its page."""

import triton
import triton.language as tl

from rocmega.fused.arithmetic import narrow, rotate


@triton.jit
def own_slot(table, positions, row, max_pages, PAGE: tl.constexpr):
    """The cache slot of a row's own token."""
    at = tl.load(positions + row)
    return tl.load(table + row * max_pages + at // PAGE).to(tl.int64) * PAGE + at % PAGE


@triton.jit
def write_rotated(even, odd, angles, at, out, HALF: tl.constexpr):
    """Writes HALF pairs of channels, turned to the angles of position `at` (angles [positions, HALF, 2])."""
    i = tl.arange(0, HALF)
    turn = angles + (at * HALF + i) * 2
    even, odd = rotate(even, odd, tl.load(turn), tl.load(turn + 1))
    tl.store(out + 2 * i, narrow(even, out.dtype.element_ty))
    tl.store(out + 2 * i + 1, narrow(odd, out.dtype.element_ty))


@triton.jit
def write_latent(kv, gain, angles, at, out, LATENT: tl.constexpr, ROPE: tl.constexpr, EPS: tl.constexpr):
    """One row's latent entry from kv [LATENT + ROPE]: RMS norm of the latent, rotated rope channels."""
    n = tl.arange(0, LATENT)
    latent = tl.load(kv + n)
    scale = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / LATENT + EPS)
    tl.store(out + n, narrow(latent * scale * tl.load(gain + n), out.dtype.element_ty))
    i = tl.arange(0, ROPE // 2)
    even, odd = tl.load(kv + LATENT + 2 * i), tl.load(kv + LATENT + 2 * i + 1)
    write_rotated(even, odd, angles, at, out + LATENT, ROPE // 2)


@triton.jit
def write_key(key, norm, angles, at, out, WIDTH: tl.constexpr, ROPE: tl.constexpr, EPS: tl.constexpr):
    """One row's index key from key [WIDTH]: layer norm (norm [2, WIDTH]: weight, bias), first ROPE channels rotated."""
    n = tl.arange(0, WIDTH)
    values = tl.load(key + n)
    mean = tl.sum(values, 0) / WIDTH
    scale = 1.0 / tl.sqrt(tl.sum((values - mean) * (values - mean), 0) / WIDTH + EPS)
    normed = (values - mean) * scale * tl.load(norm + n) + tl.load(norm + WIDTH + n)
    tl.store(out + n, narrow(normed, out.dtype.element_ty), mask=n >= ROPE)
    i = tl.arange(0, ROPE // 2) * 2
    even = (tl.load(key + i) - mean) * scale * tl.load(norm + i) + tl.load(norm + WIDTH + i)
    odd = (tl.load(key + i + 1) - mean) * scale * tl.load(norm + i + 1) + tl.load(norm + WIDTH + i + 1)
    write_rotated(even, odd, angles, at, out, ROPE // 2)
