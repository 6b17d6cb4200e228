// The exact top-k of a row's index scores, ties to the lowest key, in ascending order. A key stands for `ratio` positions.
//   in   scores [row][key], flags of all tasks that made them;  one task a row, for rows with more than K keys only
//   out  selection [row][K], written through, flag [row]
// A radix select: four passes of 8 bits over an order-preserving image of f32 find the K-th largest key and how many of its
// equals belong in; a fifth counts per wave and a sixth writes. One block reads the scores six times: at 60 K positions
// 1.4 MB, which its XCD's L2 holds. Every lane has several of them on their way: one at a time, a pass was a chain of trips
// to the L2, and so were stretches of neighbours a thread, of which no two lanes share a line.
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
  static constexpr int BATCH = 8;  // keys of a lane on their way
  // Keys first, first + step, ... of `keys`, with a bit for each that is below n.
  template <class Key> DEVICE static u32 batch(u32 first, u32 step, u32 n, Key key, u32 (&keys)[BATCH]) {
    u32 there = 0;
    UNROLL for (int b = 0; b < BATCH; ++b) {
      u32 j = first + b * step;
      there |= (u32)(j < n) << b;
      keys[b] = key(j < n ? j : n - 1);
    }
    return there;
  }
  // Histogram of the next digit of the keys that agree with the threshold so far.
  template <class Key> DEVICE static void count(u32 n, Key key, u32 threshold, u32 known, int shift) {
    block_barrier();
    for (int bin = thread_id(); bin < BINS; bin += THREADS) lds[bin] = 0u;
    block_barrier();
    for (u32 first = thread_id(); first < n; first += THREADS * BATCH) {
      u32 keys[BATCH], there = batch(first, THREADS, n, key, keys);
      UNROLL for (int b = 0; b < BATCH; ++b) if ((there >> b & 1) && (keys[b] & known) == threshold)
          lds_add(lds, 255 - (keys[b] >> shift & 255), 1u);
    }
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
  // Each wave has a contiguous stretch of positions, whose lanes are neighbours, so that places come from ballots and from what
  // the waves before have.
  template <class Key, class Visit> DEVICE static void write(u32 n, Key key, u32 threshold, u32 take, Visit visit) {
    constexpr u32 STEP = WIDTH * BATCH;
    u32 stretch = (n + WAVES * STEP - 1) / (WAVES * STEP) * STEP, begin = wave_id() * stretch, lane = lane_id();
    u32 end = begin + stretch < n ? begin + stretch : n, above = 0, equal = 0;
    for (u32 from = begin; from < end; from += STEP) {
      u32 keys[BATCH], there = batch(from + lane, WIDTH, end, key, keys);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        above += (there >> b & 1) && keys[b] > threshold;
        equal += (there >> b & 1) && keys[b] == threshold;
      }
    }
    above = before_wave(above), equal = before_wave(equal);
    for (u32 from = begin; from < end; from += STEP) {
      u32 keys[BATCH], there = batch(from + lane, WIDTH, end, key, keys);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        bool mine = there >> b & 1, is_above = mine && keys[b] > threshold, is_equal = mine && keys[b] == threshold;
        u64 aboves = wave_ballot(is_above), equals = wave_ballot(is_equal);
        u32 below = equal + bits_below(equals, lane), taken = below < take ? below : take;
        if (mine)
          visit(from + b * WIDTH + lane, is_above || (is_equal && below < take),
                above + bits_below(aboves, lane) + taken);
        above += bits_below(aboves, WIDTH), equal += bits_below(equals, WIDTH);
      }
    }
  }
  // What the lanes of the waves before have in all.
  DEVICE static u32 before_wave(u32 mine) {
    u32 upto = block_prefix(mine);
    return wave_read(upto, 0);
  }
  DEVICE static u32 bits_below(u64 mask, u32 lane) {
    if (lane < 64) mask &= ((u64)1 << lane) - 1;
    return count_bits((u32)mask) + count_bits((u32)(mask >> 32));
  }
};
