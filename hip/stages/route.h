// The router's decision: per row the TOP_K experts of the largest score(logit) + bias (ties to the lowest expert), or those that
// a table has for the row's token; weights from the unbiased scores, normalized and scaled; and the union of all rows' experts,
// ascending. Every block that has tasks of the experts computes it for itself from the logits: cheaper than one more hand-off.
//
// It is also the one place where a block may read although nobody waits for anything it publishes afterwards: only the route
// tells how many tasks there are, so a block learns here that it has none. Such a block can be overtaken, by whole layers even,
// and find a later tag. Then it has no task here, since a layer that lacks a task's output ends nowhere; so it goes on.
#pragma once
#include "handoff/step.h"
#include "stages/input.h"
#include "stages/select.h"

SHARED(f32, route_weight, ROWS* TOP_K);
SHARED(u32, route_place, EXPERTS * 2);  // 4 bits a row: 1 + its place in the row's choice, 0: not chosen
SHARED(u32, route_active, EXPERTS);     // the union, ascending
SHARED(u32, route_count, 1);
SHARED(f32, route_rms, WAVES);
static_assert(ROWS == 16 && TOP_K < 15, "route_place has 4 bits a row");

// Which place an expert has in a row's choice, -1: none.
DEVICE int place_in_row(int expert, int row) {
  return (int)(route_place[expert * 2 + row / 8] >> row % 8 * 4 & 15) - 1;
}

// Which rows chose an expert, a bit each.
DEVICE u32 rows_of_expert(int expert) {
  u32 rows = 0;
  UNROLL for (int half = 0; half < 2; ++half) {
    u32 w = route_place[expert * 2 + half];
    w |= w >> 2, w = (w | w >> 1) & 0x11111111;  // a bit in four, then side by side
    w = (w | w >> 3) & 0x03030303, w = (w | w >> 6) & 0x000f000f, w = (w | w >> 12) & 0xff;
    rows |= w << 8 * half;
  }
  return rows;
}

// The router's products come in COUNT parts of k: many blocks read the router's weights at once, and nobody has to read the
// whole input.
template <int HIDDEN> struct RouterSlices {
  static constexpr int COUNT = HIDDEN % 1024 == 0 ? HIDDEN / 1024 : HIDDEN % 256 == 0 ? 8 : 1, K = HIDDEN / COUNT;
};

struct SigmoidScore {
  DEVICE static f32 of(f32 logit) { return sigmoid(logit); }
};

