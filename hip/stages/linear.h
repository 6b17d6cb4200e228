// Linear maps: tasks of 16 output rows, K split over the block's waves, their shares summed in LDS.
//
// Stages whose matrices have one format are run by one piece of code, whatever their dimensions: a kernel passes through all
// its code once a layer, and no instruction cache holds it several times. `stages` knows which of them it stands for, and
// answers
//   tasks()  k()  matrices()     matrices 2: gate and up, which a task computes together
//   most()  light()              of a run (below); whether its tasks are short
//   source(task)                 what is read; all tasks read the same unless separate(), and then all of a run
//   known()  sure()  decide(ok)  where it is decided late which tasks there are: how many are known before, how many there will
//                                be in any case; waits for the decision, where `ok` is this thread's answer to waits before
//   exists(task)                 false for a task, and all above it, that turns out not to be there
//   rows_of(task, m)             where the task's weights are
//   ahead(task, to, kept)        when a task begins: what the outputs need besides may be asked for
//   put(task, to, v, kept)       v[m][0 and 1] are outputs to.n and to.n + 1 of the tile for matrix m
//
// Tasks are dealt out in runs of neighbours, of which a block computes all tiles before it sums them up: one wait, one pass
// over the activations and one barrier for all of them (GLM-5.2 on an H200, three tasks a block one after the other: 3 us each).
//
// waits for  whoever writes the words of the input; the first weights are on their way before that
// publishes  what put() does
// Safe: a wave reads only activations that it brought itself. Shares are written after the barrier that ends the run before,
// and read after the one that ends the products.
#pragma once
#include "stages/input.h"

// Which outputs a thread sums: two neighbours of one row, of one task of the run. All lanes of a wave that has any are here,
// some with `there` false: their row is the first.
struct Output {
  int task, row, n;  // task: of the run
  bool there;
};
DEVICE int waves_of_task(const Step& s) { return (8 * (int)s.rows + WIDTH - 1) / WIDTH; }
DEVICE Output my_output(const Step& s, int tasks) {
  int waves = waves_of_task(s), task = 0, first = wave_id();
  while (first >= waves) first -= waves, ++task;
  int i = first * WIDTH + lane_id();
  bool there = i < 8 * (int)s.rows && task < tasks;
  return {task, there ? i / 8 : 0, i % 8 * 2, there};
}
static_assert(MOST_TILES * ((8 * 8 + WIDTH - 1) / WIDTH) <= WAVES &&
                  MOST_TILES / 2 * ((8 * ROWS + WIDTH - 1) / WIDTH) <= WAVES,
              "every output of a run has a thread");
// Over the eight threads that share a row's 16 outputs.
DEVICE f32 sum_of_tile(f32 v) {
  UNROLL for (int o = 1; o < 8; o *= 2) v += bits<f32>(wave_read(bits<u32>(v), lane_id() ^ o));
  return v;
}
// What a stage says of itself, asked for once: in questions one by one the choice among stages was made again each time.
struct Facts {
  int tasks, k, matrices, most, known, sure;
  bool light, separate;
};
template <class Stage> DEVICE Facts facts_of(const Stage& s) {
  return {s.tasks(), s.k(), s.matrices(), s.most(), s.known(), s.sure(), s.light(), s.separate()};
}
// What a thread may keep from a task's beginning to its end.
struct Kept {
  Pair old[2];
  f32 weight[2];  // or an angle
};

// How many neighbouring tasks make a run: as many as every block gets anyhow. `light`: or more, if then the blocks suffice that
// have had none of the stage before, or a task less than the others. They wait with their first weights at hand; a block that
// has just ended a task needs 3 us to be as far (GLM-5.2 on an H200), and a few short tasks more take less.
DEVICE int run_length(const Step& s, int tasks, int most, bool light) {
  int n = n_blocks(), each = 1;
  for (; each * n < tasks; ++each) {
  }
  if (light)
    for (int length = 1; length <= most; length *= 2)
      if (length * s.idle >= tasks) return length;
  for (int length = most; length > 1; length = light ? length / 2 : length - 1) {  // light ones by powers of two
    int multiple = length;
    while (multiple < each) multiple += length;
    if (multiple == each) return length;
  }
  return 1;
}

