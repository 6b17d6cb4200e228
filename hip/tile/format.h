// Weight formats, each with the activations it meets.
//
//   COLUMNS   of a tile of 1 KB                UNIT, TILES   k that belong together, and their tiles
//   AHEAD     units in flight per wave: 4 to 8 KB a wave, about bandwidth x latency of a compute unit
//   ACT_BYTES of an activation as it comes to LDS     GROUP  activations with one scale, 0: they are not quantized
//   UNIT16    16-byte units of LDS of a unit's activations
//   Scale     what a unit carries besides its tiles: nothing, one f32, or a byte (E8M0) a lane
//   multiply(frags, scale, columns, at, acc)  adds a unit's product; its activations begin `at` behind each column's first
#pragma once
#include "tile/half.h"
#include "tile/quantize.h"

constexpr bool ROOMY = LDS_WORDS >= 32768;

struct NoScale {};

// Adds a product of a unit, scaled per column, to the accumulator.
template <class ScaleOf> DEVICE void add_scaled(const Acc& unit, const Columns& x, Acc& acc, ScaleOf scale) {
  UNROLL for (int part = 0; part < ACCS / 4; ++part) {
    if (part && !x.wide) break;
    UNROLL for (int j = 0; j < 4; ++j) {
      int i = part * 4 + j;
      acc.v[i] = __builtin_fmaf(scale(i), unit.v[i], acc.v[i]);
    }
  }
}

struct F32 {
  static constexpr int COLUMNS = 16, UNIT = 16, TILES = 1, AHEAD = 8, ACT_BYTES = 4, GROUP = 0, UNIT16 = 4;
  using Scale = NoScale;
  DEVICE static void multiply(const Frag (&w)[1], NoScale, const Columns& x, int at, Acc& acc) {
    mma_f32(w[0], act_frag(x, at + x.chunk), acc, x.wide);
  }
};

struct Bf16 {
  static constexpr int COLUMNS = 32, UNIT = 32, TILES = 1, AHEAD = 4, ACT_BYTES = 2, GROUP = 0, UNIT16 = 4;
  using Scale = NoScale;
  DEVICE static void multiply(const Frag (&w)[1], NoScale, const Columns& x, int at, Acc& acc) {
    mma_bf16(w[0], act_frag(x, at + x.chunk), acc, x.wide);
  }
};

// bf16 weights, 8 k a lane, times f32 activations from 16-byte unit `at` of each column on.
DEVICE void mma_wide(const Frag& w, const Columns& x, int at, Acc& acc) {
  Frag wide[2];
  frag_bf16_to_f32(w, wide);
  UNROLL for (int p = 0; p < 2; ++p) mma_f32<true>(wide[p], act_frag(x, at + p), acc, x.wide);
}

// bf16 weights with f32 activations, as for the other formats below; always for the router and the indexer's head weights:
// what they decide is discrete.
struct Bf16Wide {
  static constexpr int COLUMNS = 32, UNIT = 32, TILES = 1, AHEAD = 4, ACT_BYTES = 4, GROUP = 0, UNIT16 = 8;
  using Scale = NoScale;
  DEVICE static void multiply(const Frag (&w)[1], NoScale, const Columns& x, int at, Acc& acc) {
    mma_wide(w[0], x, at + 2 * x.chunk, acc);
  }
};