template <int HIDDEN, class Score = SigmoidScore> struct Route {
  using Slices = RouterSlices<HIDDEN>;
  PairRows logits, sums;  // [rows][slices][EXPERTS] products; [rows][HIDDEN / 16] the input's sums of squares
  f32 eps;
  const f32* bias;  // [EXPERTS], or null: none
  f32 scale;
  // Where a table chooses: [tokens][TOP_K] different experts, and the rows' tokens. Else null.
  const u32 *table = nullptr, *tokens = nullptr;

  // LDS, where neither activations nor shares are: of AT_ONCE rows the logits before the norm, later order keys; and biases,
  // later scores.
  static constexpr int FITS = SPARE_WORDS / (2 * EXPERTS), AT_ONCE = FITS < WAVES ? FITS : WAVES;
  static constexpr int KEYS = ACT_WORDS, SCORES = KEYS + AT_ONCE * EXPERTS;
  static_assert(AT_ONCE > 0, "a row's experts have to fit in LDS");
  // By all blocks; leaves the choice in LDS, with a route_count of 0 if the block was overtaken. False if a wait was given up.
  // `ok`: false if the thread has given up a wait before. Uniform over the block; ends with a barrier.
  DEVICE bool decide(Step& s, bool ok) {
    block_barrier();  // everybody is done with the layer before's
    for (int i = thread_id(); i < EXPERTS * 2; i += THREADS) route_place[i] = 0u;
    bool overtaken = false;
    for (int first = 0; first < (int)s.rows; first += AT_ONCE) {
      int end = first + AT_ONCE < (int)s.rows ? first + AT_ONCE : (int)s.rows, values = (end - first) * EXPERTS;
      int row = first + wave_id();
      bool mine = row < end;
      Pair asked[SUMS];
      UNROLL for (int i = 0; i < SUMS; ++i) asked[i] = load_flag(sum_at(mine ? row : first, i), sums.tag);
      for (int i = thread_id(); i < values; i += THREADS) {
        set_lds_value(SCORES + i, bias ? load_constant(bias + i % EXPERTS) : 0.f);
        set_lds_value(KEYS + i, add_slices(s, first + i / EXPERTS, i % EXPERTS, ok, overtaken));
      }
      f32 rms = inverse_rms_of(s, mine ? row : first, asked, ok, overtaken);
      if (mine && lane_id() == 0) route_rms[wave_id()] = rms;
      block_barrier();
      for (int i = thread_id(); i < values; i += THREADS) {
        f32 score = Score::of(lds_value(KEYS + i) * route_rms[i / EXPERTS]);
        lds[KEYS + i] = order_key(score + lds_value(SCORES + i));
        set_lds_value(SCORES + i, score);
      }
      block_barrier();
      if (mine) leave(row, table ? looked_up(row) : chosen(row));
      if (end < (int)s.rows) block_barrier();
    }
    if (!s.all_ok(ok)) return false;
    list_active(block_any(overtaken));
    return true;
  }

 private:
  static constexpr int MINE = (EXPERTS + WIDTH - 1) / WIDTH;  // experts a lane
  DEVICE static int expert(int i) { return i * WIDTH + lane_id(); }

  // N words, of this launch's tag, or later ones of which `overtaken` tells.
  template <int N, class At>
  DEVICE static void take(Step& s, u32 tag, At at, Pair (&got)[N], bool& ok, bool& overtaken) {
    for (u32 polls = 0; ok;) {
      u32 early = tag;
      UNROLL for (int i = 0; i < N; ++i) got[i] = load_flag(at(i), tag);
      UNROLL for (int i = 0; i < N; ++i) early = (i32)(got[i].tag - tag) < 0 ? got[i].tag : early;
      if (early == tag) break;
      ok = s.go_on(polls, tag, early);
    }
    UNROLL for (int i = 0; i < N; ++i) overtaken |= got[i].tag != tag;
  }
  DEVICE f32 add_slices(Step& s, int row, int expert, bool& ok, bool& overtaken) const {
    Pair got[Slices::COUNT];
    take(s, logits.tag, [&](int slice) { return logits.at(row, slice * EXPERTS + expert); }, got, ok, overtaken);
    f32 sum = 0;
    UNROLL for (int i = 0; i < Slices::COUNT; ++i) sum += value_of(got[i]);
    return sum;
  }
  // The sums of squares are asked for before the logits are waited for.
  static constexpr int PARTS = HIDDEN / TILE_ROWS, SUMS = (PARTS + WIDTH - 1) / WIDTH;
  DEVICE static int part(int i) { return i * WIDTH + lane_id(); }
  DEVICE const Pair* sum_at(int row, int i) const { return sums.at(row, part(i) < PARTS ? part(i) : 0); }
  DEVICE f32 inverse_rms_of(Step& s, int row, Pair (&asked)[SUMS], bool& ok, bool& overtaken) const {
    bool there = true;
    UNROLL for (int i = 0; i < SUMS; ++i) there &= asked[i].tag == sums.tag;
    if (!there) take(s, sums.tag, [&](int i) { return sum_at(row, i); }, asked, ok, overtaken);
    f32 sum = 0;
    UNROLL for (int i = 0; i < SUMS; ++i) sum += part(i) < PARTS ? value_of(asked[i]) : 0.f;
    return 1.f / __builtin_sqrtf(wave_sum(sum) / (f32)HIDDEN + eps);
  }
  // The largest of N to the front; of equals the first.
  template <int N> DEVICE static void tournament(u32 (&best)[MINE], u32 (&which)[MINE]) {
    UNROLL for (int i = 0; i < N / 2; ++i) {
      bool right = best[2 * i + 1] > best[2 * i];
      best[i] = right ? best[2 * i + 1] : best[2 * i], which[i] = right ? which[2 * i + 1] : which[2 * i];
    }
    if constexpr (N % 2 && N > 1) best[N / 2] = best[N - 1], which[N / 2] = which[N - 1];
    if constexpr (N > 1) tournament<(N + 1) / 2>(best, which);
  }
  // A row's experts, by one wave: lane k has the k-th.
  DEVICE u32 looked_up(int row) const {
    if (lane_id() >= TOP_K) return 0;
    return load_constant(table + (u64)load_constant(tokens + row) * TOP_K + lane_id());
  }
  DEVICE static u32 chosen(int row) {
    constexpr u32 NONE = 0xffffffffu;
    u32 key[MINE], own = 0;
    int of_row = row % AT_ONCE * EXPERTS;
    UNROLL for (int i = 0; i < MINE; ++i) key[i] =
        expert(i) < EXPERTS ? (u32)lds[KEYS + of_row + expert(i)] : 0u;  // 0 is no number's
    ROLLED for (int k = 0; k < TOP_K; ++k) {
      u32 best[MINE], which[MINE];
      UNROLL for (int i = 0; i < MINE; ++i) best[i] = key[i], which[i] = expert(i);
      tournament<MINE>(best, which);
      u32 most = wave_max(best[0]), winner = NONE - wave_max(best[0] == most ? NONE - which[0] : 0u);
      UNROLL for (int i = 0; i < MINE; ++i) key[i] = (u32)expert(i) == winner ? 0 : key[i];
      if (lane_id() == k) own = winner;
    }
    return own;
  }
  DEVICE void leave(int row, u32 own) const {
    f32 score = lds_value(SCORES + row % AT_ONCE * EXPERTS + own), sum = 0;
    ROLLED for (int k = 0; k < TOP_K; ++k) sum += bits<f32>(wave_read(bits<u32>(score), k));
    if (lane_id() < TOP_K) {
      route_weight[row * TOP_K + lane_id()] = score / (sum + 1e-20f) * scale;
      lds_or(route_place, own * 2 + row / 8, (u32)(lane_id() + 1) << row % 8 * 4);
    }
  }
  DEVICE void list_active(bool overtaken) const {
    u32 before = 0;
    for (int first = 0; first < EXPERTS; first += THREADS) {
      int e = first + thread_id();
      bool active = !overtaken && e < EXPERTS && (route_place[e * 2] | route_place[e * 2 + 1]);
      u32 at = before + block_prefix(active);
      if (active) route_active[at] = (u32)e;
      if (e == EXPERTS - 1) route_count[0] = at + active;
      if (first + THREADS < EXPERTS) {
        for (int w = 0; w < WAVES; ++w) before += prefix_of_wave[w];
        block_barrier();
      }
    }
    block_barrier();
  }
};
