// Conversions and functions that give the same bits on every target, and sums in a fixed order.
#pragma once
#include "platform.h"

template <class To, class From> DEVICE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

DEVICE f32 larger(f32 a, f32 b) { return a > b ? a : b; }

// bf16, nearest even. A NaN stays one.
DEVICE u32 to_bf16(f32 f) {
  u32 u = bits<u32>(f);
  return f == f ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : u >> 16 | 0x40;
}
DEVICE f32 from_bf16(u32 h) { return bits<f32>(h << 16); }
DEVICE u32 pack_bf16(f32 low, f32 high) {
#if defined(NATIVE_PACK_BF16)
  return native_pack_bf16(low, high);
#else
  return to_bf16(low) | to_bf16(high) << 16;
#endif
}

// By our own polynomials: the hardware's differ in the last bits, so no target could be compared with another. Results
// below 2^-126 are 0, those from 2^128 on infinite; relative error at most 2e-7.
DEVICE f32 exp2_parts(f32 whole, f32 f) {  // 2^whole * 2^f, |f| <= 1/2
  f32 p = 1.5403530e-4f;
  p = __builtin_fmaf(p, f, 1.3333558e-3f);
  p = __builtin_fmaf(p, f, 9.6181291e-3f);
  p = __builtin_fmaf(p, f, 5.5504109e-2f);
  p = __builtin_fmaf(p, f, 2.4022651e-1f);
  p = __builtin_fmaf(p, f, 6.9314718e-1f);
  p = __builtin_fmaf(p, f, 1.f);
  return bits<f32>(bits<u32>(p) + ((u32)(i32)whole << 23));
}
DEVICE f32 exp2_exact(f32 x) {
  f32 in_range = x < -126.f ? -126.f : x > 128.f ? 128.f : x, whole = __builtin_rintf(in_range);
  f32 v = exp2_parts(whole, in_range - whole);
  return x < -126.f ? 0.f : v;
}
DEVICE f32 exp_exact(f32 x) {
  constexpr f32 LOG2E = 1.44269502f, LOG2E_LOW = 1.92596299e-8f;
  f32 in_range = x < -87.33654f ? -87.33654f : x > 89.f ? 89.f : x, whole = __builtin_rintf(in_range * LOG2E);
  whole = whole > 128.f ? 128.f : whole;
  f32 f = __builtin_fmaf(in_range, LOG2E_LOW, __builtin_fmaf(in_range, LOG2E, -whole));
  f32 v = exp2_parts(whole, f);
  return x < -87.33654f ? 0.f : x > 88.722839f ? __builtin_inff() : v;
}
DEVICE f32 sigmoid(f32 x) { return 1.f / (1.f + exp_exact(-x)); }
DEVICE f32 silu(f32 x) { return x / (1.f + exp_exact(-x)); }

// The sum of term(0..63) in one fixed tree, whatever the width of the wave: where a wave has 32 lanes, the first halving
// is done in the lane.
template <class Term> DEVICE f32 wave_sum64(Term term) {
  f32 v = term(lane_id());
  for (int slot = lane_id() + WIDTH; slot < 64; slot += WIDTH) v += term(slot);
  return wave_sum(v);
}

// True for all threads if true for one. Also a barrier; callers have another barrier between two calls.
SHARED(u32, any_of_wave, WAVES);
DEVICE bool block_any(bool mine) {
  bool wave = wave_any(mine);
  if (lane_id() == 0) any_of_wave[wave_id()] = wave;
  block_barrier();
  u32 any = 0;
  UNROLL for (int w = 0; w < WAVES; ++w) any |= any_of_wave[w];
  return any != 0;
}
// The sum over all threads: a tree in each wave, then the waves in order. Also a barrier, as block_any.
SHARED(f32, sum_of_wave, WAVES);
DEVICE f32 block_sum(f32 mine) {
  f32 wave = wave_sum(mine);
  if (lane_id() == 0) sum_of_wave[wave_id()] = wave;
  block_barrier();
  f32 sum = 0;
  UNROLL for (int w = 0; w < WAVES; ++w) sum += sum_of_wave[w];
  return sum;
}

