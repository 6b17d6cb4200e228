// The second half of a mixture of experts: outputs from the activations of all experts of all rows.
//
// A task is 16 output rows, and neighbouring tasks make a run, as in linear.h. The union of the chosen experts, and the shared
// one, are streamed once for all rows: an expert meets the activations of the rows that chose it, and zeros for the others. Experts are cut into SPANS of k, and every wave
// takes its spans of the list, whose products it leaves in LDS row by row and place by place. A row's sum is over its places
// in order, so its bits do not depend on what the other rows chose, nor on which wave was given what.
//   in   middle [row][place][WIDTH_E], tagged words; place: of the expert in the row's choice, TOP_K: the shared expert, where
//        it is one of the matrices (SHARED_ONE)
//   out  ahead() and put(), as of linear maps
// Safe: a wave reads only activations that it brought itself; shares are written and read between barriers of the block.
#pragma once
#include "stages/linear.h"
#include "stages/route.h"

template <class F, int WIDTH_E, int HIDDEN, bool SHARED_ONE = true> struct ExpertsDown {
  static constexpr int PLACES = TOP_K + SHARED_ONE, UNITS = padded<F>(WIDTH_E) / F::UNIT;
  static constexpr int SPANS = UNITS < 2 ? UNITS : 2, SPAN = (UNITS + SPANS - 1) / SPANS;
  static constexpr int SHARES = ROWS * PLACES * SPANS * TILE_ROWS;  // of one tile of 16 rows, or of several of fewer
  static constexpr int MINE16 = (USED_WORDS - SHARES - WAVES * RING_WORDS) / WAVES / 4 < WAVE16
                                    ? (USED_WORDS - SHARES - WAVES * RING_WORDS) / WAVES / 4
                                    : WAVE16;
  static_assert(RING_WORDS == 0 || USED_WORDS - SHARES >= ACT_WORDS + WAVES * RING_WORDS, "");
  using Units = Ring<F, 2>;
  static constexpr int PAIRS = F::UNIT * F::ACT_BYTES / 4, OF_EXPERT = WIDTH_E * F::ACT_BYTES / 4, LOADS = PAIRS / 2;
  static constexpr int FITS = MINE16 / F::UNIT16 < WIDTH ? MINE16 / F::UNIT16 : WIDTH;  // units of activations
  // Of a row that is alone every wave's units are one plan, if they fit.
  static constexpr int OF_ONE_ROW = (PLACES * SPANS + WAVES - 1) / WAVES * SPAN;
  static constexpr bool ONE_PLAN = MOST_ROWS == 1 && OF_ONE_ROW <= FITS && OF_ONE_ROW <= WIDTH;
  static constexpr int BATCH = MOST_ROWS == 1 && OF_ONE_ROW < 4 ? OF_ONE_ROW : 4,
                       ROW_PIECES = (LOADS + WIDTH - 1) / WIDTH;  // a wave's loads of a row's unit
  static_assert(ROWS <= FITS, "one unit of all rows has to fit in a wave's part of LDS");
  static_assert(!IN_HALVES<F> || LOADS == WIDTH, "");
  static_assert(EXPERTS < 1 << 16 && MINE16 * WAVES < 1 << 16, "a plan's words have halves for them");

  PairRows middle;
  Matrix down;  // EXPERTS + SHARED_ONE matrices [HIDDEN][WIDTH_E]

  // `out` as the stages of linear.h: ahead() and put().
  template <class Out> DEVICE bool run(Step& s, u32 stage, u32 tag, Out out) const {
    constexpr int TASKS = HIDDEN / TILE_ROWS;
    int length = run_length(s, TASKS, most_of_run(s), false);
    Brought brought;
    Kept kept;
    Units ring;
    Plan plan;
    bool ok = true;
    block_barrier();  // the last readers of LDS are done
    for (int task = s.first_task() * length, before = -1, of_before = 0;; task += n_blocks() * length) {
      int count = TASKS - task < length ? TASKS - task : length;
      if (count > 0) {
        s.begin(stage, task, tag);
        plan.span = wave_id(), plan.unit = first_unit(plan.span);
        make(s, plan, task, count, ring);
      }
      if (before >= 0) {
        if (!s.all_ok(ok)) return false;
        Output to = my_output(s, of_before);
        if (to.task < of_before) {
          f32 v[2][2];
          sum(s, to, v[0]);
          out.put(before + to.task, to, v, kept);
        }
        s.end(before);
        block_barrier();  // the sums are made
      }
      if (count <= 0) break;
      Output to = my_output(s, count);
      if (to.task < count) out.ahead(task + to.task, to, kept);
      ok = products(s, plan, task, count, brought, ring) && ok;
      before = task, of_before = count;
    }
    s.finish(runs_of(TASKS, length));
    return true;
  }

 private:
  // What a wave multiplies next, worked out by its lanes side by side: lane i has product i, which is of one unit of weights,
  // and where unit i of the activations comes from.
  struct Plan {
    TileRow<F> weights;
    u32 of = 0;      // expert << 16 | where its activations begin, in 16-byte units
    u32 use = 0;     // the rows that chose it | span << 16 | tile of the run << 18 | last of its span << 24
    u32 source = 0;  // of the activations, in pairs
    u32 left = 0;    // pairs from there to the end of the expert's
    int products = 0, activations = 0;
    int span = 0, unit = 0;  // of the wave's list, and of the expert: what comes after this plan
  };
  // The activations in LDS: those of a plan that began here.
  struct Brought {
    int span = -1, unit = 0, activations = 0;
  };
  DEVICE static int spans() { return ((int)(u32)route_count[0] + SHARED_ONE) * SPANS; }
  DEVICE static int first_unit(int span) { return span % SPANS * SPAN; }
  DEVICE static int place_of(int expert, int row) {
    return SHARED_ONE && expert == EXPERTS ? TOP_K : place_in_row(expert, row);
  }
  // Runs of several tiles have room for the shares of all, and are one plan. It depends on the number of rows alone: all blocks
  // have to agree, also those that have no route.
  DEVICE static int most_of_run(const Step& s) {
    int rows = s.rows, experts = (rows * TOP_K < EXPERTS ? rows * TOP_K : EXPERTS) + SHARED_ONE;
    int units = (experts * SPANS + WAVES - 1) / WAVES * SPAN;
    int most = most_tiles(rows), room = 1;
    if (units * rows > FITS) return 1;
    while (room < most && (room + 1) * rows <= ROWS && (room + 1) * units <= WIDTH) ++room;
    return room;
  }
  DEVICE static int share(const Step& s, int tile, int row, int place, int span) {
    return USED_WORDS - SHARES + (((tile * (int)s.rows + row) * PLACES + place) * SPANS + span) * TILE_ROWS;
  }
  DEVICE static void sum(const Step& s, const Output& to, f32 (&v)[2]) {
    v[0] = v[1] = 0;
    UNROLL for (int i = 0; i < PLACES * SPANS; ++i) UNROLL for (int j = 0; j < 2; ++j) v[j] +=
        lds_value(share(s, to.task, to.row, 0, 0) + i * TILE_ROWS + to.n + j);
  }

  // As many units as fit, tile after tile for each span; and their first loads.
  DEVICE void make(const Step& s, Plan& p, int task, int tiles, Units& ring) const {
    constexpr u32 TILES_OF_ROW = TILES_OF_K<F, WIDTH_E>, ROWS_OF_EXPERT = HIDDEN / TILE_ROWS;
    constexpr u32 BLOCKS = (HIDDEN + 127) / 128, COLUMNS = (WIDTH_E + 127) / 128;
    int lane = lane_id(), end = spans();
    p.products = p.activations = 0;
    // Where there is nothing to load, a ring in registers loads this all the same (tile.h).
    p.weights = TileRow<F>::at(down.tiles, down.scales, 0, 0);
    while (p.span < end) {
      bool shared = SHARED_ONE && p.span >= end - SPANS;
      u32 expert = shared ? EXPERTS : (u32)route_active[p.span / SPANS];
      u32 chosen = shared || s.rows == 1 ? (1u << s.rows) - 1 : rows_of_expert(expert);
      int rows = s.rows == 1 ? 1 : count_bits(chosen), last = p.unit - p.unit % SPAN + SPAN;
      if (last > UNITS) last = UNITS;
      int n = last - p.unit;
      while (n && (p.activations + n * rows > FITS || p.products + n * tiles > WIDTH)) --n;
      if (!n) break;
      int mine = lane - p.products;
      if (mine >= 0 && mine < n * tiles) {
        int tile = SPAN == 1 ? mine : mine / n, unit = SPAN == 1 ? p.unit : p.unit + mine % n;
        u32 row = expert * ROWS_OF_EXPERT + task + tile, block = expert * BLOCKS + (u32)(task + tile) * TILE_ROWS / 128;
        p.weights =
            TileRow<F>::at(down.tiles, down.scales, row * TILES_OF_ROW + unit * F::TILES, block * COLUMNS + unit);
        p.of = expert << 16 | (u32)(wave_id() * MINE16 + (p.activations + (unit - p.unit) * rows) * F::UNIT16);
        p.use = chosen | p.span % SPANS << 16 | tile << 18 | (unit + 1 == last) << 24;
      }
      mine = lane - p.activations;
      if (mine >= 0 && mine < n * rows) {
        int unit = p.unit, row = 0;
        if (s.rows > 1) {
          unit += mine / rows;
          u32 others = chosen;
          for (int i = mine % rows; i > 0; --i) others &= others - 1;
          row = lowest_bit(others);
        } else {
          unit += mine;
        }
        p.source = row * middle.stride + place_of(expert, row) * OF_EXPERT + unit * PAIRS;
        p.left = OF_EXPERT - unit * PAIRS;
      }
      p.products += n * tiles, p.activations += n * rows, p.unit += n;
      if (p.unit == last) p.span += WAVES, p.unit = first_unit(p.span);
    }
    UNROLL_SLOTS for (int i = 0; i < Units::SLOTS; ++i) load(ring, i, p, i);
  }
  DEVICE static void load(Units& ring, int slot, const Plan& p, int i) {
    bool there = i < p.products;
    ring.load(slot, p.weights.of_lane(there ? i : 0), 0, there);
  }

  // Products of all units of this wave for a run, left in LDS. `p` is the run's first plan.
  DEVICE bool products(Step& s, Plan& p, int task, int tiles, Brought& brought, Units& ring) const {
    bool ok = true;
    Acc acc = {};
    for (int span = wave_id(), unit = first_unit(span); p.products;) {
      if (brought.span != span || brought.unit != unit || brought.activations != p.activations)
        ok = gather(s, p) && ok, brought = {span, unit, p.activations};
      for (int from = 0; from < p.products; from += Units::UNROLLED) UNROLL for (int i = 0; i < Units::UNROLLED; ++i) {
          if (from + i < p.products) {
            u32 of = wave_read(p.of, from + i), use = wave_read(p.use, from + i);
            ring.take(i).multiply(columns(use & 0xffff, of & 0xffff), 0, acc);
            if (use >> 24) {
              leave(s, acc, of >> 16, use);
              acc = {};
            }
          }
          load(ring, i, p, from + i + Units::SLOTS);
        }
      if (ONE_PLAN || p.span >= spans()) break;
      span = p.span, unit = p.unit;
      make(s, p, task, tiles, ring);
    }
    return ok;
  }
  // A unit's activations lie row after row, of the rows that chose the expert.
  DEVICE static Columns columns(u32 chosen, int at) {
    return Columns(
        [&](int row) {
          if (MOST_ROWS == 1) return at;  // which stands for those that are not there
          return chosen >> row & 1 ? at + count_bits(chosen & ((1u << row) - 1)) * F::UNIT16 : ZEROS16;
        },
        MOST_ROWS > 8 && chosen > 0xff);
  }
  DEVICE static void leave(const Step& s, const Acc& acc, int expert, u32 use) {
    UNROLL for (int i = 0; i < ACCS; ++i) {
      int row = acc_col(i);
      if (row < MOST_ROWS && use >> row & 1)
        set_lds_value(share(s, use >> 18 & 63, row, place_of(expert, row), use >> 16 & 3) + acc_row(i), acc.v[i]);
    }
  }
  // The activations of a plan.
  DEVICE bool gather(Step& s, const Plan& p) const {
    int lane = lane_id(), first = wave_id() * MINE16, total = p.activations * ROW_PIECES;
    bool ok = true;
    wave_barrier();  // all lanes are done with what was there
    for (int from = 0; from < total; from += BATCH) {
      const Pair* at[BATCH];
      Pair got[BATCH][2];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b < total ? from + b : 0, pair = (i % ROW_PIECES * WIDTH + lane) * 2;
        u32 source = wave_read(p.source, i / ROW_PIECES), left = wave_read(p.left, i / ROW_PIECES);
        at[b] = from + b < total && pair < PAIRS && pair < (int)left ? middle.base + source + pair : nullptr;
      }
      ok = ok && s.collect_twos(middle.tag, at, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b, word = (first + i / ROW_PIECES * F::UNIT16) * 4, pair = (i % ROW_PIECES * WIDTH + lane) * 2;
        if (i >= total) break;
        u32 words[2] = {got[b][0].payload, got[b][1].payload};
        if constexpr (IN_HALVES<F>)
          put_halves(word, words);
        else if (pair < PAIRS)
          lds[word + pair] = words[0], lds[word + pair + 1] = words[1];
      }
    }
    wave_barrier();
    s.input_is_there();
    quantize<F>(p.activations, [&](int i) { return first + i * F::UNIT16; });
    return ok;
  }
};
