// The router's decision: per row the TOP_K experts of the largest sigmoid(logit) + bias (ties to the lowest expert), weights
// from the unbiased scores, normalized and scaled; and the union of all rows' experts, ascending. Every block that has
// tasks of the experts computes it for itself from the logits: cheaper than one more hand-off.
//
// It is also the one place where a block may read although nobody waits for anything it publishes afterwards: only the route
// tells how many tasks there are, so a block learns here that it has none. Such a block can be overtaken, by whole layers even,
// and find a later tag. Then it has no task here, since a layer that lacks a task's output ends nowhere; so it goes on.
#pragma once
#include "handoff/step.h"
#include "stages/input.h"
#include "stages/select.h"

SHARED(u32, route_expert, ROWS* TOP_K);
SHARED(f32, route_weight, ROWS* TOP_K);
SHARED(u32, route_place, EXPERTS * 2);  // 4 bits a row: 1 + its place in the row's choice, 0: not chosen
SHARED(u32, route_active, EXPERTS);     // the union, by class (expert mod WAVES), ascending in each
SHARED(u32, route_class, WAVES + 1);    // where each class begins
SHARED(u32, route_count, 1);
static_assert(ROWS == 16 && TOP_K < 15, "route_place has 4 bits a row");

// Which place an expert has in a row's choice, -1: none.
DEVICE int place_in_row(int expert, int row) {
  return (int)(route_place[expert * 2 + row / 8] >> row % 8 * 4 & 15) - 1;
}

// The router's products come in SLICES parts of k, each with its share of the input's sum of squares: many blocks read the
// router's weights at once, and nobody has to read the whole input.
template <int HIDDEN> struct RouterSlices {
  static constexpr int COUNT = HIDDEN % 256 == 0 ? 8 : 1, K = HIDDEN / COUNT, WIDTH_OUT = EXPERTS + 1;
};

struct Route {
  PairRows logits;  // [rows][slices][EXPERTS + 1]: products, then the sum of squares
  int slices, hidden;
  f32 eps;
  const f32* bias;  // [EXPERTS]
  f32 scale;
  bool done = false;

  DEVICE Route(const PairRows& logits, int slices, int hidden, f32 eps, const f32* bias, f32 scale)
      : logits(logits), slices(slices), hidden(hidden), eps(eps), bias(bias), scale(scale) {}

  // Number of active experts (0: overtaken), or -1 when a wait was given up. Uniform over the block; ends with a barrier.
  STAGE int decide(Step& s) {
    if (done) return route_count[0];
    for (int i = thread_id(); i < EXPERTS * 2; i += THREADS) route_place[i] = 0u;
    block_barrier();
    bool ok = true, overtaken = false;
    for (int row = wave_id(); row < (int)s.rows; row += WAVES) ok = choose(s, row, overtaken) && ok;
    if (!s.all_ok(ok)) return -1;
    if (!s.all_ok(!overtaken)) return 0;
    list_active();
    done = true;
    return route_count[0];
  }

 private:
  static constexpr int MINE = (EXPERTS + WIDTH - 1) / WIDTH;  // experts a lane: lane, lane + WIDTH, ...

  DEVICE bool choose(Step& s, int row, bool& overtaken) const {
    f32 score[MINE] = {}, squares_of_row = 0;
    u64 key[MINE];
    bool ok = true;
    auto expert_of = [](int i) { return i * WIDTH + lane_id() < EXPERTS ? i * WIDTH + lane_id() : EXPERTS - 1; };
    for (int slice = 0; slice < slices; ++slice) {
      Pair got[MINE + 1];
      auto at = [&](int i) { return logits.at(row, slice * (EXPERTS + 1) + (i < MINE ? expert_of(i) : EXPERTS)); };
      UNROLL for (int i = 0; i <= MINE; ++i) got[i] = load_flag(at(i), logits.tag);
      UNROLL for (int i = 0; i <= MINE; ++i) {
        if ((i32)(got[i].tag - logits.tag) < 0) ok = ok && s.wait_flag(at(i), logits.tag, got[i]);
        overtaken |= got[i].tag != logits.tag;
        i < MINE ? score[i] += value_of(got[i]) : squares_of_row += value_of(got[i]);
      }
    }
    f32 rms = 1.f / __builtin_sqrtf(squares_of_row / (f32)hidden + eps);
    UNROLL for (int i = 0; i < MINE; ++i) {
      int e = expert_of(i);
      score[i] = sigmoid(score[i] * rms);
      bool mine = i * WIDTH + lane_id() < EXPERTS;
      key[i] = mine ? (u64)order_key(score[i] + load_constant(bias + e)) << 32 | (0xffffffffu - e) : 0;
    }
    f32 sum = 0, chosen = 0;  // the lane's own choice: lane k keeps the k-th
    u32 expert = 0;
    for (int k = 0; k < TOP_K; ++k) {
      u64 best = 0;
      UNROLL for (int i = 0; i < MINE; ++i) best = key[i] > best ? key[i] : best;
      best = wave_max(best);
      u32 winner = 0xffffffffu - (u32)best;
      f32 of_winner = 0;
      UNROLL for (int i = 0; i < MINE; ++i) if (key[i] == best) of_winner = score[i], key[i] = 0;
      of_winner = bits<f32>(wave_read(bits<u32>(of_winner), winner % WIDTH));
      sum += of_winner;
      if (lane_id() == k) chosen = of_winner, expert = winner;
    }
    if (lane_id() < TOP_K) {
      int k = lane_id();
      route_expert[row * TOP_K + k] = expert;
      route_weight[row * TOP_K + k] = chosen / (sum + 1e-20f) * scale;
      lds_or(route_place, expert * 2 + row / 8, (u32)(k + 1) << row % 8 * 4);
    }
    return ok;
  }
  // Thread t looks at the t-th expert in the order of the list: class after class.
  DEVICE void list_active() const {
    static_assert(EXPERTS % WAVES == 0 && EXPERTS <= THREADS, "one expert a thread");
    constexpr int OF_CLASS = EXPERTS / WAVES;
    int t = thread_id(), e = t % OF_CLASS * WAVES + t / OF_CLASS;
    bool active = t < EXPERTS && (route_place[e * 2] | route_place[e * 2 + 1]);
    u32 before = block_prefix(active);
    if (active) route_active[before] = (u32)e;
    if (t < EXPERTS && t % OF_CLASS == 0) route_class[t / OF_CLASS] = before;
    if (t == EXPERTS - 1) route_count[0] = route_class[WAVES] = before + active;
    block_barrier();
  }
};