// FP8 e4m3, as checkpoints have it (OCP: no infinity, 0x7f and 0xff are NaN) and as gfx942's instructions have it (FNUZ:
// half the value for the same byte, 0x80 is the only NaN). E2M1 and E8M0, the MX formats.
DEVICE f32 fp8_ocp(u32 byte) {
  f32 v = bits<f32>((byte & 0x7f) << 20) * 0x1p120f;  // exact, subnormals too
  u32 u = bits<u32>(v) | (byte & 0x80) << 24;
  return bits<f32>((byte & 0x7f) == 0x7f ? u | 0x7fc00000 : u);
}
DEVICE f32 fp8_fnuz(u32 byte) {
  f32 v = bits<f32>((byte & 0x7f) << 20) * 0x1p119f;
  return bits<f32>((byte & 0xff) == 0x80 ? 0x7fc00000 : bits<u32>(v) | (byte & 0x80) << 24);
}
DEVICE f32 e2m1(u32 nibble) {
  return bits<f32>(bits<u32>(bits<f32>((nibble & 7) << 22) * 0x1p126f) | (nibble & 8) << 28);
}
DEVICE f32 e8m0(u32 byte) { return bits<f32>(byte == 255 ? 0x7fc00000 : byte == 0 ? 0x00400000 : byte << 23); }

// Nearest even; what is too large becomes the largest number. MAX its byte, BIAS of the exponent.
template <u32 MAX, int BIAS> DEVICE u32 to_fp8(f32 f) {
  u32 u = bits<u32>(f), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff, byte;
  constexpr u32 LEAST = (128 - BIAS) << 23;  // 2^(1 - BIAS), the smallest normal number
  if (magnitude >= LEAST)
    byte = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - ((127 - BIAS) << 3);
  else  // adding 2^(1 - BIAS + 20) rounds to multiples of the smallest subnormal number
    byte = bits<u32>(bits<f32>(magnitude) + bits<f32>(LEAST + (20 << 23))) - (LEAST + (20 << 23));
  byte = byte > MAX ? MAX : byte;
  return sign | byte;
}
DEVICE u32 to_fp8_ocp(f32 f) { return f == f ? to_fp8<0x7e, 7>(f) : 0x7f; }  // largest 448
DEVICE u32 to_fp8_fnuz(f32 f) {                                              // largest 240; there is no -0
  u32 byte = to_fp8<0x7f, 8>(f);
  return f == f ? byte == 0x80 ? 0 : byte : 0x80;
}

// Eight E2M1 numbers, the low nibble first, times their group's E8M0 scale, as packed bf16. Exact where bf16 has the number.
DEVICE void e2m1_to_bf16(u32 eight, u32 scale, u32 (&out)[4]) {
#if defined(NATIVE_E2M1)
  native_e2m1_to_bf16(eight, e8m0(scale), out);
#else
  f32 factor = e8m0(scale);
  UNROLL for (int i = 0; i < 4; ++i) {
    f32 low = e2m1(eight >> 8 * i & 15) * factor, high = e2m1(eight >> (8 * i + 4) & 15) * factor;
    out[i] = bits<u32>(low) >> 16 | (bits<u32>(high) & 0xffff0000);
  }
#endif
}

// A tile of 64 columns of FP8 as two of 32 columns of bf16, and one of 32 columns of bf16 as two of 16 of f32. A column is
// a summation index, so only A and B have to agree on its place: chunk c of tile p are columns 16c + 8p and the next 7 of
// the FP8 tile; or 8c + 4p and the next 3 of the bf16 tile. So activations kept in the order of columns are read for tile p
// in 16-byte units 2c + p.
DEVICE void frag_fp8_to_bf16(const Frag& f, Frag (&out)[2]) {
  UNROLL for (int piece = 0; piece < PIECES; ++piece) {
    u32 wide[8];
    fp8_to_bf16(f.w[piece], wide);
    UNROLL for (int i = 0; i < 8; ++i) out[i / 4].w[piece][i % 4] = wide[i];
  }
}
// The same of FNUZ bytes, where the target converts them; elsewhere as OCP, which is twice the value.
#if defined(NATIVE_FNUZ)
constexpr f32 FNUZ_TIMES = 1;
#else
constexpr f32 FNUZ_TIMES = 2;
DEVICE void fnuz_to_bf16(const u32 (&from)[4], u32 (&to)[8]) { fp8_to_bf16(from, to); }
#endif
DEVICE void frag_fnuz_to_bf16(const Frag& f, Frag (&out)[2]) {
  UNROLL for (int piece = 0; piece < PIECES; ++piece) {
    u32 wide[8];
    fnuz_to_bf16(f.w[piece], wide);
    UNROLL for (int i = 0; i < 8; ++i) out[i / 4].w[piece][i % 4] = wide[i];
  }
}
DEVICE void frag_bf16_to_f32(const Frag& f, Frag (&out)[2]) {
  UNROLL for (int p = 0; p < 2; ++p) UNROLL for (int piece = 0; piece < PIECES; ++piece)
      UNROLL for (int i = 0; i < 4; ++i) {
    u32 w = f.w[piece][2 * p + i / 2];
    out[p].w[piece][i] = i % 2 ? w & 0xffff0000 : w << 16;
  }
}
