// The second half of a mixture of experts: outputs from the activations of all experts of all rows.
//
// A task is 16 output rows, and neighbouring tasks make a run, as in linear.h. The union of the chosen experts, and the shared one, are streamed once for all rows: an expert
// meets the activations of the rows that chose it, and zeros for the others. Experts are cut into SPANS of k, and every wave
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
  static constexpr int BATCH = 4, ROW_PIECES = (LOADS + WIDTH - 1) / WIDTH;  // a wave's loads of a row's unit
  static_assert(ROWS * F::UNIT16 <= MINE16, "one unit of all rows has to fit in a wave's part of LDS");
  static_assert(!IN_HALVES<F> || LOADS == WIDTH, "");

  PairRows middle;
  Matrix down;  // EXPERTS + SHARED_ONE matrices [HIDDEN][WIDTH_E]

  // The units of this wave, span after span of the list of active experts, the shared one last.
  struct Cursor {
    int span, unit, spans;  // span: of the list; unit: of the expert
    int tile = 0;           // of a run of several, of which each span meets all

    DEVICE Cursor() : span(wave_id()), spans(((int)(u32)route_count[0] + SHARED_ONE) * SPANS) { enter(); }
    DEVICE void enter() { unit = span % SPANS * SPAN; }
    DEVICE bool valid() const { return span < spans; }
    DEVICE bool last() const { return unit + 1 == end(); }  // of its span
    DEVICE int end() const { return span % SPANS * SPAN + SPAN < UNITS ? span % SPANS * SPAN + SPAN : UNITS; }
    DEVICE bool shared() const { return SHARED_ONE && span / SPANS + 1 == spans / SPANS; }
    DEVICE int expert() const { return shared() ? EXPERTS : (int)(u32)route_active[span / SPANS]; }
    DEVICE u32 chosen(const Step& s) const { return shared() ? (1u << s.rows) - 1 : rows_of_expert(expert()); }
    DEVICE void next(int tiles) {
      if (!last()) {
        ++unit;
        return;
      }
      if (++tile == tiles) tile = 0, span += WAVES;
      enter();
    }
  };

  // `out` as the stages of linear.h: ahead() and put().
  template <class Out> DEVICE bool run(Step& s, u32 stage, u32 tag, Out out) const {
    constexpr int TASKS = HIDDEN / TILE_ROWS;
    int length = run_length(s, TASKS, most_of_run(s), false);
    Chunk chunk{};
    Kept kept;
    Units ring;
    Cursor loading;
    bool ok = true;
    block_barrier();  // the last readers of LDS are done
    for (int task = s.first_task() * length, before = -1, of_before = 0;; task += n_blocks() * length) {
      int count = TASKS - task < length ? TASKS - task : length;
      if (count > 0) {
        s.begin(stage, task, tag);
        loading = Cursor();
        UNROLL_SLOTS for (int i = 0; i < Units::SLOTS; ++i) load(ring, i, loading, task, count);
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
      ok = products(s, task, count, chunk, ring, loading) && ok;
      before = task, of_before = count;
    }
    s.finish((TASKS + length - 1) / length);
    return true;
  }

 private:
  // Units whose activations are in LDS: `count` of them from `begin` on.
  struct Chunk {
    int begin = -1, count = 0;
  };
  DEVICE static int place_of(int expert, int row) {
    return SHARED_ONE && expert == EXPERTS ? TOP_K : place_in_row(expert, row);
  }
  // Runs of several tiles have room for the shares of all, and for all activations of a wave at once. It depends on the number
  // of rows alone: all blocks have to agree, also those that have no route.
  DEVICE static int most_of_run(const Step& s) {
    int rows = s.rows, experts = (rows * TOP_K < EXPERTS ? rows * TOP_K : EXPERTS) + SHARED_ONE;
    int units = (experts * SPANS + WAVES - 1) / WAVES * SPAN;
    int most = most_tiles(rows), room = 1;
    if (units * rows * F::UNIT16 > MINE16) return 1;
    while (room < most && (room + 1) * rows <= ROWS) ++room;
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

  // Products of all units of this wave for a run, left in LDS.
  DEVICE bool products(Step& s, int task, int tiles, Chunk& chunk, Units& ring, Cursor& loading) const {
    Cursor use;
    bool ok = true;
    Acc acc = {};
    for (int done = 0; use.valid();) {
      int at = wave_id() * MINE16, of_span = at;  // where the unit's activations begin, and its span's
      if (chunk.begin != done) {
        chunk.begin = done;
        ok = gather(s, use, chunk.count) && ok;
      }
      for (int end = done + chunk.count * tiles; done < end;) {
        UNROLL for (int i = 0; i < Units::UNROLLED; ++i) {
          if (done == end) break;
          if (i != done % Units::UNROLLED) continue;
          int expert = use.expert();
          u32 chosen = use.chosen(s);
          ring.take(i).multiply(columns(chosen, at), 0, acc);
          at += count_bits(chosen) * F::UNIT16;
          if (use.last()) {
            leave(s, acc, use.tile, expert, chosen, use.span % SPANS);
            acc = {};
            if (use.tile + 1 < tiles)
              at = of_span;
            else
              of_span = at;
          }
          use.next(tiles);
          load(ring, i, loading, task, tiles);
          ++done;
        }
      }
    }
    return ok;
  }
  DEVICE void load(Units& ring, int slot, Cursor& at, int task, int tiles) const {
    bool there = at.valid();
    ring.load(slot, tile_row<F, WIDTH_E>(down.tiles, down.scales, HIDDEN, there ? at.expert() : 0, task + at.tile),
              at.unit, there);
    if (there) at.next(tiles);
  }
  // A unit's activations lie row after row, of the rows that chose the expert.
  DEVICE static Columns columns(u32 chosen, int at) {
    return Columns(
        [&](int row) { return chosen >> row & 1 ? at + count_bits(chosen & ((1u << row) - 1)) * F::UNIT16 : ZEROS16; },
        chosen > 0xff);
  }
  DEVICE static void leave(const Step& s, const Acc& acc, int tile, int expert, u32 chosen, int span) {
    UNROLL for (int i = 0; i < ACCS; ++i) {
      int row = acc_col(i);
      if (chosen >> row & 1) set_lds_value(share(s, tile, row, place_of(expert, row), span) + acc_row(i), acc.v[i]);
    }
  }
  // As many units from `at` on as fit, activations of the rows that chose their experts.
  DEVICE bool gather(Step& s, Cursor at, int& count) const {
    int lane = lane_id(), left = MINE16 / F::UNIT16, unit16 = wave_id() * MINE16;
    bool ok = true;
    u32 rows = 0;  // of the unit at hand, those still to be asked for
    int expert = 0, piece = 0, put = 0;
    wave_barrier();
    for (count = 0; at.valid() || rows;) {
      const Pair* from[BATCH];
      Pair got[BATCH][2];
      int asked = 0;
      UNROLL for (int b = 0; b < BATCH; ++b) {
        from[b] = nullptr;
        if (!rows && at.valid()) {
          expert = at.expert();
          u32 chosen = at.chosen(s);
          if (count_bits(chosen) > left) at.span = at.spans;  // full
          if (at.valid()) rows = chosen, left -= count_bits(chosen), ++count;
        }
        if (!rows) continue;
        int row = lowest_bit(rows), of_unit = piece * WIDTH + lane, pair = at.unit * PAIRS + of_unit * 2;
        if (of_unit < LOADS && pair < OF_EXPERT) from[b] = middle.at(row, place_of(expert, row) * OF_EXPERT + pair);
        ++asked;
        if (++piece < ROW_PIECES) continue;
        piece = 0, rows &= rows - 1;
        if (!rows) at.next(1);
      }
      ok = ok && s.collect_twos(middle.tag, from, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        if (b >= asked) break;
        u32 words[2] = {got[b][0].payload, got[b][1].payload};
        int of_unit = put * WIDTH + lane;
        if constexpr (IN_HALVES<F>)
          put_halves(unit16 * 4, words);
        else if (of_unit < LOADS)
          lds[unit16 * 4 + of_unit * 2] = words[0], lds[unit16 * 4 + of_unit * 2 + 1] = words[1];
        if (++put == ROW_PIECES) put = 0, unit16 += F::UNIT16;
      }
    }
    wave_barrier();
    s.input_is_there();
    int first = wave_id() * MINE16;
    quantize<F>((unit16 - first) / F::UNIT16, [&](int i) { return first + i * F::UNIT16; });
    return ok;
  }
};
