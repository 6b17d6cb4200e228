// Which blocks of SIZE neighbouring entries later selections are bound to: the BLOCKS best by their highest score, the newest
// block first of all; ties to the lowest.
//
// A task is a row. A row that has no more blocks than that is not bound, but has its flag too.
//   in   scores [row][entry], flags of all tasks that made them
//   out  taken [row][block], 1 or 0, written through, flag [row]
// One block of threads reads the scores of its row seven times, as select.h.
#pragma once
#include "stages/select.h"

template <int BLOCKS, int SIZE> struct CandidateBlocks {
  const f32* scores;  // [rows][stride]
  u64 stride;
  const u32* positions;
  u32 ratio;                // tokens of an entry
  const Pair* score_flags;  // [rows][max_pages]
  u32 max_pages;
  u32* taken;  // [rows][stride / SIZE]
  Pair* flags;

  DEVICE u32 entries(int row) const { return (load_constant(positions + row) + 1) / ratio; }
  DEVICE u32 blocks(int row) const { return (entries(row) + SIZE - 1) / SIZE; }
  DEVICE bool bound(int row) const { return blocks(row) > BLOCKS; }
  DEVICE u32* of_row(int row) const { return taken + row * (stride / SIZE); }

  DEVICE bool run(Step& s, u32 stage, u32 tag) const {
    for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
      s.begin(stage, row, tag);
      if (bound(row)) {
        u32 n = entries(row), of = blocks(row);
        if (!s.wait_flags((n + PAGE - 1) / PAGE, tag, [&](int page) { return score_flags + row * max_pages + page; }))
          return false;
        s.input_is_there();
        acquire_device();
        auto best = [&](u32 block) { return block + 1 == of ? 0xffffffffu : best_of(row, block, tag); };
        Select<BLOCKS>::take_best(of, best,
                                  [&](u32 block, bool in, u32) { store_device(of_row(row) + block, (u32)in, tag); });
      }
      s.announce(flags + row, tag, Stored::THROUGH);
    }
    s.finish(s.rows);
    return true;
  }

 private:
  DEVICE u32 best_of(int row, u32 block, u32 tag) const {  // of a block that is full
    u32 best = 0;
    UNROLL for (int i = 0; i < SIZE; ++i) {
      u32 key = order_key(load_plain(scores + row * stride + block * SIZE + i, tag));
      best = key > best ? key : best;
    }
    return best;
  }
};

// A later selection, bound to them: what may not be selected has a key below all others.
template <int BLOCKS, int SIZE> struct ByCandidates {
  static constexpr bool WAITS = true;
  CandidateBlocks<BLOCKS, SIZE> candidates;
  u32 tag;  // of the layer that chose them

  DEVICE bool wait(Step& s, int row) const { return s.wait_flag(candidates.flags + row, tag); }
  DEVICE u32 key(int row, u32 entry, u32 key) const {
    return !candidates.bound(row) || load_plain(candidates.of_row(row) + entry / SIZE, tag) ? key : 0;
  }
};
