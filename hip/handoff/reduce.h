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

// How shares travel. Push is what the figures of docs/cluster.md are for and what every kernel is built with unless it is compiled
// with -DEXCHANGE=...; the others have the same buffers and the same proof, and are here to be measured against it.
//   PUSH     tagged pairs into every rank's buffer: one trip over a link, 8 bytes a value and rank.
//   PULL     tagged pairs into the own buffer, which all others poll over the link: one store instead of RANKS, but a poll that
//            comes too early is a trip over the link for nothing, and the value needs another one after it is there.
//   FLAGGED  tagged pairs into the own buffer; whoever sums a piece of it first sends the piece to all others, without tags, and
//            after that one flag to each: 4 bytes a value and rank, for one hand-off more.
enum class Exchange { PUSH, PULL, FLAGGED };
#ifndef EXCHANGE
#define EXCHANGE PUSH
#endif

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

// This rank's share of N values of x(version), from the flat place `at` of [rows][WIDTH] on.
template <int WIDTH_X, int N, Exchange HOW = Exchange::EXCHANGE>
DEVICE void give_share(u32 rank, Pair* const* parts, u32 version, u32 at, const u32 (&payload)[N], u32 tag) {
  u64 place = parts_of(version, rank, WIDTH_X) + at;
  if constexpr (HOW == Exchange::PUSH) return push(rank, parts, place, payload, tag);
  Pair* own = load_constant(parts + rank) + place;
  UNROLL for (int j = 0; j < N; ++j) store_pair_system(own + j, {payload[j], tag});
}

// The shares of all ranks, of two values for each thread: i and i + 1 of x(version). A block that wants some first exchanges all
// of a task's, and then its threads take theirs; false if the block has to leave.
template <int WIDTH_X, Exchange HOW> struct Shares {
  Pair* const* parts;
  u32 rank, version, tag;

  DEVICE Pair* place(u32 whose, u32 of) const { return load_constant(parts + whose) + parts_of(version, of, WIDTH_X); }
  DEVICE bool exchange(Step&, int, int, bool) { return true; }
  DEVICE bool take(Step& s, int i, Pair (&got)[RANKS * 2]) const {
    if constexpr (HOW == Exchange::PULL)
      return collect_ranks<2>(s, tag, [&](int of) { return (const Pair*)place(of, of) + i; }, got);
    const Pair* own = load_constant(parts + rank);  // nvcc would load it for each rank
    return collect_ranks<2>(s, tag, [&](int of) { return own + parts_of(version, of, WIDTH_X) + i; }, got);
  }
};

// FLAGGED: two values a word at the place of the sender, and behind all of them a flag for each task.
template <int WIDTH_X> struct Shares<WIDTH_X, Exchange::FLAGGED> {
  static constexpr int FLAGS = ROWS * WIDTH_X / 2;  // pairs that the words take; as many are left
  Pair* const* parts;
  u32 rank, version, tag;
  u64 mine = 0;  // both values

  DEVICE Pair* place(u32 whose, u32 of) const { return load_constant(parts + whose) + parts_of(version, of, WIDTH_X); }
  DEVICE bool exchange(Step& s, int task, int i, bool there) {
    bool ok = !there || collect_mine(s, i);
    if (there && ok) ROLLED for (u32 other = 1; other < RANKS; ++other) {
        store_system((u64*)place((rank + other) % RANKS, rank) + i / 2, mine, tag);
      }
    drain();
    if (!s.all_ok(ok)) return false;
    u32 other = thread_id();
    if (other < RANKS && other != rank) publish_system(place(other, rank) + FLAGS + task, {0, tag});
    return wait(s, task);
  }
  DEVICE bool take(Step&, int i, Pair (&got)[RANKS * 2]) const {
    UNROLL for (u32 of = 0; of < RANKS; ++of) {
      u64 both = of == rank ? mine : load_system((const u64*)place(rank, of) + i / 2, tag);
      got[2 * of] = {(u32)both, tag}, got[2 * of + 1] = {(u32)(both >> 32), tag};
    }
    return true;
  }

 private:
  DEVICE bool collect_mine(Step& s, int i) {
    const Pair* from = place(rank, rank) + i;
    for (u32 polls = 0;;) {
      Pair got[2] = {load_pair_system(from, tag), load_pair_system(from + 1, tag)};
      mine = (u64)got[1].payload << 32 | got[0].payload;
      u32 seen = got[0].tag == tag ? got[1].tag : got[0].tag;
      if (seen == tag) return true;
      if (!s.go_on(polls, tag, seen)) return false;
    }
  }
  DEVICE bool wait(Step& s, int task) const {
    u32 other = thread_id();
    bool ok = true;
    if (other < RANKS && other != rank)
      for (u32 polls = 0; ok;) {
        Pair got = load_pair_system(place(rank, other) + FLAGS + task, tag);
        if (got.tag == tag) break;
        ok = s.go_on(polls, tag, got.tag, other);
      }
    if (!s.all_ok(ok)) return false;
    acquire_system();
    return true;
  }
};

// x(version) = x(version - 1) + the shares of all ranks. A task is 2 * THREADS values of the flat [rows][WIDTH].
//   in   parts: of all ranks; before: x(version - 1), [rows][WIDTH], or null: the sum alone
//   out  sink(row, channel, v, there, kept): v of `channel` and the next; eight threads in a row have 16 channels, and all
//        threads are there. kept: what ahead(row, channel, there) made before the shares were waited for
template <int WIDTH_X, Exchange HOW = Exchange::EXCHANGE, class Ahead, class Sink>
DEVICE bool reduce_ranks(Step& s, u32 stage, u32 tag, u32 version, Pair* const* parts, const Pair* before, Ahead ahead,
                         Sink sink) {
  int values = (int)s.rows * WIDTH_X, tasks = (values + 2 * THREADS - 1) / (2 * THREADS);
  Shares<WIDTH_X, HOW> of_ranks{parts, s.rank, version, tag};
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int i = 2 * (task * THREADS + thread_id());
    bool there = i < values, ok = true;
    int row = there ? i / WIDTH_X : 0, channel = there ? i % WIDTH_X : 0;
    auto kept = ahead(row, channel, there);
    if (!of_ranks.exchange(s, task, i, there)) return false;
    f32 sum[2] = {};
    if (there) {
      Pair shares[RANKS * 2], old[2] = {};
      ok = of_ranks.take(s, i, shares);
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
    sink(row, channel, sum, there, kept);
    s.end();
  }
  s.finish(tasks);
  return true;
}
// The same, for a sink that needs nothing besides.
template <int WIDTH_X, Exchange HOW = Exchange::EXCHANGE, class Sink>
DEVICE bool reduce_ranks(Step& s, u32 stage, u32 tag, u32 version, Pair* const* parts, const Pair* before, Sink sink) {
  return reduce_ranks<WIDTH_X, HOW>(
      s, stage, tag, version, parts, before, [](int, int, bool) { return 0; },
      [&](int row, int channel, const f32(&v)[2], bool there, int) { sink(row, channel, v, there); });
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
