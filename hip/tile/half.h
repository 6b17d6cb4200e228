// Activations in fp16, for targets that widen FP8 weights to fp16 (FP8_BY_F16): one instruction for two weights, where bf16
// takes four (measured on an H200, see docs/performance.md).
//
// An activation is a bf16 number all the same. The 128 of a unit of one row are multiplied by a power of two that brings the
// largest to 2^14 ... 2^15, which makes fp16 hold them exactly down to 2^-32 of the largest; what is smaller loses bits that
// a sum in f32 would lose too. The factor that undoes it lies behind the unit.
#pragma once
#include "tile/lds.h"

constexpr int HALF_FACTOR16 = 16;  // 16-byte units from a unit's first to its factor
#if defined(FP8_BY_F16)
DEVICE void frag_fp8_to_f16(const Frag& f, Frag (&out)[2]) {  // as frag_fp8_to_bf16
  UNROLL for (int piece = 0; piece < PIECES; ++piece) UNROLL for (int i = 0; i < 8; ++i) out[i / 4].w[piece][i % 4] =
      fp8x2_to_f16(f.w[piece][i / 2] >> i % 2 * 16);
}

// The wave's lanes have two words each of one unit: four bf16. To LDS, from word `unit` on.
DEVICE void put_halves(int unit, const u32 (&w)[2]) {
  auto magnitude = [](u32 w) {
    u32 low = w << 16 & 0x7fff0000, high = w & 0x7fff0000;
    return low > high ? low : high;
  };
  u32 a = magnitude(w[0]), b = magnitude(w[1]), exponent = wave_max(a > b ? a : b) >> 23;
  exponent = exponent < 16 ? 16 : exponent;  // so that both factors are normal numbers
  f32 to_half = bits<f32>((268 - exponent) << 23), undo = bits<f32>((exponent - 14) << 23);
  auto halves = [to_half](u32 w) {
    return pack_f16(bits<f32>(w << 16) * to_half, bits<f32>(w & 0xffff0000) * to_half);
  };
  int word = unit + lane_id() * 2;
  lds[word] = halves(w[0]), lds[word + 1] = halves(w[1]);
  if (lane_id() == 0) set_lds_value(unit + HALF_FACTOR16 * 4, undo);
}
#else
DEVICE void put_halves(int, const u32 (&)[2]) {}
#endif
