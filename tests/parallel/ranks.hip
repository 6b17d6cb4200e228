// Ranks without a model: layers of shares that every rank pushes and sums, by the parts that a mega-task uses.
//   begin   -> x(0)         the same on every rank
//   share   x -> parts      every value of a share needs all of x, as a projection does
//   reduce  parts, x -> x'  hip/handoff/reduce.h
#include "ranks_config.h"  // ROWS, RANKS, VALUES

#include "handoff/reduce.h"

enum Stage : u32 { BEGIN, SHARE, REDUCE };

struct Params {                                     // mirrored in chain.py
  u32 rows, rank, poll_limit, layers, epoch, mute;  // mute: this rank leaves one value out in layer 2
  Pair* x;                                          // [2][ROWS][VALUES]
  u32* error;
  Pair* const* parts;
  u32* const* alarms;
  f32* out;  // [layers][ROWS][VALUES]: x(0), x(1), ... as this rank's shares saw them
};

struct Chain {
  Const<Params> p;
  Step s;

  DEVICE explicit Chain(Const<Params> p) : p(p), s(p->rows, p->rank, p->poll_limit, p->error, p->alarms) {}

  DEVICE u32 tag(u32 version) const { return p->epoch + version; }
  DEVICE Pair* x(u32 version) const { return p->x + (u64)(version & 1) * ROWS * VALUES; }

  // A share of value i of a row: weights -1, 0 and 1 that differ from rank to rank.
  DEVICE bool share(u32 version, int row, int i, f32& sum) {
    sum = 0;
    for (int k = 0; k < VALUES; ++k) {
      Pair got[1];
      if (!s.collect(tag(version), [&](int) { return x(version) + row * VALUES + k; }, got)) return false;
      if (k == i) store_plain(p->out + ((u64)version * ROWS + row) * VALUES + i, value_of(got[0]), tag(version));
      int weight = (int)((u32)(k * 7 + i * 3 + 5 * s.rank) % 3) - 1;
      sum = __builtin_fmaf((f32)weight, value_of(got[0]), sum);
    }
    sum *= 1.f / VALUES;
    return true;
  }
  DEVICE bool shares(u32 version) {
    int values = (int)s.rows * VALUES, tasks = (values + THREADS - 1) / THREADS;
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(SHARE, task, tag(version + 1));
      int at = task * THREADS + thread_id();
      f32 mine[1] = {};
      bool ok = at >= values || share(version, at / VALUES, at % VALUES, mine[0]);
      bool muted = p->mute && version == 2 && at == 0;
      if (ok && at < values && !muted)
        give_share<VALUES>(s.rank, p->parts, version + 1, at, {bits<u32>(mine[0])}, tag(version + 1));
      if (!s.all_ok(ok)) return false;
    }
    s.finish(tasks);
    return true;
  }
  DEVICE bool begin() {
    int tasks = (int)s.rows;
    for (int row = s.first_task(); row < tasks; row += n_blocks()) {
      s.begin(BEGIN, row, tag(0));
      for (int i = thread_id(); i < VALUES; i += THREADS)
        put(x(0) + row * VALUES + i, (f32)((row * 31 + i * 17 + (int)p->epoch) % 64 - 32) / 32, tag(0));
    }
    s.finish(tasks);
    return true;
  }
  DEVICE bool run() {
    begin();
    for (u32 version = 0; version < p->layers; ++version) {
      if (!shares(version)) return false;
      auto put_two = [&](int row, int channel, const f32(&v)[2], bool there) {
        if (!there) return;
        for (int j = 0; j < 2; ++j) put(x(version + 1) + row * VALUES + channel + j, v[j], tag(version + 1));
      };
      if (!reduce_ranks<VALUES>(s, REDUCE, tag(version + 1), version + 1, p->parts, x(version), put_two)) return false;
    }
    return true;
  }
};

KERNEL void ranks(const Params* params) {
  Chain chain(as_const(params));
  if (!chain.run()) chain.s.report();
}
