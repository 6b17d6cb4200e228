// Waits for two ranks that are not there, as the mega-task does, until it gives up: how long a poll takes here.
constexpr int ROWS = 1, RANKS = 2;

#include "handoff/reduce.h"

struct PollArgs {
  u32 polls;
  const Pair* words;  // [RANKS], never written
  u32* error;         // [2][ERROR_WORDS]
  u32* const* alarms;
};

KERNEL void poll(const PollArgs* args) {
  Const<PollArgs> a = as_const(args);
  Step s(1, 0, a->polls, a->error, a->alarms);
  s.begin(0, 0, 1);
  const Pair* words = a->words;
  Pair got[RANKS];
  if (!s.all_ok(collect_ranks<1>(s, 1, [&](int rank) { return words + rank; }, got))) s.report();
}
