// Compressed cache entries: one for RATIO tokens of a row, made by the step that runs the last of them.
//
// A task is a row.
//   in   products [row][VALUES] as tagged pairs: the token's values and, if entries are pooled, its gates. Of the tokens before,
//        what earlier launches left in `pending`: a ring for each request's slot of state, a token at position mod SPAN.
//   out  the token's own place in `pending`; where it is an entry's last token, the entry: the values of SPAN tokens weighted,
//        channel by channel, by the softmax of their gates; RMS norm; RoPE of the last channels at the entry's first token; to
//        the row's page, written through. `latent`, unless null: the entry before its rotation as tagged pairs, 0 of rows that
//        finished none. Flag [row], of every row.
// With OVERLAP an entry is made of twice RATIO tokens and channels come twice: earlier tokens give the first half of theirs, the
// entry's own the second. A request's first entry has none before it. What is older than a request is never read.
#pragma once
#include "stages/cache_entry.h"

enum class Pooling { NONE, OWN, OVERLAP };

template <class F, int D, int ROPE, int RATIO, Pooling POOLING> struct Compress {
  static constexpr bool POOLED = POOLING != Pooling::NONE;
  static constexpr int TWICE = POOLING == Pooling::OVERLAP ? 2 : 1, SPAN = TWICE * RATIO, WIDE = TWICE * D;
  static constexpr int VALUES = POOLED ? 2 * WIDE : D, PLACES = RATIO < PAGE ? PAGE / RATIO : 1;
  static constexpr int TURNS = (D / 2 + THREADS - 1) / THREADS, BATCH = SPAN < 8 ? SPAN : 8;
  static_assert(D % 2 == 0 && (PAGE % RATIO == 0 || RATIO % PAGE == 0) && SPAN % BATCH == 0, "");

  PairRows products;
  const f32 *ape, *norm;  // [RATIO][WIDE], added to gates, or null; [D]
  f32 eps;
  const f32* rope;
  const u32 *positions, *slots;  // [rows]: of the token; of the request's state
  Pages pages;
  f32* pending;   // [slots][SPAN][2][WIDE]: values, gates
  void* entries;  // [pages][PLACES][D]
  Pair *latent, *flags;

  DEVICE bool run(Step& s, u32 stage, u32 tag) const {
    for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
      s.begin(stage, row, tag);
      u32 position = load_constant(positions + row);
      bool last = (position + 1) % RATIO == 0, ok = true;
      f32 entry[TURNS][2] = {};
      UNROLL for (int turn = 0; turn < TURNS; ++turn) ok = take(s, row, position, turn, last, entry[turn], tag) && ok;
      if (!s.all_ok(ok)) return false;
      s.input_is_there();
      if (last || latent) write(row, position, last, entry, tag);
      s.announce(flags + row, tag, Stored::THROUGH);
    }
    s.finish(s.rows);
    return true;
  }

 private:
  DEVICE static int channel(int turn) { return 2 * (turn * THREADS + thread_id()); }

  // Two channels of the token to the ring, and of the entry if it is its last.
  DEVICE bool take(Step& s, int row, u32 position, int turn, bool last, f32 (&entry)[2], u32 tag) const {
    int c = channel(turn);
    if (c >= D) return true;
    constexpr int PARTS = POOLED ? 2 * TWICE : 1;  // values of each half, then gates
    Pair got[2 * PARTS];
    bool ok = products.take(s, row, [c](int i) { return i / 2 * D + c + i % 2; }, got);
    f32 own[PARTS][2];
    UNROLL for (int i = 0; i < 2 * PARTS; ++i) own[i / 2][i % 2] = value_of(got[i]);
    if constexpr (!POOLED) {
      entry[0] = own[0][0], entry[1] = own[0][1];
      return ok;
    } else {
      UNROLL for (int half = 0; half < TWICE; ++half) {
        int at = half * D + c;
        f32(&gate)[2] = own[TWICE + half];
        if (ape) UNROLL for (int j = 0; j < 2; ++j) gate[j] += load_constant(ape + position % RATIO * WIDE + at + j);
        f32* place = ring(row, position) + at;
        store_device((u64*)place, two(own[half]), tag);
        store_device((u64*)(place + WIDE), two(gate), tag);
      }
      if (last) pool(row, position, c, own[TWICE - 1], own[2 * TWICE - 1], entry);
      return ok;
    }
  }
  DEVICE static u64 two(const f32 (&v)[2]) { return (u64)bits<u32>(v[1]) << 32 | bits<u32>(v[0]); }
  DEVICE f32* ring(int row, u32 position) const {
    return pending + ((u64)load_constant(slots + row) * SPAN + position % SPAN) * 2 * WIDE;
  }

  // The earlier tokens' gates or values of channel c and the next, BATCH at a time.
  DEVICE void before(int row, u32 position, int from, int c, bool gates, f32 (&v)[BATCH][2]) const {
    u64 word[BATCH] = {};
    UNROLL for (int b = 0; b < BATCH; ++b) {
      u32 back = SPAN - 1 - from - b;
      int half = TWICE == 2 && from + b >= RATIO ? D : 0;
      if (back && back <= position)
        word[b] = load_plain((const u64*)(ring(row, position - back) + gates * WIDE + half + c), ANY_EPOCH);
    }
    UNROLL for (int b = 0; b < BATCH; ++b) v[b][0] = bits<f32>((u32)word[b]), v[b][1] = bits<f32>((u32)(word[b] >> 32));
  }
  // In the order of tokens, in two passes: the largest gate first.
  DEVICE void pool(int row, u32 position, int c, const f32 (&value)[2], const f32 (&gate)[2], f32 (&entry)[2]) const {
    f32 most[2] = {gate[0], gate[1]}, sum[2] = {}, g[BATCH][2], v[BATCH][2];
    auto known = [position](int token) { return (u32)(SPAN - 1 - token) <= position && token < SPAN - 1; };
    for (int from = 0; from < SPAN; from += BATCH) {
      before(row, position, from, c, true, g);
      UNROLL for (int b = 0; b < BATCH; ++b) UNROLL for (int j = 0; j < 2; ++j) most[j] =
          known(from + b) && g[b][j] > most[j] ? g[b][j] : most[j];
    }
    entry[0] = entry[1] = 0;
    for (int from = 0; from < SPAN; from += BATCH) {
      before(row, position, from, c, true, g), before(row, position, from, c, false, v);
      UNROLL for (int b = 0; b < BATCH; ++b) UNROLL for (int j = 0; j < 2; ++j) {
        f32 weight = known(from + b) ? exp_exact(g[b][j] - most[j]) : 0.f;
        sum[j] += weight, entry[j] += weight * v[b][j];
      }
    }
    UNROLL for (int j = 0; j < 2; ++j) {
      f32 weight = exp_exact(gate[j] - most[j]);
      entry[j] = (entry[j] + weight * value[j]) / (sum[j] + weight);
    }
  }

  // Norm, rotation, page.
  DEVICE void write(int row, u32 position, bool last, f32 (&entry)[TURNS][2], u32 tag) const {
    f32 mine = 0;
    UNROLL for (int turn = 0; turn < TURNS; ++turn) mine +=
        entry[turn][0] * entry[turn][0] + entry[turn][1] * entry[turn][1];
    block_barrier();  // since the last block_sum
    f32 rms = 1.f / __builtin_sqrtf(block_sum(mine) / D + eps);
    u64 page = load_constant(pages.table + row * pages.max_pages + position / PAGE);
    u64 at = (page * PLACES + position / RATIO % PLACES) * D;
    UNROLL for (int turn = 0; turn < TURNS; ++turn) {
      int c = channel(turn);
      if (c >= D) continue;
      f32 v[2];
      UNROLL for (int j = 0; j < 2; ++j) v[j] = last ? entry[turn][j] * rms * load_constant(norm + c + j) : 0.f;
      if (latent) put(latent + row * D + c, v[0], tag), put(latent + row * D + c + 1, v[1], tag);
      if (!last) continue;
      if (c >= D - ROPE) rotate<ROPE>(rope, position + 1 - RATIO, c - (D - ROPE), v);
      put_cache<F>(entries, at + c, v, tag);
    }
  }
};
