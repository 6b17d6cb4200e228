// Greedy choice: every block keeps the best logit it has computed for each row and publishes that; one task takes the best
// of the blocks. A maximum with ties to the lowest token does not depend on who computed what. Of ranks, each has a part of the
// vocabulary: they offer each other the best of it, and all choose the same.
#pragma once
#include "handoff/reduce.h"
#include "stages/linear.h"

#ifndef MANY_TOKENS
#define MANY_TOKENS 0  // 1: a launch may run several tokens
#endif

struct Best {
  f32 value = -__builtin_inff();
  u32 token = 0xffffffffu;

  DEVICE void offer(f32 v, u32 t) {
    if (v > value || (v == value && t < token)) value = v, token = t;
  }
};

// `count` candidates, of which thread at(i) has the i-th; the best of them, to the threads that are `first`.
template <class At> DEVICE Best best_of(Best mine, bool first, int count, At at) {
  int me = thread_id();
  set_lds_value(2 * me, mine.value), lds[2 * me + 1] = mine.token;
  block_barrier();
  if (first)
    for (int i = 0; i < count; ++i) mine.offer(lds_value(2 * at(i)), lds[2 * at(i) + 1]);
  block_barrier();
  return mine;
}

//   in   a thread's best, of the outputs that it sums
//   out  best [block][ROWS][2] tagged pairs: value, token
DEVICE void publish_best(const Step& s, u32 tag, Best mine, Pair* best) {
  int of_task = waves_of_task(s) * WIDTH, row = thread_id() / 8;
  bool first = thread_id() % 8 == 0 && row < (int)s.rows;
  mine = best_of(mine, first, most_tiles(s.rows) * 8, [&](int i) { return i / 8 * of_task + row * 8 + i % 8; });
  if (!first) return;
  Pair* to = best + ((u64)block_id() * ROWS + row) * 2;
  put(to, mine.value, tag);
  store_pair(to + 1, {mine.token, tag});
}

constexpr u32 LAST = MANY_TOKENS ? 1u << 31 : 0;  // beside a chosen token, which is below 2^21: the launch ends with it

// The best of all ranks, whose tokens begin at rank * VOCAB_OF_RANK; by the one thread of a row that has this rank's. last: LAST
// if this rank's host wants no more; after that, if any rank's does. So all ranks end with the same token.
template <int VOCAB_OF_RANK>
DEVICE bool best_of_ranks(Step& s, u32 tag, int row, Pair* const* candidates, Best& mine, u32& last) {
  auto place = [&](u32 rank) { return ((u64)rank * ROWS + row) * 2; };
  u32 token = mine.token + s.rank * VOCAB_OF_RANK;
  push(s.rank, candidates, place(s.rank), {bits<u32>(mine.value), token | last}, tag);
  const Pair* own = load_constant(candidates + s.rank);
  Pair got[RANKS * 2];
  if (!collect_ranks<2>(s, tag, [&](int rank) { return own + place(rank); }, got)) return false;
  mine = Best();
  UNROLL for (int rank = 0; rank < RANKS; ++rank) {
    u32 offered = got[2 * rank + 1].payload;
    mine.offer(value_of(got[2 * rank]), offered & ~LAST);
    last |= offered & LAST;
  }
  return true;
}

// Where a row's token goes: to the host, and to the next token of the launch.
struct TokensOut {
  u32* tokens;        // [rows], read after the launch
  Pair* next;         // [rows]
  Pair* ring;         // [rows] memory of the host, which reads it during the launch
  const u32* cancel;  // memory of the host: not 0 when it wants no more tokens

  // LAST if the host wants no more. Blocks that asked for themselves would hear different answers, and some would wait for
  // those that have left. So who chooses the token asks, a read across the bus for each, and the answer goes with the token.
  DEVICE u32 last() const { return MANY_TOKENS && load_system(cancel, ANY_EPOCH) ? LAST : 0; }
  DEVICE void put(int row, u32 token, u32 last, u32 tag) const {
    store_plain(tokens + row, token, tag);
#if MANY_TOKENS
    store_pair_system(ring + row, {token, tag});
    store_pair(next + row, {token | last, tag});
#endif
  }
};

// One task.  in  best [blocks][ROWS][2];  out  tokens [row], read by the host after the launch
template <int VOCAB_OF_RANK> DEVICE bool choose_token(Step& s, u32 stage, u32 tag, const Pair* best,
                                                      Pair* const* candidates, const TokensOut& tokens) {
  if (s.first_task() == 0) {
    s.begin(stage, 0, tag);
    int row = thread_id() / 16;
    bool first_of_row = thread_id() % 16 == 0 && row < (int)s.rows;
    u32 last = first_of_row ? tokens.last() : 0;  // first: the answer comes while other blocks are waited for
    Best mine;
    bool ok = true;
    for (int block = thread_id() % 16; block < (int)n_blocks() && row < (int)s.rows; block += 16) {
      const Pair* from = best + ((u64)block * ROWS + row) * 2;
      Pair got[2];
      ok = ok && s.collect(tag, [&](int i) { return from + i; }, got);
      mine.offer(value_of(got[0]), got[1].payload);
    }
    if (!s.all_ok(ok)) return false;
    mine = best_of(mine, first_of_row, 16, [&](int i) { return row * 16 + i; });
    if constexpr (RANKS > 1) {
      if (first_of_row) ok = best_of_ranks<VOCAB_OF_RANK>(s, tag, row, candidates, mine, last);
      if (!s.all_ok(ok)) return false;
    }
    if (first_of_row) tokens.put(row, mine.token, last, tag);
  }
  s.finish(1);
  return true;
}
