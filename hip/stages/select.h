// The exact top-k of a row's index scores, ties to the lowest key, in ascending order. A key stands for `ratio` positions.
//   in   scores [row][key], flags of all tasks that made them;  one task a row, for rows with more than K keys only
//   out  selection [row][K], written through, flag [row]
// A radix select: four passes of 8 bits over an order-preserving image of f32 find the K-th largest key and how many of its
// equals belong in; a fifth counts per thread and a sixth writes. One block reads the scores six times: at 60 K positions
// 1.4 MB, which its XCD's L2 holds.
#pragma once
#include "stages/cache_entry.h"

// Larger floats, larger keys; -0 equals +0.
DEVICE u32 order_key(f32 v) {
  u32 u = bits<u32>(v + 0.f);
  return u >> 31 ? ~u : u | 0x80000000u;
}

// Exclusive sum over the block's threads. Begins with a barrier and has another.
SHARED(u32, prefix_of_wave, WAVES);
DEVICE u32 block_prefix(u32 mine) {
  int lane = thread_id() % WIDTH;
  u32 sum = mine;
  for (int o = 1; o < WIDTH; o *= 2) {
    u32 below = wave_read(sum, lane >= o ? lane - o : lane);
    if (lane >= o) sum += below;
  }
  block_barrier();
  if (lane == WIDTH - 1) prefix_of_wave[wave_id()] = sum;
  block_barrier();
  u32 before = sum - mine;
  for (int w = 0; w < wave_id(); ++w) before += prefix_of_wave[w];
  return before;
}

struct Unbound {
  static constexpr bool WAITS = false;
  DEVICE static u32 key(int, u32, u32 key) { return key; }
};

template <int K> struct Select {
  static constexpr int BINS = 256, PER_LANE = BINS / WIDTH;
  const f32* scores;  // [rows][stride]
  u64 stride;
  const u32* positions;
  const Pair* score_flags;  // [rows][max_pages]
  u32 max_pages;
  u32* selection;  // [rows][K]
  Pair* flags;     // [rows]
  u32 ratio = 1;

  // `bound` says which keys may be selected at all.
  template <class Bound = Unbound> DEVICE bool run(Step& s, u32 stage, u32 tag, const Bound& bound = {}) const {
    for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
      u32 n = (load_constant(positions + row) + 1) / ratio;
      if (n <= K) continue;
      s.begin(stage, row, tag);
      if (!s.wait_flags((n + PAGE - 1) / PAGE, tag, [&](int page) { return score_flags + row * max_pages + page; }))
        return false;
      if constexpr (Bound::WAITS)
        if (!s.all_ok(thread_id() != 0 || bound.wait(s, row))) return false;
      s.input_is_there();
      acquire_device();
      auto key = [&](u32 j) { return bound.key(row, j, order_key(load_plain(scores + row * stride + j, tag))); };
      take_best(n, key, [&](u32 j, bool taken, u32 place) {
        if (taken) store_device(selection + row * K + place, j, tag);
      });
      s.announce(flags + row, tag, Stored::THROUGH);
    }
    s.finish(s.rows);
    return true;
  }

  // visit(j, taken, place) of every j below n: whether key(j) is one of the K largest, and then its place among them. By the
  // whole block.
  template <class Key, class Visit> DEVICE static void take_best(u32 n, Key key, Visit visit) {
    u32 take = K;  // of those equal to the threshold, once it is complete
    u32 threshold = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      count(n, key, threshold, known, shift);
      threshold |= digit(take) << shift;
      known |= 0xffu << shift;
    }
    write(n, key, threshold, take, visit);
  }

 private:
  // Histogram of the next digit of the keys that agree with the threshold so far.
  template <class Key> DEVICE static void count(u32 n, Key key, u32 threshold, u32 known, int shift) {
    block_barrier();
    for (int bin = thread_id(); bin < BINS; bin += THREADS) lds[bin] = 0u;
    block_barrier();
    for (u32 j = thread_id(); j < n; j += THREADS)
      if (u32 k = key(j); (k & known) == threshold) lds_add(lds, 255 - (k >> shift & 255), 1u);
    block_barrier();
  }
  // The digit of the take-th largest; `take` becomes its place among those with that digit. Every wave computes it.
  DEVICE static u32 digit(u32& take) {
    u32 mine = 0, sum;
    int lane = thread_id() % WIDTH;
    int first = lane * PER_LANE;
    UNROLL for (int i = 0; i < PER_LANE; ++i) mine += lds[first + i];
    sum = mine;
    for (int o = 1; o < WIDTH; o *= 2) {
      u32 before = wave_read(sum, lane >= o ? lane - o : lane);
      if (lane >= o) sum += before;
    }
    u32 above = sum - mine, found = 0, rest = 0;
    bool here = above < take && take <= sum;
    if (here)
      for (int i = 0; i < PER_LANE; ++i) {
        u32 c = lds[first + i];
        if (take - above <= c) {
          found = BINS - 1 - (first + i), rest = take - above;
          break;
        }
        above += c;
      }
    int holder = lowest_bit(wave_ballot(here));
    take = wave_read(rest, holder);
    return wave_read(found, holder);
  }
  // Each thread has a contiguous stretch of positions, so that places come from two prefix sums.
  template <class Key, class Visit> DEVICE static void write(u32 n, Key key, u32 threshold, u32 take, Visit visit) {
    u32 me = thread_id(), stretch = (n + THREADS - 1) / THREADS, begin = me * stretch, end = begin + stretch;
    if (begin > n) begin = n;
    if (end > n) end = n;
    u32 above = 0, equal = 0;
    for (u32 j = begin; j < end; ++j) {
      u32 k = key(j);
      above += k > threshold, equal += k == threshold;
    }
    above = block_prefix(above);
    equal = block_prefix(equal);
    for (u32 j = begin; j < end; ++j) {
      u32 k = key(j);
      visit(j, k > threshold || (k == threshold && equal < take), above + (equal < take ? equal : take));
      above += k > threshold, equal += k == threshold;
    }
  }
};
