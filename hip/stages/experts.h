// The second half of a mixture of experts: outputs from the activations of all experts of all rows.
//
// A task is 16 output rows. The union of the chosen experts, and the shared one, are streamed once for all rows: an expert
// meets the activations of the rows that chose it, and zeros for the others. The order of the sum (k outside, experts
// ascending inside) and the wave that takes a unit depend on the expert and k alone, so a row's bits do not depend on what
// the other rows chose.
//   in   middle [row][place][WIDTH_E], tagged pairs; place: of the expert in the row's choice, TOP_K: the shared expert
//   out  sink(task, row, n, v)
#pragma once
#include "stages/linear.h"
#include "stages/route.h"

template <class F, int WIDTH_E> struct ExpertsDown {
  static constexpr int PLACES = TOP_K + 1, UNITS = padded<F>(WIDTH_E) / F::UNIT, PER_16 = 16 / F::ACT_BYTES;
  static constexpr int UNIT16 = F::UNIT / PER_16, AHEAD = F::AHEAD;
  static_assert(ROWS * (PLACES * UNIT16 + 1) <= ACT_WORDS / 4, "one unit of all rows and places has to fit in LDS");

  PairRows middle;
  Matrix down;  // EXPERTS + 1 matrices [n][WIDTH_E]
  int n;

  // The units of one wave, in order.
  struct Cursor {
    int unit, index, active, end;
    DEVICE int expert() const { return index < active ? (int)(u32)route_active[index] : EXPERTS; }
    DEVICE bool mine() const { return (unit + expert()) % WAVES == wave_id(); }
    DEVICE bool valid() const { return unit < end; }
    DEVICE void step() {
      if (++index > active) index = 0, ++unit;
    }
    DEVICE void seek() {
      while (valid() && !mine()) step();
    }
  };

  template <class Sink> DEVICE bool run(Step& s, u32 stage, u32 tag, Route& route, Sink sink) const {
    int tasks = n / TILE_ROWS;
    int fit = (ACT_WORDS / 4 / (int)s.rows - 1) / (PLACES * UNIT16), chunk = fit < UNITS ? fit : UNITS;
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      int active = route.decide(s);
      if (active < 0) return false;
      Unit<F> ring[AHEAD];
      Cursor loading{0, 0, active, UNITS}, using_{0, 0, active, UNITS};
      loading.seek(), using_.seek();
      UNROLL for (int i = 0; i < AHEAD; ++i) load(ring[i], loading, task);
      Acc acc = {};
      for (int begin = 0; begin < UNITS; begin += chunk) {
        if (begin) block_barrier();
        int end = begin + chunk < UNITS ? begin + chunk : UNITS;
        if (!gather(s, begin, end)) return false;
        multiply(s, ring, loading, using_, begin, end, task, acc);
      }
      leave_part(acc, 0);
      block_barrier();
      for (int i = thread_id(); i < 8 * (int)s.rows; i += THREADS) {
        int row = i / 8, n = i % 8 * 2;
        f32 v[2] = {sum_parts(0, row, n), sum_parts(0, row, n + 1)};
        sink(task, row, n, v);
      }
      s.end();
      block_barrier();
    }
    s.finish(tasks);
    return true;
  }

 private:
  DEVICE void load(Unit<F>& unit, Cursor& at, int task) const {
    if (!at.valid()) return;
    unit.load(tile_row<F, WIDTH_E>(down.tiles, down.scales, n, at.expert(), task), at.unit);
    at.step(), at.seek();
  }
  // All units of the wave in [begin, end). The ring turns as a whole, so that its indices are constants: what a chunk leaves
  // over is used up by shifting.
  DEVICE void multiply(const Step& s, Unit<F> (&ring)[AHEAD], Cursor& loading, Cursor& use, int begin, int end,
                       int task, Acc& acc) const {
    int stride16 = PLACES * (end - begin) * UNIT16 + 1;
    while (use.valid() && use.unit < end) {
      int expert = use.expert();
      Columns x([&](int row) {
        int place = -1;
        if (row < (int)s.rows) place = expert == EXPERTS ? TOP_K : place_in_row(expert, row);
        return place < 0 ? -1 : row * stride16 + (place * (end - begin) + use.unit - begin) * UNIT16;
      });
      ring[0].multiply(x, 0, acc);
      use.step(), use.seek();
      UNROLL for (int i = 0; i + 1 < AHEAD; ++i) ring[i] = ring[i + 1];
      load(ring[AHEAD - 1], loading, task);
    }
  }
  // middle[row][all places][units begin ... end) to LDS.
  DEVICE bool gather(Step& s, int begin, int end) const {
    constexpr int BATCH = 4;
    int per_place = (end - begin) * F::UNIT / 2, total = (int)s.rows * PLACES * per_place;
    int stride16 = PLACES * (end - begin) * UNIT16 + 1;
    bool ok = true;
    int me = thread_id();
    for (int from = 0; from < total; from += THREADS * BATCH) {
      Pair got[2 * BATCH];
      auto at = [&](int i) {
        int w = from + i / 2 * THREADS + me, k = begin * F::UNIT + w % per_place * 2 + i % 2;
        w = w < total ? w / per_place : 0, k = k < WIDTH_E ? k : i % 2;
        return middle.at(w / PLACES, w % PLACES * WIDTH_E + k);
      };
      ok = ok && s.collect(middle.tag, at, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int w = from + b * THREADS + me, k = begin * F::UNIT + w % per_place * 2;
        if (w >= total) continue;
        int row = w / per_place / PLACES, place = w / per_place % PLACES;
        int word = (row * stride16 + place * (end - begin) * UNIT16) * 4 + w % per_place * F::ACT_BYTES / 2;
        put_activations<F>(word, {k < WIDTH_E ? value_of(got[2 * b]) : 0, k < WIDTH_E ? value_of(got[2 * b + 1]) : 0});
      }
    }
    if (!s.all_ok(ok)) return false;
    s.input_is_there();
    quantize<F>(s.rows, PLACES * (end - begin) * F::UNIT, [&](int row) { return row * stride16; });
    return true;
  }
};
