// The input of a matrix stage: from tagged pairs (or the embedding) into LDS, converted, perhaps RMS-normalized.
//
// All rows of the step go to LDS as [row][k], in chunks of k if they do not fit at once. Each thread asks for several pairs
// before it looks at the first: one round trip to memory for all of them instead of one each.
// RMS norm is deferred: LDS holds x * weight, and the product is multiplied by 1 / rms(x), which is known after one pass.
#pragma once
#include "handoff/step.h"
#include "tile/tile.h"

struct Two {
  Pair v[2];
};

// [rows][stride] tagged pairs.
struct PairRows {
  static constexpr bool NORM = false;
  const Pair* base;
  u32 stride, tag;

  DEVICE const Pair* at(int row, int k) const { return base + (u32)row * stride + k; }
  DEVICE Two ask(int row, int k) const { return {{load_pair(at(row, k), tag), load_pair(at(row, k + 1), tag)}}; }
  DEVICE bool take(const Step& s, int row, int k, Two& two, f32 (&v)[2]) const {
    bool ok = s.settle(at(row, k), tag, two.v[0]) && s.settle(at(row, k + 1), tag, two.v[1]);
    v[0] = value_of(two.v[0]), v[1] = value_of(two.v[1]);
    return ok;
  }
};

// The residual stream: tagged pairs, or, before the first layer, the embedding of each row's token. That costs no hand-off:
// every reader looks its values up by itself.
template <class Table, int HIDDEN> struct Residual {
  static constexpr bool NORM = false;
  PairRows pairs;         // base null: the embedding
  const void* embedding;  // [vocabulary][HIDDEN]
  const u32* tokens;      // [rows]

  DEVICE Two ask(int row, int k) const {
    if (pairs.base) return pairs.ask(row, k);
    u64 at = (u64)load_constant(tokens + row) * HIDDEN + k;
    if constexpr (Table::ACT_BYTES == 4) {
      const u32* from = (const u32*)embedding + at;
      return {{{load_constant(from), pairs.tag}, {load_constant(from + 1), pairs.tag}}};
    } else {
      u32 both = load_constant((const u32*)embedding + at / 2);
      return {{{both << 16, pairs.tag}, {both & 0xffff0000u, pairs.tag}}};
    }
  }
  DEVICE bool take(const Step& s, int row, int k, Two& two, f32 (&v)[2]) const {
    if (pairs.base) return pairs.take(s, row, k, two, v);
    v[0] = value_of(two.v[0]), v[1] = value_of(two.v[1]);
    return true;
  }
};

// Sums of squares of the last normalized input, each wave's share. Valid from the barrier that ends its fill() to the next.
SHARED(f32, squares, ROWS * WAVES);

template <class Inner> struct Normed {
  static constexpr bool NORM = true;
  Inner inner;
  const f32* weight;  // [K]

  DEVICE Two ask(int row, int k) const { return inner.ask(row, k); }
  DEVICE bool take(const Step& s, int row, int k, Two& two, f32 (&v)[2]) const { return inner.take(s, row, k, two, v); }
};
DEVICE f32 inverse_rms(int row, int k, f32 eps) {
  f32 sum = 0;
  UNROLL for (int w = 0; w < WAVES; ++w) sum += (f32)squares[row * WAVES + w];
  return 1.f / __builtin_sqrtf(sum / (f32)k + eps);
}

template <class F, int K, int GRAIN, class Source> struct Input {
  static constexpr int PADDED = padded<F>(K), PER_16 = 16 / F::ACT_BYTES;
  static constexpr int NEED = (K + 1) / 2 < 16 ? 16 : (K + 1) / 2;  // threads that a row can use
  static constexpr int PER_ROW = Source::NORM || NEED >= THREADS ? THREADS : NEED >= 128 ? 128 : NEED >= 64 ? 64 : NEED >= 32 ? 32 : 16;
  static constexpr int TURNS = (PADDED / 2 + PER_ROW - 1) / PER_ROW, BATCH = TURNS < 8 ? TURNS : 8;
  static_assert(ROWS * (GRAIN * F::ACT_BYTES / 16 + 1) <= ACT_WORDS / 4, "a chunk of all rows has to fit in LDS");

  const Step& s;
  Source source;
  int chunk, stride16;  // k of a chunk; 16-byte units from row to row
  int have = -1;        // the chunk in LDS

  DEVICE Input(const Step& s, const Source& source) : s(s), source(source) {
    int fit = (ACT_WORDS / 4 / (int)s.rows - 1) * PER_16 / GRAIN * GRAIN;
    chunk = fit >= PADDED ? PADDED : fit;
    stride16 = chunk / PER_16 + 1;  // one more: rows would begin at the same bank
  }
  DEVICE void change(const Source& other) { source = other, have = -1; }

  // Where this lane's columns of the activations begin, in 16-byte units. Rows beyond the last read the last one's.
  DEVICE void columns(int (&at)[PIECES]) const {
    UNROLL for (int p = 0; p < PIECES; ++p) {
      int row = frag_row(p);
      at[p] = (row < (int)s.rows ? row : (int)s.rows - 1) * stride16;
    }
  }

  // Brings [begin, begin + chunk) into LDS, unless it is there. Uniform over the block; ends with a barrier. The caller has
  // had a barrier since the last use of LDS.
  DEVICE bool fill(int begin) {
    if (begin == have) return true;
    bool ok = true;
    if constexpr (Source::NORM) {
      if (chunk == PADDED)
        ok = pass<true, true>(0, PADDED);
      else
        ok = (begin || pass<false, true>(0, PADDED)) && pass<true, false>(begin, begin + chunk);
    } else {
      ok = pass<true, false>(begin, begin + chunk);
    }
    have = begin;
    return s.all_ok(ok);
  }

 private:
  template <bool STORE, bool SQUARES> DEVICE bool pass(int begin, int end) {
    if (end > PADDED) end = PADDED;
    bool ok = true;
    int lane = thread_id() % PER_ROW;
    for (int row = thread_id() / PER_ROW; row < (int)s.rows; row += THREADS / PER_ROW) {
      f32 sum = 0;
      for (int from = begin / 2; from < end / 2; from += PER_ROW * BATCH) {
        Two two[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
          int k = 2 * (from + b * PER_ROW + lane);
          if (k < end && k < K) two[b] = source.ask(row, k);
        }
        UNROLL for (int b = 0; b < BATCH; ++b) {
          int k = 2 * (from + b * PER_ROW + lane);
          f32 v[2] = {0, 0};
          if (k < end && k < K) {
            ok = ok && source.take(s, row, k, two[b], v);
            if constexpr (SQUARES) sum = __builtin_fmaf(v[0], v[0], sum), sum = __builtin_fmaf(v[1], v[1], sum);
            if constexpr (Source::NORM) v[0] *= load_constant(source.weight + k), v[1] *= load_constant(source.weight + k + 1);
          }
          if constexpr (STORE)
            if (k < end) put_in_lds(row, k - begin, v);
        }
      }
      if constexpr (SQUARES) {
        sum = wave_sum(sum);
        if (lane_id() == 0) squares[row * WAVES + wave_id()] = sum;
      }
    }
    return ok;
  }
  DEVICE void put_in_lds(int row, int k, const f32 (&v)[2]) const {
    int word = row * stride16 * 4 + k * F::ACT_BYTES / 4;
    if constexpr (F::ACT_BYTES == 4)
      set_lds_value(word, v[0]), set_lds_value(word + 1, v[1]);
    else
      lds[word] = pack_bf16(v[0], v[1]);
  }
};