// e4m3 weights, one f32 scale per 128 x 128. FNUZ: bytes as gfx942's instructions read them, half the value of OCP's; the
// packer has doubled the scales and made OCP's -0, which is FNUZ's NaN, a 0.
template <bool FNUZ> struct Fp8Weights {
  static constexpr int COLUMNS = 64, UNIT = 128, TILES = 2, AHEAD = ROOMY && PIECES == 1 ? 4 : 2, ACT_BYTES = 2;
  using Scale = f32;
};
// Widened to bf16 in registers, exactly, for bf16 activations; or both to fp16, where that is cheaper.
template <bool FNUZ> struct Fp8 : Fp8Weights<FNUZ> {
  static constexpr int GROUP = 0;
#if defined(FP8_BY_F16)
  static constexpr int UNIT16 = HALF_FACTOR16 + 1;
#else
  static constexpr int UNIT16 = 16;
#endif
  DEVICE static void multiply(const Frag (&w)[2], f32 scale, const Columns& x, int at, Acc& acc) {
    if (FNUZ) scale *= 1 / FNUZ_TIMES;
#if defined(FP8_BY_F16)
    Acc half[2] = {};  // two chains of instructions that wait for each other
    UNROLL for (int t = 0; t < 2; ++t) {
      Frag wide[2];
      frag_fp8_to_f16(w[t], wide);
      UNROLL for (int p = 0; p < 2; ++p) mma_f16(wide[p], act_frag(x, at + 8 * t + 2 * x.chunk + p), half[t], x.wide);
    }
    UNROLL for (int i = 0; i < ACCS; ++i) half[0].v[i] += half[1].v[i];
    add_scaled(half[0], x, acc, [&](int i) { return scale * lds_value((x.result[i] + at + HALF_FACTOR16) * 4); });
#else
    Acc block = {};
    UNROLL for (int t = 0; t < 2; ++t) {
      Frag wide[2];
      FNUZ ? frag_fnuz_to_bf16(w[t], wide) : frag_fp8_to_bf16(w[t], wide);
      UNROLL for (int p = 0; p < 2; ++p) mma_bf16(wide[p], act_frag(x, at + 8 * t + 2 * x.chunk + p), block, x.wide);
    }
    add_scaled(block, x, acc, [&](int) { return scale; });
#endif
  }
};
// The bf16 numbers widened once more, for f32 activations. Sixteen rows of them leave room for one unit in flight in 64 KB.
template <bool FNUZ> struct Fp8Wide : Fp8Weights<FNUZ> {
  static constexpr int AHEAD = ROOMY ? 2 : 1, ACT_BYTES = 4, GROUP = 0, UNIT16 = 32;
  DEVICE static void multiply(const Frag (&w)[2], f32 scale, const Columns& x, int at, Acc& acc) {
    Acc block = {};
    UNROLL for (int t = 0; t < 2; ++t) {
      Frag wide[2];
      FNUZ ? frag_fnuz_to_bf16(w[t], wide) : frag_fp8_to_bf16(w[t], wide);
      UNROLL for (int p = 0; p < 2; ++p) mma_wide(wide[p], x, at + 16 * t + 4 * x.chunk + 2 * p, block);
    }
    if (FNUZ) scale *= 1 / FNUZ_TIMES;
    add_scaled(block, x, acc, [&](int) { return scale; });
  }
};
// With activations quantized per 128, as the published models do: FP8 matrix instructions on both as they are.
template <bool FNUZ> struct Fp8A8 : Fp8Weights<FNUZ> {
  static_assert(FNUZ == (FP8_FNUZ != 0), "the weights have to be packed for this target's FP8");
  static constexpr int GROUP = 128, UNIT16 = 16;
  DEVICE static void multiply(const Frag (&w)[2], f32 scale, const Columns& x, int at, Acc& acc) {
    Acc block = {};
    UNROLL for (int t = 0; t < 2; ++t) mma_fp8(w[t], act_frag(x, at + 4 * t + x.chunk), block, x.wide);
    add_scaled(block, x, acc, [&](int i) { return scale * lds_value((x.result[i] + at + FP8_GROUP_SCALE16) * 4); });
  }
};

// E2M1 weights with E8M0 scales per 32 of a row: a lane's 16 bytes are one group of 32, its scale one byte.
struct Mxfp4Weights {
  static constexpr int COLUMNS = 128, UNIT = 128, TILES = 1, AHEAD = ROOMY ? 4 : 2, ACT_BYTES = 2, UNIT16 = 16;
  struct Scale {
    u32 e8m0[PIECES];
  };
  // The p-th 8 of a lane's 32 k as bf16, scale included: exact.
  DEVICE static Frag widened(const Frag& w, const Scale& scale, int p) {
    Frag wide;
    UNROLL for (int piece = 0; piece < PIECES; ++piece) e2m1_to_bf16(w.w[piece][p], scale.e8m0[piece], wide.w[piece]);
    return wide;
  }
  DEVICE static void multiply_wide(const Frag& w, const Scale& scale, const Columns& x, int at, Acc& acc) {
    UNROLL for (int p = 0; p < 4; ++p) mma_bf16(widened(w, scale, p), act_frag(x, at + 4 * x.chunk + p), acc, x.wide);
  }
};
struct Mxfp4 : Mxfp4Weights {
  static constexpr int GROUP = 0;
  DEVICE static void multiply(const Frag (&w)[1], const Scale& scale, const Columns& x, int at, Acc& acc) {
    multiply_wide(w[0], scale, x, at, acc);
  }
};
struct Mxfp4Wide : Mxfp4Weights {  // for f32 activations
  static constexpr int AHEAD = ROOMY ? 2 : 1, ACT_BYTES = 4, GROUP = 0, UNIT16 = 32;
  DEVICE static void multiply(const Frag (&w)[1], const Scale& scale, const Columns& x, int at, Acc& acc) {
    UNROLL for (int p = 0; p < 4; ++p) mma_wide(widened(w[0], scale, p), x, at + 8 * x.chunk + 2 * p, acc);
  }
};
// With MXFP8 activations: gfx950's scaled instruction takes both as they are, each in its own order (platform/amd.h);
// elsewhere the activations are in LDS as the bf16 numbers that they stand for.
struct Mxfp4A8 : Mxfp4Weights {
  static constexpr int GROUP = 32;
  DEVICE static void multiply(const Frag (&w)[1], const Scale& scale, const Columns& x, int at, Acc& acc) {
#if defined(NATIVE_MX)
    int begin = at + x.chunk / 2 * 4 + x.chunk % 2, scale_at = at + x.chunk * 4 + MX_GROUP_SCALE16;
    Frag halves[2] = {act_frag(x, begin), act_frag(x, begin + 8)};
    u32 of_group = lds[(x.operand[0] + scale_at) * 4];
    mma_mxfp4(w[0], scale.e8m0[0], halves, of_group, acc);
#else
    multiply_wide(w[0], scale, x, at, acc);
#endif
  }
};