// How many runs tasks make; without a division, whose code is long.
DEVICE int runs_of(int tasks, int length) {
  switch (length) {
    case 1:
      return tasks;
    case 2:
      return (tasks + 1) / 2;
    case 3:
      return (tasks + 2) / 3;
    default:
      return (tasks + 3) / 4;
  }
}
static_assert(MOST_TILES == 4, "");

// A run's end, after every wave has left its shares: sums over the waves to put(). Begins and ends with a barrier.
template <class Stages>
DEVICE bool finish_run(Step& s, Stages& stages, int matrices, int task, int tasks, bool ok, Kept& kept) {
  if (!s.all_ok(ok)) return false;
  Output to = my_output(s, tasks);
  if (to.task < tasks) {
    f32 v[2][2];
    UNROLL for (int j = 0; j < 2; ++j) v[0][j] = sum_shares(to.task * matrices, to.row, to.n + j, s.rows);
    if (matrices == 2)
      UNROLL for (int j = 0; j < 2; ++j) v[1][j] = sum_shares(to.task * 2 + 1, to.row, to.n + j, s.rows);
    stages.put(task + to.task, to, v, kept);
  }
  s.end(task);
  block_barrier();  // before shares are written again
  return true;
}

template <class F, bool WEIGHTED, class Stages> DEVICE bool linear(Step& s, u32 stage, u32 tag, Stages stages) {
  const Facts is = facts_of(stages);
  Input<F, WEIGHTED> input(s, is.k);
  Slice<F> slice(padded<F>(is.k) / F::UNIT, input.turns);
  int most = most_tiles(s.rows) / is.matrices,
      length = run_length(s, is.tasks, is.most < most ? is.most : most, is.light);
  Kept kept;
  bool ok = true;
  // Each turn asks for a run's first weights, finishes the run before while they are on their way, and then multiplies. Every
  // part of it stands here once. A first turn, of a stage whose tasks are decided late, only takes the input meanwhile.
  int task = s.first_task() * length, before = -1, of_before = 0;
  bool undecided = task >= is.known && task < is.sure;
  for (bool decided = false;;) {
    int count = 0;
    if (undecided) {
      s.begin(stage, task, tag);
    } else {
      bool known = task < is.known;
      if (!known && !decided && !stages.decide(ok)) return false;
      decided |= !known;
      int limit = known && is.known < is.tasks ? is.known : is.tasks;
      while (count < length && task + count < limit && (known || stages.exists(task + count))) ++count;
      if (count) {
        s.begin(stage, task, tag);
        slice.open(count * is.matrices, [&](int tile) {
          bool two = is.matrices == 2;
          return stages.rows_of(task + (two ? tile / 2 : tile), two ? tile % 2 : 0).template tile_row<F>();
        });
      }
      if (before >= 0 && !finish_run(s, stages, is.matrices, before, of_before, ok, kept)) return false;
      if (!count) break;
      Output to = my_output(s, count);
      if (to.task < count) stages.ahead(task + to.task, to, kept);
      if (is.separate) input.have = -1;
    }
    for (int begin = 0; begin < input.all_turns; begin += input.turns) {
      ok = input.fill(stages.source(task), begin) && ok;
      if (undecided) break;
      for (int tile = 0; tile < slice.tiles; ++tile) {
        Acc acc = {};
        if (begin) acc = left_share(tile, s.rows);
        slice.run(input.columns(), begin, acc);
        leave_share(acc, tile, s.rows);
      }
    }
    if (!undecided) before = task, of_before = count, task += n_blocks() * length;
    undecided = false;
  }
  s.finish(runs_of(is.tasks, length));
  return true;
}
