// When a block began a task, had its input, and was done with it. Compiled in with -DTIMELINE=1 only; else nothing is left.
#pragma once
#include "platform/platform.h"

enum class Moment : u32 { BEGIN, INPUT, END };

#if TIMELINE
// Thread 0's stamps go to records[block][capacity]: time, tag, stage, task * 4 + moment. Of the time the low word, which does
// not come round within a step. A block that runs out of room stops stamping; `count` [blocks] says how many each made.
struct Timeline {
  Vec4* records;
  u32* count;
  u32 capacity, made = 0;

  DEVICE void stamp(u32 stage, u32 task, Moment moment, u32 tag) {
    if (thread_id() != 0 || !records) return;
    u32 now = (u32)clock_ticks();
    if (made < capacity)
      store_plain(records + (u64)block_id() * capacity + made, Vec4{{now, tag, stage, task * 4 + (u32)moment}}, tag);
    ++made;
  }
  DEVICE void close(u32 tag) const {
    if (thread_id() == 0 && records) store_plain(count + block_id(), made, tag);
  }
};
#else
struct Timeline {
  DEVICE void stamp(u32, u32, Moment, u32) {}
  DEVICE void close(u32) const {}
};
#endif
