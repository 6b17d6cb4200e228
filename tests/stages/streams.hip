// One site of the residual streams in one launch: mix, site, collapse, and the expansion of a sublayer that does nothing.
#include "sizes.h"

#include "stages/streams.h"

struct Args {  // mirrored in test_streams.py
  u32 rows, epoch, poll_limit, rounds;
  f32 norm_eps, eps;
  const f32 *streams, *weights, *scale, *base;  // [rows][STREAMS][HIDDEN]; [OUT][STREAMS * HIDDEN]; [3]; [OUT]
  Pair *h, *products, *site, *x, *next, *next_x;
  u32* error;
};
enum Stage : u32 { LOAD, MIX, SITE, COLLAPSE, EXPAND };
using Of = Streams<STREAMS, HIDDEN>;

// The sublayer is y = 2 x, computed where it is needed: a task is 16 channels of all rows, as those of a linear map.
DEVICE bool expand(Step& s, const PairRows& h, const PairRows& site, const PairRows& x, const Args& a) {
  for (int task = s.first_task(); task < HIDDEN / 16; task += n_blocks()) {
    s.begin(EXPAND, task, a.epoch);
    bool ok = true;
    for (int i = thread_id(); i < 8 * (int)s.rows; i += THREADS) {
      int row = i / 8, channel = task * 16 + i % 8 * 2;
      Pair got[2];
      ok = x.take(s, row, [channel](int j) { return channel + j; }, got) && ok;
      f32 next[2];
      Of::Before before;
      ok = Of::before(s, h, site, row, channel, before) && ok;
      Of::expand(before, row, channel, {2 * value_of(got[0]), 2 * value_of(got[1])}, a.next, next, a.epoch);
      for (int j = 0; j < 2; ++j) put(a.next_x + row * HIDDEN + channel + j, next[j], a.epoch);
    }
    if (!s.all_ok(ok)) return false;
    s.end();
  }
  s.finish(HIDDEN / 16);
  return true;
}

DEVICE bool run(Step& s, const Args& a) {
  for (int row = s.first_task(); row < (int)s.rows; row += n_blocks())
    for (int k = thread_id(); k < Of::WIDTH_ALL; k += THREADS)
      put(a.h + row * Of::WIDTH_ALL + k, load_constant(a.streams + row * Of::WIDTH_ALL + k), a.epoch);
  s.finish(s.rows);
  PairRows h{a.h, Of::WIDTH_ALL, a.epoch}, products{a.products, Of::SLICED, a.epoch}, site{a.site, Of::OUT, a.epoch};
  Of streams{a.scale, a.base, a.norm_eps, a.eps};
  return Of::mix(s, MIX, a.epoch, h, a.weights, a.products) &&
         streams.site(s, SITE, a.epoch, a.rounds, products, a.site) &&
         streams.collapse(s, COLLAPSE, a.epoch, products, h,
                          [&](int row, int channel, const f32(&x)[2], bool there) {
                            for (int j = 0; there && j < 2; ++j) put(a.x + row * HIDDEN + channel + j, x[j], a.epoch);
                          }) &&
         expand(s, h, site, {a.x, HIDDEN, a.epoch}, a);
}

KERNEL void streams(const Args* args) {
  Args a = copy_of(as_const(args));
  Step s(a.rows, 0, a.poll_limit, a.error, nullptr);
  if (!run(s, a)) s.report();
}
