// Engram in one launch, with the identity in place of the linear map where shapes allow it: mapped values come from memory.
#include "sizes.h"

#include "stages/activations.h"
#include "stages/engram.h"

struct Args {  // mirrored in test_engram.py
  u32 rows, epoch, poll_limit, padding;
  f32 eps;
  const f32 *streams, *mapped, *q_weight, *k_weight;
  const u64* multipliers;
  const u32 *heights, *ids, *tokens, *positions, *slots;
  const void* table;
  const u8* scales;
  u32* recent;
  Pair *h, *kv, *rows_out, *dots, *next;
  u32* error;
};
enum Stage : u32 { LOAD, LOOK_UP, DOTS, ADD };
using Gate = EngramGate<STREAMS, HIDDEN>;

DEVICE void load(const Step& s, Pair* out, const f32* from, int width, u32 tag) {
  for (int row = s.first_task(); row < (int)s.rows; row += n_blocks())
    for (int k = thread_id(); k < width; k += THREADS)
      put(out + row * width + k, load_constant(from + row * width + k), tag);
}
DEVICE bool run(Step& s, const Args& a) {
  constexpr int ALL = STREAMS * HIDDEN, MAPPED = ALL + HIDDEN;
  load(s, a.h, a.streams, ALL, a.epoch);
  load(s, a.kv, a.mapped, MAPPED, a.epoch);
  s.finish(s.rows);
  NgramHash<NGRAM, HASH_HEADS> hash{a.multipliers, a.heights,   a.ids,   a.padding,
                                    a.tokens,      a.positions, a.slots, a.recent};
  Gate gate{{a.h, ALL, a.epoch}, {a.kv, MAPPED, a.epoch}, a.q_weight, a.k_weight, a.eps};
  return engram_look_up<F32, F32, NGRAM, HASH_HEADS, DIM>(s, LOOK_UP, a.epoch, hash, a.table, a.scales, true,
                                                          a.rows_out) &&
         gate.dots(s, DOTS, a.epoch, a.dots) &&
         gate.add(s, ADD, a.epoch, {a.dots, Gate::DOTS, a.epoch},
                  [&](int row, int channel, const f32(&v)[STREAMS][2], bool there) {
                    for (int i = 0; there && i < 2 * STREAMS; ++i)
                      put(a.next + row * ALL + i / 2 * HIDDEN + channel + i % 2, v[i / 2][i % 2], a.epoch);
                  });
}

KERNEL void engram(const Args* args) {
  Args a = copy_of(as_const(args));
  Step s(a.rows, 0, a.poll_limit, a.error, nullptr);
  if (!run(s, a)) s.report();
}

struct Points {
  u32 count;
  f32 limit;
  const f32 *x, *y;
  f32 *score, *gated;
  u32* error;
};
KERNEL void functions(const Points* args) {
  Points p = copy_of(as_const(args));
  for (u32 i = thread_id(); i < p.count; i += THREADS) {
    f32 x = load_constant(p.x + i);
    store_plain(p.score + i, router_score(x), 1);
    store_plain(p.gated + i, clamped_swiglu(x, load_constant(p.y + i), p.limit), 1);
  }
}
