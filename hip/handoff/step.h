// What every stage of a mega-task needs: which tasks are this block's, and the ways of waiting and of publishing.
//
// A stage is a set of tasks 0 ... T-1 whose split does not depend on the number of blocks. Block b runs the tasks with
// (task + base) mod blocks = b; base grows by T with every stage, so that blocks left idle by one stage take the first
// tasks of the next and already stream its weights. Sums never cross tasks except in an order fixed by task numbers, so the
// block count cannot change a bit of the result.
//
// Three hand-offs, and no grid barrier:
//   tagged data    8-byte (payload, tag) pairs; the consumer polls the data itself. Tag compared with ==: one word holds one
//                  version at a time, and a later version would be wrong data.
//   written through, flagged   device-scope stores; every wave drains its own store counter; block barrier; one flag.
//   released, flagged          plain stores; every wave drains; block barrier; one wave writes its L2 back; one flag. The
//                  consumer acquires in every wave, after its barrier: an invalidation is in order with its own wave's
//                  loads only.
// A flag is compared with >=: a producer that is ahead may already have moved the one word on to a later epoch, and the data
// of ours are still whole (each region's header says why). Tags only grow, over steps too; nothing is ever cleared.
#pragma once
#include "handoff/timeline.h"
#include "platform/numeric.h"
#include "platform/platform.h"

enum class Stored { THROUGH, PLAIN };

constexpr int ERROR_WORDS = 8;  // of a block: claimed, rank, stage, task, its tag, wanted, seen, 1 + rank waited for
constexpr u32 NO_PEER = 0xffffffffu;

SHARED(u32, lost_in_turn, 2);  // a thread gave up a wait

#ifndef MOST_ROWS
#define MOST_ROWS 16  // or 1: a kernel for one row
#endif
// Rows of a step. A kernel for one row knows their number when it is compiled, and much of what deals with rows is not there
// then: GLM-5.2 on an H200 takes 75.5 us a layer instead of 85.5.
template <int MOST> struct RowCount {
  const u32 count;
  DEVICE RowCount(u32 count) : count(count) {}
  DEVICE operator u32() const { return count; }
};
template <> struct RowCount<1> {
  DEVICE RowCount(u32) {}
  DEVICE constexpr operator u32() const { return 1; }
};
using Rows = RowCount<MOST_ROWS>;

// The other ranks, for waits: a rank that gives up tells them, and one that is told gives up. Of one rank nothing is left.
template <int COUNT> struct Others {
  u32* const* alarms;  // [RANKS] a word of each rank: 1 + another one that gave up
  u32 lost = NO_PEER;  // the rank that a wait which was given up was for

  DEVICE void lose(u32 peer) { lost = peer; }
  DEVICE bool told(u32 rank) const { return load_system(load_constant(alarms + rank), ANY_EPOCH) != 0; }
  // Once, at the end of the kernel: in every wait the others' addresses would fill the scalar registers (GLM-5.2 on eight ranks,
  // gfx942: 805 spilled instead of 520).
  DEVICE void tell(u32 rank) const {
    for (u32 other = 0; other < COUNT; ++other)
      if (other != rank) store_system(load_constant(alarms + other), 1 + rank, 0u);
  }
};
template <> struct Others<1> {
  static constexpr u32 lost = NO_PEER;

  DEVICE explicit Others(u32* const*) {}
  DEVICE void lose(u32) {}
  DEVICE bool told(u32) const { return false; }
  DEVICE void tell(u32) const {}
};

struct Step {
  const Rows rows;
  const u32 rank, poll_limit;
  u32* const error;  // [1 + blocks][ERROR_WORDS]; the first word: somebody gave up
  u32 stage = 0, task = 0, tag = 0;
  u32 turn = 0;            // of lost_in_turn
  u32 squares_turn = 0;    // of squares, in stages/input.h
  int next;                // the block that gets the next task
  int idle;                // blocks, from that one on, that have had a task of the stage before less than the others
  const u32 inverse_rows;  // of 2^16, rounded up
  Timeline timeline;
  u32 lost_wanted = 0, lost_seen = 0;  // of the wait that this thread gave up; equal: none
  Others<RANKS> others;

  DEVICE Step(u32 rows, u32 rank, u32 poll_limit, u32* error, u32* const* alarms)
      : rows(rows),
        rank(rank),
        poll_limit(poll_limit),
        error(error),
        next(0),
        idle(n_blocks()),
        inverse_rows(65536u / rows + 1),
        others{alarms} {
    if (thread_id() < 2) lost_in_turn[thread_id()] = 0u;
    block_barrier();
  }

  DEVICE int first_task() const {  // this block's, of the stage
    int first = block_id() - next;
    return first < 0 ? first + n_blocks() : first;
  }
  DEVICE void finish(int tasks) {  // modulo by subtraction: a division is long
    if (tasks * 4 < idle) {
      idle -= tasks;  // a stage of a few tasks leaves the others as they are
    } else {
      idle = -tasks;
      while (idle < 0) idle += n_blocks();
    }
    next += tasks;
    while (next >= n_blocks()) next -= n_blocks();
  }
  // What goes from token to token is told to be the same in all lanes: the compiler cannot know, as a lane that gives up
  // leaves.
  DEVICE void tell_uniform() {
    next = uniform(next), idle = uniform(idle), turn = uniform(turn), squares_turn = uniform(squares_turn);
  }
  // i / rows, for i * rows below 2^16.
  DEVICE int of_rows(int i) const { return MOST_ROWS == 1 ? i : i * inverse_rows >> 16; }