// e4m3 weights whose scales per 32 x 32 are powers of two: E8M0 bytes, one for each of a lane's 16 columns, as MXFP4 has them.
template <bool FNUZ> struct FineFp8Weights {
  static constexpr int COLUMNS = 64, UNIT = 64, TILES = 1, AHEAD = ROOMY && PIECES == 1 ? 4 : 2, GROUP = 0;
  struct Scale {
    u32 e8m0[PIECES];
  };
  // As two operands of bf16, scale included: exact, for e4m3 has 4 bits and bf16 the same exponents as f32.
  DEVICE static void widened(const Frag& w, const Scale& scale, Frag (&wide)[2]) {
    FNUZ ? frag_fnuz_to_bf16(w, wide) : frag_fp8_to_bf16(w, wide);
    UNROLL for (int piece = 0; piece < PIECES; ++piece) {
      f32 factor = e8m0(scale.e8m0[piece]) * (FNUZ ? 1 / FNUZ_TIMES : 1.f);
      UNROLL for (int i = 0; i < 8; ++i) {
        u32& word = wide[i / 4].w[piece][i % 4];
        f32 low = bits<f32>(word << 16) * factor, high = bits<f32>(word & 0xffff0000u) * factor;
        word = bits<u32>(low) >> 16 | (bits<u32>(high) & 0xffff0000u);
      }
    }
  }
};
template <bool FNUZ> struct FineFp8 : FineFp8Weights<FNUZ> {
  static constexpr int ACT_BYTES = 2, UNIT16 = 8;
  DEVICE static void multiply(const Frag (&w)[1], const typename FineFp8Weights<FNUZ>::Scale& scale, const Columns& x,
                              int at, Acc& acc) {
    Frag wide[2];
    FineFp8Weights<FNUZ>::widened(w[0], scale, wide);
    UNROLL for (int p = 0; p < 2; ++p) mma_bf16(wide[p], act_frag(x, at + 2 * x.chunk + p), acc, x.wide);
  }
};
template <bool FNUZ> struct FineFp8Wide : FineFp8Weights<FNUZ> {  // for f32 activations
  static constexpr int ACT_BYTES = 4, UNIT16 = 16;
  DEVICE static void multiply(const Frag (&w)[1], const typename FineFp8Weights<FNUZ>::Scale& scale, const Columns& x,
                              int at, Acc& acc) {
    Frag wide[2];
    FineFp8Weights<FNUZ>::widened(w[0], scale, wide);
    UNROLL for (int p = 0; p < 2; ++p) mma_wide(wide[p], x, at + 4 * x.chunk + 2 * p, acc);
  }
};
// What the packer pads k to.
template <class F> constexpr int K_PADDING = F::UNIT;
template <bool FNUZ> constexpr int K_PADDING<FineFp8<FNUZ>> = 128;
template <bool FNUZ> constexpr int K_PADDING<FineFp8Wide<FNUZ>> = 128;

template <class F> constexpr bool IN_HALVES = F::UNIT16 == HALF_FACTOR16 + 1;

// What activations are rounded to for weights of a format when they are not quantized, which is also what caches hold; and
// the format that takes a matrix with exact activations.
template <int ACT_BYTES> struct ActivationsOfBytes {
  using Type = Bf16;
};
template <> struct ActivationsOfBytes<4> {
  using Type = F32;
};
template <class F> using ActivationsOf = typename ActivationsOfBytes<F::ACT_BYTES>::Type;
template <class F> struct WideOfFormat {
  using Type = F;
};
template <> struct WideOfFormat<Bf16> {
  using Type = Bf16Wide;
};
template <class F> using Wide = typename WideOfFormat<F>::Type;

template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;
