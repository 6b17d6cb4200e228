// Linear maps: tasks of 16 output rows, K split over the block's waves, their shares summed in LDS.
//
//   in   `input`: the rows of the step, from tagged pairs; `rows_of(task, m)`: where the task's weights are; `exists(task)`:
//        false for a task, and all above it, that turns out not to be there; `aim(input, task)`: where tasks differ in input
//   out  `sink(task, row, n, v)`: v[m][0 and 1] are outputs n and n + 1 of the tile, n even, for matrix m (MATRICES = 2: gate
//        and up, which one task computes side by side)
//   waits for  whoever writes the pairs of the input; the first weights are on their way before that
//   publishes  what the sink does
// Safe: LDS is read by all waves between the barrier that ends fill() and the one after leave_part(), and written outside.
#pragma once
#include "stages/input.h"

// A task's end, after every wave has left its part: sums over the waves to the sink. Begins and ends with a barrier.
template <int MATRICES, class Sink> DEVICE void finish_tile(Step& s, int task, Sink sink) {
  block_barrier();
  for (int i = thread_id(); i < 8 * (int)s.rows; i += THREADS) {
    int row = i / 8, n = i % 8 * 2;
    f32 v[MATRICES][2];
    UNROLL for (int m = 0; m < MATRICES; ++m) v[m][0] = sum_parts(m, row, n), v[m][1] = sum_parts(m, row, n + 1);
    sink(task, row, n, v);
  }
  s.end();
  block_barrier();  // before the parts, or LDS for the next input, are written again
}

template <class F, int K, int MATRICES, class In, class Exists, class RowsOf, class Aim, class Sink>
DEVICE bool linear_tasks(Step& s, u32 stage, u32 tag, int tasks, In& input, Exists exists, RowsOf rows_of, Aim aim,
                         Sink sink) {
  using Mine = Slice<F, K, F::AHEAD / MATRICES>;
  Mine slice[MATRICES];
  // Each turn asks for a task's first weights, finishes the task before while they are on their way, and then multiplies. Every
  // part of it stands here once: kernels of this size wait for their own code.
  for (int task = s.first_task(), before = -1;; task += n_blocks()) {
    bool more = task < tasks && exists(task);
    if (more) {
      s.begin(stage, task, tag);
      UNROLL for (int m = 0; m < MATRICES; ++m) slice[m].open(rows_of(task, m));
    }
    if (before >= 0) finish_tile<MATRICES>(s, before, sink);
    if (!more) break;
    aim(input, task);
    Acc acc[MATRICES] = {};
    for (int begin = 0; begin < In::PADDED; begin += input.chunk) {
      if (begin) block_barrier();  // everybody is done with the chunk before
      if (!input.fill(begin)) return false;
      int end = begin + input.chunk < In::PADDED ? begin + input.chunk : In::PADDED;
      Columns x = input.columns();
      UNROLL for (int m = 0; m < MATRICES; ++m) slice[m].run(x, begin, end, acc[m]);
    }
    UNROLL for (int m = 0; m < MATRICES; ++m) leave_part(acc[m], m);
    before = task;
  }
  s.finish(tasks);
  return true;
}

// The chunk grain of an input for linear maps of this shape.
template <class F, int K, int MATRICES = 1, class Source> DEVICE auto input_for(Step& s, const Source& source) {
  return Input<F, K, Slice<F, K, F::AHEAD / MATRICES>::GRAIN, Source>(s, source);
}

// The usual case: one matrix, the same input for all tasks.
template <class F, int K, class In, class RowsOf, class Sink>
DEVICE bool linear(Step& s, u32 stage, u32 tag, int tasks, In& input, RowsOf rows_of, Sink sink) {
  return linear_tasks<F, K, 1>(
      s, stage, tag, tasks, input, [](int) { return true; }, [&](int task, int) { return rows_of(task); },
      [](In&, int) {}, [&](int task, int row, int n, const f32(&v)[1][2]) { sink(task, row, n, v[0]); });
}
