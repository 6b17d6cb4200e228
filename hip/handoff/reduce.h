// Sums over the ranks of a tensor-parallel model, inside the mega-task: no rank leaves its kernel for them.
//
// Every rank has a buffer parts [2][RANKS][ROWS][width] of tagged pairs that all ranks write. A rank that has computed its share
// of a value pushes it into the buffer of every rank, its own included (one shot: no rank asks, none relays). Whoever needs the
// value polls its own buffer until the shares of all ranks are there and adds them up in the order of the ranks, in f32: so all
// ranks have the same bits, whoever was first. Value and tag are one 8-byte store at system scope, past all caches on both
// sides; there is no flag to overtake the data, and no fence.
//
// Only one block reads a value's shares: it adds them to the residual and publishes the sum to its own rank's blocks, who poll
// that at device scope. Had every block summed for itself, each would have read RANKS times as much of uncached memory: 100 MB
// for 256 blocks, 8 ranks and one row of 6,144, some twenty times what the additional hand-off costs.
//
// Why two slots are enough. Shares of x(v) have slot v mod 2. Who pushes a share of x(v + 2), on whatever rank r, has all of
// x(v + 1) there (each projection reads the whole row). Each of its values is a sum that waited for a share of every rank q; so all
// shares of x(v + 1) of q have been pushed, each by a task that derives from all of x(v) on q. Hence every sum of x(v) on q has
// been published, and nobody there reads the slot that the push overwrites.
// Over the border of two launches: when r has its last sum, of x(n), all shares of x(n) have been pushed, so q has all sums of
// x(n - 1); but q may still be at x(n). So the next launch has to begin with the other slot: a step has an even number of
// versions. (With an odd one, processes that run at different speeds lost a share within some 30 steps.)
// What one rank offers another once a step (the best token) has one slot: the next offer follows a whole step of the others.
#pragma once
#include "handoff/step.h"

// The first of this rank's places in slot v mod 2 of a buffer.
DEVICE u64 parts_of(u32 version, u32 rank, int width) {
  return ((u64)(version & 1) * RANKS + rank) * ROWS * (u32)width;
}

// N pairs to the same place of every rank's buffer. Each rank begins with its neighbour, so that all links are in use, and
// serves itself last.
template <int N> DEVICE void push(u32 rank, Pair* const* buffers, u64 at, const u32 (&payload)[N], u32 tag) {
  ROLLED for (u32 i = 1; i <= RANKS; ++i) {
    Pair* there = load_constant(buffers + (rank + i) % RANKS) + at;
    UNROLL for (int j = 0; j < N; ++j) store_pair_system(there + j, {payload[j], tag});
  }
}

// One thread waits for N words of every rank, in its own rank's buffer: got[rank * N + i] is at(rank)[i].
template <int N, class At> DEVICE bool collect_ranks(Step& s, u32 tag, At at, Pair (&got)[RANKS * N]) {
  for (u32 polls = 0;;) {
    u32 missing = RANKS, seen = tag;
    UNROLL for (int i = 0; i < RANKS * N; ++i) got[i] = load_pair_system(at(i / N) + i % N, tag);
    UNROLL for (int i = RANKS * N - 1; i >= 0; --i) if (got[i].tag != tag) missing = i / N, seen = got[i].tag;
    if (missing == RANKS) return true;
    if (!s.go_on(polls, tag, seen, missing)) return false;
  }
}

// x(version) = x(version - 1) + the shares of all ranks. A task is 2 * THREADS values of the flat [rows][WIDTH].
//   in   parts: this rank's buffer; before: x(version - 1), [rows][WIDTH], or null: the sum alone
//   out  sink(row, channel, v, there): v of `channel` and the next; eight threads in a row have 16 channels, and all threads are
//        there
template <int WIDTH_X, class Sink>
DEVICE bool reduce_ranks(Step& s, u32 stage, u32 tag, u32 version, const Pair* parts, const Pair* before, Sink sink) {
  int values = (int)s.rows * WIDTH_X, tasks = (values + 2 * THREADS - 1) / (2 * THREADS);
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int i = 2 * (task * THREADS + thread_id());
    bool there = i < values, ok = true;
    f32 sum[2] = {};
    if (there) {
      Pair shares[RANKS * 2], old[2] = {};
      ok = collect_ranks<2>(s, tag, [&](int rank) { return parts + parts_of(version, rank, WIDTH_X) + i; }, shares);
      if (before)  // there: the shares derive from it
        ok = ok && s.collect(tag - 1, [&](int j) { return before + i + j; }, old);
      UNROLL for (int j = 0; j < 2; ++j) {
        sum[j] = value_of(shares[j]);
        UNROLL for (int rank = 1; rank < RANKS; ++rank) sum[j] += value_of(shares[2 * rank + j]);
        sum[j] = value_of(old[j]) + sum[j];
      }
    }
    if (!s.all_ok(ok)) return false;
    s.input_is_there();
    sink(there ? i / WIDTH_X : 0, there ? i % WIDTH_X : 0, sum, there);
    s.end();
  }
  s.finish(tasks);
  return true;
}

// Values of which every rank has pushed some to all, handed on to this rank's blocks. A task is 2 * THREADS of them.
//   in   from: this rank's buffer; peer(i): who pushes value i and the next;  out  to
template <class Peer>
DEVICE bool hand_on(Step& s, u32 stage, u32 tag, const Pair* from, Pair* to, int values, Peer peer) {
  int tasks = (values + 2 * THREADS - 1) / (2 * THREADS);
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int i = 2 * (task * THREADS + thread_id());
    bool ok = true;
    for (u32 polls = 0; i < values && ok;) {
      Pair got[2] = {load_pair_system(from + i, tag), load_pair_system(from + i + 1, tag)};
      u32 seen = got[0].tag == tag ? got[1].tag : got[0].tag;
      if (seen == tag) {
        UNROLL for (int j = 0; j < 2; ++j) store_pair(to + i + j, got[j]);
        break;
      }
      ok = s.go_on(polls, tag, seen, peer(i));
    }
    if (!s.all_ok(ok)) return false;
    s.end();
  }
  s.finish(tasks);
  return true;
}
