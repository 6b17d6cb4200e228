// The hand-off between ranks, alone and as the mega-task has it: every block gathers all of x, pushes its part of the shares,
// sums its part, and so on; `hops` times in one launch.
#include "ranks_config.h"  // ROWS, RANKS, VALUES

#include "handoff/reduce.h"

struct Params {  // mirrored in latency.py
  u32 rows, rank, poll_limit, hops, epoch;
  Pair* x;  // [2][ROWS][VALUES]
  u32* error;
  Pair* const* parts;
  u32* const* alarms;
};

enum Stage : u32 { BEGIN, PUSH, REDUCE };

// Each thread takes up to eight pairs at once, as stages do.
DEVICE bool gather(Step& s, const Pair* x, u32 tag, f32& sum) {
  int values = (int)s.rows * VALUES;
  bool ok = true;
  for (int from = thread_id(); from < values; from += THREADS * 8) {
    Pair got[8];
    auto at = [&](int i) { return x + (from + i * THREADS < values ? from + i * THREADS : from); };
    ok = ok && s.collect(tag, at, got);
    UNROLL for (int i = 0; i < 8; ++i) sum += value_of(got[i]);
  }
  return s.all_ok(ok);
}

KERNEL void latency(const Params* params) {
  Const<Params> p = as_const(params);
  Step s(p->rows, p->rank, p->poll_limit, p->error, p->alarms);
  int values = (int)s.rows * VALUES;
  auto x = [&](u32 version) { return p->x + (u64)(version & 1) * ROWS * VALUES; };
  for (int i = block_id() * THREADS + thread_id(); i < values; i += n_blocks() * THREADS) put(x(0) + i, 1.f, p->epoch);
  for (u32 version = 0; version < p->hops; ++version) {
    u32 tag = p->epoch + version;
    s.begin(PUSH, 0, tag + 1);
    f32 sum = 0;
    bool ok = gather(s, x(version), tag, sum);
    if (ok)
      for (int i = block_id() * THREADS + thread_id(); i < values; i += n_blocks() * THREADS)
        give_share<VALUES>(s.rank, p->parts, version + 1, i, {bits<u32>(sum * 0.f)}, tag + 1);
    auto put_two = [&](int row, int channel, const f32(&v)[2], bool there) {
      if (!there) return;
      for (int j = 0; j < 2; ++j) put(x(version + 1) + row * VALUES + channel + j, v[j], tag + 1);
    };
    if (!ok || !reduce_ranks<VALUES>(s, REDUCE, tag + 1, version + 1, p->parts, x(version), put_two)) return s.report();
  }
}
