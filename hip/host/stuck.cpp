// Says who waits for what when nobody can go on: of the spinning threads the two that are furthest behind, which are
// nearest to the cause; if none spins, a thread that waits for its companions.
#include <stdio.h>

#include "internal.h"

namespace host {
namespace {

bool spins(const Fiber& f) { return f.wave->spinning >> f.lane & 1; }
bool waits(const Fiber& f) { return (f.wave->meeting | f.wave->at_barrier | f.wave->at_mma) >> f.lane & 1; }

bool before(const Place& a, const Place& b) {
  if (a.epoch != b.epoch) return a.epoch < b.epoch;
  if (a.stage != b.stage) return a.stage < b.stage;
  return a.task < b.task;
}

// The one furthest behind, not counting a block.
const Fiber* last_spinner(int except) {
  const Fiber* last = nullptr;
  for (int i = 0; i < n_fibers; ++i) {
    const Fiber& f = fibers[i];
    if (spins(f) && f.wave->block->index != except && (!last || before(f.place, last->place))) last = &f;
  }
  return last;
}

int say_who(const Fiber& f, char* text, size_t size) {
  return snprintf(text, size, " %s thread %d stage %s task %u epoch %u waits for ", block_name(f.wave->block->index),
                  f.thread, stage_name(f.place.stage), f.place.task, f.place.epoch);
}

int say_what(const Fiber& f, char* text, size_t size) {
  if (!f.polled)
    return snprintf(text, size, "something that it does not load as a pair; missing: a store that ends its loop;");
  char where[200], why[300];
  describe_address(f.polled, where, sizeof where);
  explain_word(f.polled, why, sizeof why);
  return snprintf(text, size, "tag %u of %s, sees %u (%s); missing: a store of that tag;", f.wanted, where, f.seen[1],
                  why);
}

int say_companions(const Fiber& f, char* text, size_t size) {
  const Wave& w = *f.wave;
  if (w.at_barrier >> f.lane & 1)
    return snprintf(text, size, "%d threads at a barrier; missing: these threads;",
                    (int)launch.threads - w.block->arrived);
  return snprintf(text, size, "the rest of its wave%s; missing: those lanes;",
                  w.at_mma >> f.lane & 1 ? " at a tile product" : "");
}

}  // namespace

void describe_stuck() {
  char text[1400] = "no thread can go on:";
  size_t n = strlen(text);
  const Fiber* first = last_spinner(-1);
  const Fiber* second = first ? last_spinner(first->wave->block->index) : nullptr;
  for (const Fiber* f = first; f; f = f == first ? second : nullptr) {
    n += say_who(*f, text + n, sizeof text - n);
    n += say_what(*f, text + n, sizeof text - n);
  }
  if (!first)
    for (int i = 0; i < n_fibers && !first; ++i)
      if (waits(fibers[i])) {
        first = &fibers[i];
        n += say_who(*first, text + n, sizeof text - n);
        say_companions(*first, text + n, sizeof text - n);
      }
  if (first && !result.reports) {
    result.stuck = 1, result.rank = first->wave->block->rank, result.block = first->wave->block->id,
    result.stage = first->place.stage;
    result.task = first->place.task, result.expected = first->wanted, result.seen = first->seen[1];
  }
  report("%s", text);
}

void spins_without_pause() {
  report("%s stage %s task %u polls again and again without pause()", block_name(self->wave->block->index),
         stage_name(self->place.stage), self->place.task);
  give_up();
}

}  // namespace host