  // Where this block is: for the error word, and for reports of the host target.
  DEVICE void begin(u32 at_stage, u32 at_task, u32 at_tag) {
    stage = at_stage, task = at_task, tag = at_tag;
    mark(stage, task, tag);
    timeline.stamp(stage, task, Moment::BEGIN, tag);
  }
  DEVICE void input_is_there() { timeline.stamp(stage, task, Moment::INPUT, tag); }
  DEVICE void end() { end(task); }
  DEVICE void end(u32 of_task) {
    timeline.stamp(stage, of_task, Moment::END, tag);
  }  // where the next has begun already

  // One more poll? False when this wait, or another one anywhere, was given up: then the block leaves the kernel (all_ok), and
  // so, 64 polls later, does everybody else.
  DEVICE bool go_on(u32& polls, u32 wanted, u32 seen, u32 peer = NO_PEER) {
    ++polls;
    if ((polls % 64 == 0 || polls >= poll_limit) && lost(polls, wanted, seen, peer)) return false;
    pause();
    return true;
  }
  COLD bool lost(u32 polls, u32 wanted, u32 seen, u32 peer) {
    bool expired = polls >= poll_limit;
    if (!expired && !load_device(error, ANY_EPOCH) && !others.told(rank)) return false;
    lost_wanted = wanted, lost_seen = seen;
    others.lose(peer);
    if (expired || RANKS > 1) claim(error);
    return true;
  }
  // At the end of the kernel, by every thread of a block that left it: one of those that were waiting says for what. The host
  // takes the block that is furthest behind, which is nearest to the cause.
  DEVICE void report() const {
    u32* mine = error + ERROR_WORDS * (1 + block_id());
    if (lost_wanted == lost_seen || !claim(mine)) return;
    const u32 what[] = {rank, stage, task, tag, lost_wanted, lost_seen};
    for (int i = 0; i < 6; ++i) store_device(mine + 1 + i, what[i], 0u);
    if constexpr (RANKS > 1) store_device(mine + 7, others.lost + 1, 0u);
    others.tell(rank);
  }

  // One thread waits for N words, at(0) ... at(N - 1). All are asked for before the first is looked at: one round trip.
  template <int N, class At> DEVICE bool collect(u32 wanted, At at, Pair (&got)[N]) {
    for (u32 polls = 0;;) {
      u32 seen = wanted;
      UNROLL for (int i = 0; i < N; ++i) got[i] = load_pair(at(i), wanted);
      UNROLL for (int i = 0; i < N; ++i) seen = got[i].tag == wanted ? seen : got[i].tag;
      if (seen == wanted) return true;
      if (!go_on(polls, wanted, seen)) return false;
    }
  }
  // The same for N times two neighbours, from at[i] on; null: none, which is zeros.
  template <int N> DEVICE bool collect_twos(u32 wanted, const Pair* const (&at)[N], Pair (&got)[N][2]) {
    for (u32 polls = 0;;) {
      u32 seen = wanted;
      UNROLL for (int i = 0; i < N; ++i) {
        got[i][0] = got[i][1] = {0, wanted};
        if (at[i]) load_pairs(at[i], wanted, got[i]);
      }
      UNROLL for (int i = 0; i < N; ++i) UNROLL for (int j = 0; j < 2; ++j) seen =
          got[i][j].tag == wanted ? seen : got[i][j].tag;
      if (seen == wanted) return true;
      if (!go_on(polls, wanted, seen)) return false;
    }
  }
  // One thread waits until a word carries the tag or a later one.
  DEVICE bool wait_flag(const Pair* flag, u32 wanted, Pair& got) {
    for (u32 polls = 0;;) {
      got = load_flag(flag, wanted);
      if ((i32)(got.tag - wanted) >= 0) return true;
      if (!go_on(polls, wanted, got.tag)) return false;
    }
  }
  DEVICE bool wait_flag(const Pair* flag, u32 wanted) {
    Pair got;
    return wait_flag(flag, wanted, got);
  }

  // True if it is for every thread. Also a block barrier. Two turns: whoever writes one again has passed the barrier of the
  // other, hence everybody has read.
  DEVICE bool all_ok(bool mine) {
    u32 at = turn++ & 1;
    if (!mine) lds_or(lost_in_turn, at, 1u);
    block_barrier();
    return !lost_in_turn[at];
  }

  // The block waits for `count` flags, flag(0) ... flag(count - 1). Also a block barrier.
  template <class Flag> DEVICE bool wait_flags(int count, u32 wanted, Flag flag) {
    bool ok = true;
    for (int i = thread_id(); i < count && ok; i += THREADS) ok = wait_flag(flag(i), wanted);
    return all_ok(ok);
  }

  // After the whole block has stored its bulk data: the announcement.
  DEVICE void announce(Pair* flag, u32 at_tag, Stored how) {
    drain();
    block_barrier();
    if (wave_id() != 0) return;
    if (how == Stored::PLAIN) release_device();
    if (lane_id() == 0) publish(flag, {0, at_tag});
    end();
  }
};

// A row of values as tagged pairs.
DEVICE void put(Pair* at, f32 value, u32 tag) { store_pair(at, {bits<u32>(value), tag}); }
DEVICE f32 value_of(Pair pair) { return bits<f32>(pair.payload); }
