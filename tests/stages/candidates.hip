// Candidates by one layer's scores, and a selection by those of a later layer that is bound to them, in one launch.
#include "sizes.h"

#include "stages/candidates.h"

struct Args {  // mirrored in test_candidates.py
  u32 rows, epoch, poll_limit, max_pages;
  const f32 *first, *later;  // [rows][max_pages * PAGE]
  const u32* positions;
  f32 *scores, *later_scores;
  Pair *score_flags, *later_flags, *candidate_flags, *selection_flags;
  u32 *taken, *selection;
  u32* error;
};
enum Stage : u32 { SCORES, LATER_SCORES, CANDIDATES, SELECT };
using Blocks = CandidateBlocks<BLOCKS, SIZE>;

// A task is a page of a row's entries, as in index_scores.h.
DEVICE void load(Step& s, u32 stage, const Args& a, const f32* from, f32* scores, Pair* flags, u32 tag) {
  int tasks = (int)(s.rows * a.max_pages);
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    u32 row = (u32)task / a.max_pages, page = (u32)task % a.max_pages;
    u32 entries = (load_constant(a.positions + row) + 1) / RATIO;
    if (page * PAGE >= entries) continue;
    s.begin(stage, task, tag);
    for (u32 k = thread_id(); k < (u32)PAGE; k += THREADS)
      store_device(scores + (u64)task * PAGE + k, load_constant(from + (u64)task * PAGE + k), tag);
    s.announce(flags + task, tag, Stored::THROUGH);
  }
  s.finish(tasks);
}

KERNEL void candidates(const Args* args) {
  Args a = copy_of(as_const(args));
  Step s(a.rows, 0, a.poll_limit, a.error, nullptr);
  u64 stride = (u64)a.max_pages * PAGE;
  u32 later = a.epoch + 1;
  load(s, SCORES, a, a.first, a.scores, a.score_flags, a.epoch);
  Blocks blocks{a.scores, stride, a.positions, RATIO, a.score_flags, a.max_pages, a.taken, a.candidate_flags};
  bool ok = blocks.run(s, CANDIDATES, a.epoch);
  if (ok) load(s, LATER_SCORES, a, a.later, a.later_scores, a.later_flags, later);
  Select<TOPK> best{a.later_scores, stride,      a.positions,       a.later_flags,
                    a.max_pages,    a.selection, a.selection_flags, RATIO};
  if (!ok || !best.run(s, SELECT, later, ByCandidates<BLOCKS, SIZE>{blocks, a.epoch})) s.report();
}
