// Attention with sinks in one launch: queries from plain memory; the step's own entries written by this launch, as a cache
// stage would.
#include "sizes.h"

#include "stages/sink_attend.h"

struct Args {  // mirrored in test_sink_attend.py
  u32 rows, epoch, poll_limit, max_pages, max_splits, window, ratio, k;
  f32 scale;
  const f32 *given, *squares, *sinks, *rope;      // given [rows][HEADS][D], squares [rows][HEADS][D / 16] or null
  const u32 *positions, *slots, *table, *listed;  // listed [rows][k]
  const void *own_window, *own_entry;             // [rows][D], as the caches have them
  Pair *query, *query_squares, *window_flags, *entry_flags, *selection_flags, *split_flags, *merged;
  u32* selection;
  void *ring, *entries;
  f32 *out, *stat;
  u32* error;
};
enum Stage : u32 { LOAD, ATTEND, MERGE };
using Of = SinkAttend<TESTED_FORMAT, HEADS, D, ROPE>;

DEVICE void copy_entry(void* to, u64 place, const void* own, int row, u32 tag) {
  constexpr int WORDS = D * TESTED_FORMAT::ACT_BYTES / 4;
  for (int w = thread_id(); w < WORDS; w += THREADS)
    store_device((u32*)to + place * WORDS + w, load_constant((const u32*)own + row * WORDS + w), tag);
}
DEVICE void load(Step& s, const Args& a, const SinkEntries& from) {
  constexpr int PARTS = HEADS * D / 16;
  for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
    s.begin(LOAD, row, a.epoch);
    for (int k = thread_id(); a.squares && k < PARTS; k += THREADS)
      put(a.query_squares + row * PARTS + k, load_constant(a.squares + row * PARTS + k), a.epoch);
    for (int k = thread_id(); k < HEADS * D; k += THREADS)
      put(a.query + row * HEADS * D + k, load_constant(a.given + row * HEADS * D + k), a.epoch);
    bool own;
    int last = from.in_window(row) - 1, made = from.made(row);
    copy_entry(a.ring, from.place({row, last / 32}, last % 32, 0, own), a.own_window, row, a.epoch);
    s.announce(a.window_flags + row, a.epoch, Stored::THROUGH);
    if (from.listed(row))
      for (u32 i = thread_id(); i < a.k; i += THREADS)
        store_device(a.selection + row * a.k + i, load_constant(a.listed + row * a.k + i), a.epoch);
    s.announce(a.selection_flags + row, a.epoch, Stored::THROUGH);
    if (from.finishes_one(row)) {
      SinkEntries all = from;
      all.selection = nullptr;
      RowPart newest{row, all.window_splits(row) + (made - 1) / 32};
      copy_entry(a.entries, all.place(newest, (made - 1) % 32, 0, own), a.own_entry, row, a.epoch);
    }
    s.announce(a.entry_flags + row, a.epoch, Stored::THROUGH);
  }
  s.finish(s.rows);
}

KERNEL void sink_attend(const Args* args) {
  Args a = copy_of(as_const(args));
  Step s(a.rows, 0, a.poll_limit, a.error, nullptr);
  SinkEntries from{a.positions,
                   a.slots,
                   a.ring,
                   a.window,
                   a.ratio ? a.entries : nullptr,
                   {a.table, a.max_pages},
                   a.ratio,
                   a.k ? a.selection : nullptr,
                   a.k};
  load(s, a, from);
  Of stage{{a.query, HEADS * D, a.epoch},
           {a.squares ? a.query_squares : nullptr, HEADS * D / 16, a.epoch},
           1e-6f,
           from,
           a.window_flags,
           a.entry_flags,
           a.selection_flags,
           a.epoch,
           a.epoch,
           {{a.entry_flags, a.epoch}, {}, {}},
           a.scale,
           a.out,
           a.stat,
           a.split_flags,
           (int)a.max_splits};
  if (!stage.attend(s, ATTEND, a.epoch) || !stage.merge<F32>(s, MERGE, a.epoch, a.sinks, a.rope, a.merged)) s.report();
}
