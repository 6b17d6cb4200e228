// The embedding of each row's token: the first version of the residual stream.
//   out  x [row][HIDDEN] as tagged pairs;  a task is 2 * THREADS channels of a row
#pragma once
#include "stages/input.h"

template <class Table, int HIDDEN>
DEVICE bool embed(Step& s, u32 stage, u32 tag, const void* embedding, const u32* tokens, Pair* x) {
  constexpr int PIECES_A_ROW = (HIDDEN / 2 + THREADS - 1) / THREADS;
  int tasks = s.rows * PIECES_A_ROW;
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int row = task / PIECES_A_ROW, channel = 2 * (task % PIECES_A_ROW * THREADS + thread_id());
    if (channel < HIDDEN) {
      u64 at = (u64)load_constant(tokens + row) * HIDDEN + channel;
      u32 low, high;
      if constexpr (Table::ACT_BYTES == 4) {
        low = load_constant((const u32*)embedding + at), high = load_constant((const u32*)embedding + at + 1);
      } else {
        u32 both = load_constant((const u32*)embedding + at / 2);
        low = both << 16, high = both & 0xffff0000u;
      }
      store_pair(x + row * HIDDEN + channel, {low, tag});
      store_pair(x + row * HIDDEN + channel + 1, {high, tag});
    }
    s.end();
  }
  s.finish(tasks);
  return true;
}
