// The input of a matrix stage: tagged words into LDS, each wave the units of k that it multiplies itself.
//
// Whoever publishes activations rounds them as the consumer's matrix instruction wants them, so that here they are only
// copied: a pair carries a word, two bf16 or one f32. Each lane asks for several pairs of words before it looks at the first:
// one round trip to memory for all of them instead of one each.
// RMS norm is deferred: activations are x * weight, and the product is multiplied by 1 / rms(x). The sums of squares come in
// parts, from whoever published the 16 values they are of.
#pragma once
#include "handoff/step.h"
#include "tile/tile.h"

// [rows][stride] tagged f32.
struct PairRows {
  const Pair* base;
  u32 stride, tag;

  DEVICE const Pair* at(int row, int k) const { return base + ((u32)row * stride + (u32)k); }
  // N values of a row, at k(0) ... k(N - 1).
  template <int N, class At> DEVICE bool take(Step& s, int row, At k, Pair (&got)[N]) const {
    return s.collect(tag, [&](int i) { return at(row, k(i)); }, got);
  }
};

// Activations `channel` and the next, to a row of words.
template <class F> DEVICE void put_words(Pair* row, int channel, const f32 (&v)[2], u32 tag) {
  u32 words[WORDS_OF_TWO<F>];
  pack_activations<F>(v, words);
  UNROLL for (int i = 0; i < WORDS_OF_TWO<F>; ++i)
      store_pair(row + (u32)channel * F::ACT_BYTES / 4 + i, {words[i], tag});
}

// 1 / rms of the rows of normalized inputs. Two sets, by turns: a slow wave may still be reading those of the input before.
SHARED(f32, inverse_rms_of, 2 * ROWS);
// After the barrier that ends the first task.
DEVICE f32 inverse_rms(const Step& s, int row) { return inverse_rms_of[s.squares_turn * ROWS + row]; }

// What a stage of matrices reads. Words as the format wants its activations; or, where `weight` is given, f32 that are
// multiplied by it on the way, for what is not rounded and reads little.
struct Source {
  PairRows rows;
  const f32* weight;  // [k] or null
  PairRows sums;      // [rows][k / 16] sums of squares of what is to be normalized, or without base
  f32 eps = 0;        // of the norm
};

