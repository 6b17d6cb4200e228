// The embedding of each row's token: the first version of the residual stream.
//   out  sink(row, channel, v, there): v of `channel` and the next; a task is 2 * THREADS channels of a row, and eight threads
//        in a row have 16 channels. All threads are there
#pragma once
#include "stages/input.h"

// Rows' tokens: the host's, or what the launch itself chose before, under a tag.
struct TokensIn {
  const u32* tokens;   // [rows]
  const Pair* chosen;  // [rows]
  u32 tag;             // of `chosen`; 0: the host's

  DEVICE bool take(Step& s, int row, u32& token) const {
    if (!tag) {
      token = load_constant(tokens + row);
      return true;
    }
    Pair got[1];
    bool ok = s.collect(tag, [&](int) { return chosen + row; }, got);
    token = got[0].payload;
    return ok;
  }
};

// Row r of the table for row r: a residual stream that another launch has left.
struct OwnRows {
  static constexpr u32 tag = 0;

  DEVICE bool take(Step&, int row, u32& token) const {
    token = row;
    return true;
  }
};

template <class Table, int HIDDEN, class Tokens, class Sink>
DEVICE bool embed(Step& s, u32 stage, u32 tag, const void* embedding, const Tokens& tokens, Sink sink) {
  constexpr int PIECES_A_ROW = (HIDDEN / 2 + THREADS - 1) / THREADS;
  int tasks = s.rows * PIECES_A_ROW;
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int row = task / PIECES_A_ROW, channel = 2 * (task % PIECES_A_ROW * THREADS + thread_id());
    u32 token = 0, low = 0, high = 0;
    bool ok = tokens.take(s, row, token);
    if (tokens.tag && !s.all_ok(ok)) return false;
    if (channel < HIDDEN) {
      u64 at = (u64)token * HIDDEN + channel;
      if constexpr (Table::ACT_BYTES == 4) {
        low = load_constant((const u32*)embedding + at), high = load_constant((const u32*)embedding + at + 1);
      } else {
        u32 both = load_constant((const u32*)embedding + at / 2);
        low = both << 16, high = both & 0xffff0000u;
      }
    }
    sink(row, channel, {bits<f32>(low), bits<f32>(high)}, channel < HIDDEN);
    s.end();
  }
  s.finish(tasks);
  return true;
}
