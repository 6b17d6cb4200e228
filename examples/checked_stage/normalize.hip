// A long row divided by its root mean square: every task sums the squares of its part, then each needs the sums of all.
#include "platform/numeric.h"
#include "platform/platform.h"

enum Stage : u32 { SQUARES, RESULT };
constexpr u32 TASKS = 4;

struct Args {  // what rocmega.check.Kernel gives: epoch, rows, then constants and regions in their order
  u32 epoch, rows;
  const f32* x;  // [TASKS][THREADS]
  f32* squares;  // [TASKS], written through
  Pair* flags;   // [TASKS]
  f32* y;        // [TASKS][THREADS]
};

KERNEL void normalize(const Args* args) {
  Args a = *args;
  u32 me = thread_id();
  for (u32 task = block_id(); task < TASKS; task += n_blocks()) {
    mark(SQUARES, task, a.epoch);  // for reports
    f32 x = load_constant(a.x + task * THREADS + me), sum = block_sum(x * x);
    if (me == 0) store_device(a.squares + task, sum, a.epoch);
    drain();          // the store has left this wave,
    block_barrier();  // and no other wave is behind
    if (me == 0) publish(a.flags + task, {0, a.epoch});
  }
  for (u32 task = block_id(); task < TASKS; task += n_blocks()) {
    mark(RESULT, task, a.epoch);
    if (me < TASKS)
      while ((i32)(load_flag(a.flags + me, a.epoch).tag - a.epoch) < 0) pause();
    block_barrier();  // all flags are there, for all waves
    f32 sum = 0;
    for (u32 i = 0; i < TASKS; ++i) sum += load_device(a.squares + i, a.epoch);
    f32 x = load_constant(a.x + task * THREADS + me);
    store_plain(a.y + task * THREADS + me, x / __builtin_sqrtf(sum / (TASKS * THREADS)), a.epoch);
  }
}