// WEIGHTED: whether sources have weights.
template <class F, bool WEIGHTED> struct Input {
  static constexpr int PAIRS = WEIGHTED ? F::UNIT : F::UNIT * F::ACT_BYTES / 4;  // of a unit
  static constexpr int WORDS = WEIGHTED ? WORDS_OF_TWO<F> : 2;                   // of LDS for two pairs
  static constexpr int LOADS = PAIRS / 2, BATCH = 4;
  static_assert(!IN_HALVES<F> || (LOADS == WIDTH && !WEIGHTED), "");
  static_assert(ROWS * (Slice<F>::STRIDE * F::UNIT16 + 1) <= WAVE16, "some turns of all rows have to fit in LDS");

  Step& s;
  const int k, all_turns;
  int turns;      // of a chunk
  int stride16;   // 16-byte units from row to row
  int have = -1;  // the chunk in LDS
  bool summed = false;

  DEVICE Input(Step& s, int k) : s(s), k(k), all_turns((padded<F>(k) / F::UNIT + WAVES - 1) / WAVES) {
    int fit = (s.of_rows(WAVE16) - 1) / F::UNIT16;
    turns = fit >= all_turns ? all_turns : fit / Slice<F>::STRIDE * Slice<F>::STRIDE;
    stride16 = turns * F::UNIT16 | 1;  // odd, or rows would begin at the same bank
  }

  // Where the columns' activations begin.
  DEVICE Columns columns() const {
    int first = wave_id() * WAVE16, last = s.rows - 1;  // which stands for those that are not there
    return Columns([&](int row) { return first + (row < last ? row : last) * stride16; }, MOST_ROWS > 8 && s.rows > 8);
  }

  // Brings this wave's units of turns [begin, begin + turns) into LDS, unless they are there. False if a wait was given up.
  DEVICE bool fill(const Source& source, int begin) {
    if (begin == have) return true;
    have = begin;
    int now = begin + turns < all_turns ? turns : all_turns - begin, rows = s.rows, total = now * rows * LOADS;
    int of_row = WEIGHTED ? k : k * F::ACT_BYTES / 4, lane = lane_id(), first = wave_id() * WAVE16;
    bool ok = true, sums = !summed && source.sums.base, first_time = sums && first_row() < rows;
    Parts asked;
    if (sums) s.squares_turn ^= 1, summed = true;
    if (first_time) ask(source.sums, asked);
    wave_barrier();  // all lanes are done with what was there
    for (int from = 0; from < total; from += WIDTH * BATCH) {
      const Pair* at[BATCH];  // null: nothing there, zeros
      int word[BATCH], pair[BATCH];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * WIDTH + lane, segment = i / LOADS, turn = s.of_rows(segment), row = segment - turn * rows;
        pair[b] = ((begin + turn) * WAVES + wave_id()) * PAIRS + i % LOADS * 2;
        at[b] = i < total && pair[b] < of_row ? source.rows.at(row, pair[b]) : nullptr;
        word[b] = (first + row * stride16 + turn * F::UNIT16) * 4 + i % LOADS * WORDS;
      }
      Pair got[BATCH][2];
      ok = ok && s.collect_twos(source.rows.tag, at, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        if (from + b * WIDTH >= total) break;
        u32 words[WORDS];
        to_words(source, got[b], pair[b], words);
        if constexpr (IN_HALVES<F>)
          put_halves(word[b] - 2 * lane, words);
        else if (from + b * WIDTH + lane < total)
          UNROLL for (int i = 0; i < WORDS; ++i) lds[word[b] + i] = words[i];
      }
    }
    if (first_time) ok = sum(source.sums, source.eps, asked) && ok;
    wave_barrier();
    if (begin == 0) s.input_is_there();
    quantize<F>(now * rows, [&](int i) {
      int turn = s.of_rows(i);
      return first + (i - turn * rows) * stride16 + turn * F::UNIT16;
    });
    return ok;
  }

 private:
  DEVICE void to_words(const Source& source, const Pair (&got)[2], int at, u32 (&words)[WORDS]) const {
    if constexpr (WEIGHTED) {
      f32 v[2] = {bits<f32>(got[0].payload), bits<f32>(got[1].payload)};
      if (at < k) v[0] *= load_constant(source.weight + at), v[1] *= load_constant(source.weight + at + 1);
      pack_activations<F>(v, words);
    } else {
      words[0] = got[0].payload, words[1] = got[1].payload;
    }
  }
  // The sums over the parts: rows are dealt out to the waves, the last first, which have the fewest units. The first is asked
  // for before the input itself is waited for.
  static constexpr int PARTS = 12;  // a lane and round
  struct Parts {
    Pair got[PARTS];
  };
  DEVICE static int first_row() { return WAVES - 1 - wave_id(); }
  DEVICE const Pair* part(const PairRows& parts, int row, int i) const {
    int at = i * WIDTH + lane_id();
    return parts.at(row, at < k / TILE_ROWS ? at : 0);
  }
  DEVICE void ask(const PairRows& parts, Parts& asked) const {
    UNROLL for (int i = 0; i < PARTS; ++i) asked.got[i] = load_pair(part(parts, first_row(), i), parts.tag);
  }
  DEVICE bool sum(const PairRows& parts, f32 eps, Parts& asked) {
    bool ok = true;
    for (int row = first_row(); row < (int)s.rows; row += WAVES) {
      f32 sum = 0;
      for (int from = 0; from < k / TILE_ROWS; from += WIDTH * PARTS) {
        bool there = row == first_row() && from == 0;
        UNROLL for (int i = 0; i < PARTS; ++i) there &= asked.got[i].tag == parts.tag;
        auto at = [&](int i) { return part(parts, row, from / WIDTH + i); };
        if (!there) ok = s.collect(parts.tag, at, asked.got) && ok;
        UNROLL for (int i = 0; i < PARTS; ++i) sum +=
            from + i * WIDTH + lane_id() < k / TILE_ROWS ? value_of(asked.got[i]) : 0.f;
      }
      sum = wave_sum(sum);
      if (lane_id() == 0) inverse_rms_of[s.squares_turn * ROWS + row] = 1.f / __builtin_sqrtf(sum / (f32)k + eps);
    }
    return ok;
  }
};
