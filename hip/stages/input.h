// The input of a matrix stage: from tagged pairs into LDS, converted, perhaps RMS-normalized.
//
// All rows of the step go to LDS as [row][k], in chunks of k if they do not fit at once. Each thread asks for several pairs
// before it looks at the first: one round trip to memory for all of them instead of one each.
// RMS norm is deferred: LDS holds x * weight, and the product is multiplied by 1 / rms(x), which is known after one pass.
#pragma once
#include "handoff/step.h"
#include "tile/tile.h"

// [rows][stride] tagged pairs.
struct PairRows {
  static constexpr bool NORM = false;
  const Pair* base;
  u32 stride, tag;

  DEVICE const Pair* at(int row, int k) const { return base + (u32)row * stride + k; }
  // N values of a row, at k(0) ... k(N - 1).
  template <int N, class At> DEVICE bool take(Step& s, int row, At k, Pair (&got)[N]) const {
    return s.collect(tag, [&](int i) { return at(row, k(i)); }, got);
  }
};

// Sums of squares of the last normalized input, each wave's share. Valid from the barrier that ends its fill() to the next.
SHARED(f32, squares, ROWS* WAVES);

template <class Inner> struct Normed {
  static constexpr bool NORM = true;
  Inner inner;
  const f32* weight;  // [K]

  template <int N, class At> DEVICE bool take(Step& s, int row, At k, Pair (&got)[N]) const {
    return inner.take(s, row, k, got);
  }
};
DEVICE f32 sum_of_squares(int row) {
  f32 sum = 0;
  UNROLL for (int w = 0; w < WAVES; ++w) sum += (f32)squares[row * WAVES + w];
  return sum;
}
DEVICE f32 inverse_rms(int row, int k, f32 eps) { return 1.f / __builtin_sqrtf(sum_of_squares(row) / (f32)k + eps); }

template <class F, int K, int GRAIN, class Source> struct Input {
  static constexpr int PADDED = padded<F>(K), PER_16 = 16 / F::ACT_BYTES;
  static constexpr int NEED = (K + 1) / 2 < 16 ? 16 : (K + 1) / 2;  // threads that a row can use
  static constexpr int PER_ROW = Source::NORM || NEED >= THREADS ? THREADS
                                 : NEED >= 128                   ? 128
                                 : NEED >= 64                    ? 64
                                 : NEED >= 32                    ? 32
                                                                 : 16;
  static constexpr int TURNS = (PADDED / 2 + PER_ROW - 1) / PER_ROW, BATCH = TURNS < 8 ? TURNS : 8;
  static_assert(ROWS * (GRAIN * F::ACT_BYTES / 16 + 1) <= ACT_WORDS / 4, "a chunk of all rows has to fit in LDS");

  Step& s;
  Source source;
  int chunk, stride16;  // k of a chunk; 16-byte units from row to row
  int have = -1;        // the chunk in LDS

  DEVICE Input(Step& s, const Source& source) : s(s), source(source) {
    int fit = (ACT_WORDS / 4 / (int)s.rows - 1) * PER_16 / GRAIN * GRAIN;
    chunk = fit >= PADDED ? PADDED : fit;
    stride16 = chunk / PER_16 + 1;  // one more: rows would begin at the same bank
  }
  DEVICE void change(const Source& other) { source = other, have = -1; }

  // Where the columns' activations begin. Rows beyond the last read the last one's.
  DEVICE Columns columns() const {
    return Columns([this](int row) { return (row < (int)s.rows ? row : (int)s.rows - 1) * stride16; });
  }

  // Brings [begin, begin + chunk) into LDS, unless it is there. Uniform over the block; ends with a barrier. The caller has
  // had a barrier since the last use of LDS.
  DEVICE bool fill(int begin) {
    if (begin == have) return true;
    bool whole = chunk == PADDED, ok = true;
    if (Source::NORM && !whole && !begin) ok = pass(0, PADDED, false, true);
    ok = ok && pass(begin, begin + chunk, true, Source::NORM && whole);
    have = begin;
    if (!s.all_ok(ok)) return false;
    s.input_is_there();
    int count = begin + chunk < PADDED ? chunk : PADDED - begin;
    quantize<F>(s.rows, count, [this](int row) { return row * stride16; });
    return true;
  }

 private:
  // One piece of code for all uses: what a kernel has to fetch of itself counts.
  DEVICE bool pass(int begin, int end, bool store, bool sum_squares) {
    if (end > PADDED) end = PADDED;
    bool ok = true;
    int me = thread_id(), lane = me % PER_ROW;
    for (int row = me / PER_ROW; row < (int)s.rows; row += THREADS / PER_ROW) {
      f32 sum = 0;
      for (int from = begin / 2; from < end / 2; from += PER_ROW * BATCH) {
        // Beyond the end: the last pair again, which costs less than asking each time whether there is one.
        auto k_of = [&](int b) { return 2 * (from + b * PER_ROW + lane); };
        auto inside = [&](int k) { return k < K ? k : K - 2; };
        Pair got[2 * BATCH];
        ok = ok && source.take(s, row, [&](int i) { return inside(k_of(i / 2)) + i % 2; }, got);
        UNROLL for (int b = 0; b < BATCH; ++b) {
          int k = k_of(b);
          if (k >= end) continue;
          f32 v[2] = {k < K ? value_of(got[2 * b]) : 0, k < K ? value_of(got[2 * b + 1]) : 0};
          if constexpr (Source::NORM) sum = __builtin_fmaf(v[1], v[1], __builtin_fmaf(v[0], v[0], sum));
          if constexpr (Source::NORM)
            v[0] *= load_constant(source.weight + inside(k)), v[1] *= load_constant(source.weight + inside(k) + 1);
          if (store) put_in_lds(row, k - begin, v);
        }
      }
      if (Source::NORM && sum_squares) {
        sum = wave_sum(sum);
        if (lane_id() == 0) squares[row * WAVES + wave_id()] = sum;
      }
    }
    return ok;
  }
  DEVICE void put_in_lds(int row, int k, const f32 (&v)[2]) const {
    put_activations<F>(row * stride16 * 4 + k * F::ACT_BYTES / 4, v);
  }
};
