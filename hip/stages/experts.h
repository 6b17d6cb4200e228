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

  // The units of one wave in [unit, end), in order: unit u of the experts whose number is of class (wave - u) mod WAVES, so that
  // an expert's units are spread over the waves. The shared expert comes last in its class.
  struct Cursor {
    int unit, end, index = 0, count = 0, expert_class = 0;

    DEVICE Cursor(int unit, int end) : unit(unit), end(end) {
      if (valid()) enter();
    }
    DEVICE bool valid() const { return unit < end; }
    DEVICE void enter() {  // the first unit from here on that has something
      for (; valid(); ++unit) {
        expert_class = (wave_id() + WAVES - unit % WAVES) % WAVES;
        index = route_class[expert_class], count = (int)route_class[expert_class + 1] - index;
        count += expert_class == EXPERTS % WAVES;
        if (count) return;
      }
    }
    DEVICE int expert() const {
      return count == 1 && expert_class == EXPERTS % WAVES ? EXPERTS : (int)(u32)route_active[index];
    }
    DEVICE void next() {
      ++index;
      if (--count) return;
      ++unit;
      enter();
    }
  };

  template <class Sink> DEVICE bool run(Step& s, u32 stage, u32 tag, Route& route, Sink sink) const {
    int tasks = n / TILE_ROWS;
    int fit = (ACT_WORDS / 4 / (int)s.rows - 1) / (PLACES * UNIT16), chunk = fit < UNITS ? fit : UNITS;
    bool gathered = false;  // everything, for all tasks
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      if (route.decide(s) < 0) return false;
      Acc acc = {};
      for (int begin = 0; begin < UNITS; begin += chunk) {
        int end = begin + chunk < UNITS ? begin + chunk : UNITS;
        Cursor loading(begin, end), use(begin, end);
        Unit<F> ring[AHEAD];
        UNROLL for (int i = 0; i < AHEAD; ++i) load(ring[i], loading, task);
        if (begin) block_barrier();  // everybody is done with the chunk before
        if (!gathered && !gather(s, begin, end)) return false;
        gathered = chunk == UNITS;
        while (use.valid()) {
          UNROLL for (int i = 0; i < AHEAD; ++i) {
            if (!use.valid()) break;
            multiply(s, ring[i], use, begin, end, acc);
            use.next();
            load(ring[i], loading, task);
          }
        }
      }
      leave_part(acc, 0);
      finish_tile<1>(s, task, [&](int, int row, int n, const f32(&v)[1][2]) { sink(task, row, n, v[0]); });
    }
    s.finish(tasks);
    return true;
  }

 private:
  DEVICE void load(Unit<F>& unit, Cursor& at, int task) const {
    if (!at.valid()) return;
    unit.load(tile_row<F, WIDTH_E>(down.tiles, down.scales, n, at.expert(), task), at.unit);
    at.next();
  }
  DEVICE void multiply(const Step& s, const Unit<F>& unit, const Cursor& use, int begin, int end, Acc& acc) const {
    int stride16 = PLACES * (end - begin) * UNIT16 + 1, expert = use.expert();
    Columns x([&](int row) {
      int place = -1;
      if (row < (int)s.rows) place = expert == EXPERTS ? TOP_K : place_in_row(expert, row);
      return place < 0 ? -1 : row * stride16 + (place * (end - begin) + use.unit - begin) * UNIT16;
    });
    unit.multiply(x, 0, acc);
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
