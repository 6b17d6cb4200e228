// Whether the device does what the protocol asks of it, and how long that takes: hand-offs between blocks by the very code of
// a mega-task (handoff/step.h), every kind for itself, every word looked at.
constexpr int RANKS = 1;

#include "handoff/step.h"

constexpr int WORDS = 4 * THREADS;  // that a block hands over in a round
constexpr int FAULT_WORDS = 8;  // of a block: claimed, from whom, round, word, expected, seen, how many words are wrong
enum Stage : u32 { WRITE, READ, EXCHANGE };
enum Kind : u32 { TAGGED, THROUGH, RELEASED };

struct StressArgs {  // mirrored in rocmega/selftest/handoff.py
  u32 kind, rounds, first_tag, poll_limit;
  u32 chunks;          // of `stream` that a block reads in a round: hand-offs queue behind weights in a mega-task too
  Pair* tagged;        // [2][n_blocks][WORDS]
  u32* bulk;           // [2][n_blocks][WORDS]
  Pair *ready, *done;  // [n_blocks] flags: this block's words of the round are stored; are read
  const Vec4* stream;  // [n_blocks][chunks][THREADS]
  u32* sums;           // [n_blocks][THREADS]
  u32* xcds;           // [n_blocks]
  u32* faults;         // [n_blocks][FAULT_WORDS]
  u32* error;          // [1 + n_blocks][ERROR_WORDS]
};

SHARED(u32, wrong_words, 1);

// What block `from` hands over: another number for every word of every round.
DEVICE u32 word_of(u32 from, u32 tag, u32 word) { return (tag * 0x9e3779b9u) ^ ((from * WORDS + word) * 0x85ebca6bu); }

// Two slots: a block writes a slot again when every block has done with reading the round before the last, which was in it.
struct Stress {
  Const<StressArgs> a;
  Step& s;
  u32 tag, round;

  DEVICE u32 place(u32 block, u32 word) const { return ((round & 1) * n_blocks() + block) * WORDS + word; }

  DEVICE void write() const {
    u32 mine = block_id();
    for (u32 w = thread_id(); w < WORDS; w += THREADS) {
      u32 value = word_of(mine, tag, w), at = place(mine, w);
      if (a->kind == TAGGED) store_pair(a->tagged + at, {value, tag});
      if (a->kind == THROUGH) store_device(a->bulk + at, value, tag);
      if (a->kind == RELEASED) store_plain(a->bulk + at, value, tag);
    }
    if (a->kind != TAGGED) s.announce(a->ready + mine, tag, a->kind == THROUGH ? Stored::THROUGH : Stored::PLAIN);
  }

  DEVICE u32 stream() const {
    u32 sum = 0;
    for (u32 c = 0; c < a->chunks; ++c) {
      Vec4 v = load_weights(a->stream + (block_id() * a->chunks + c) * THREADS + thread_id());
      UNROLL for (int i = 0; i < 4; ++i) sum ^= v.w[i];
    }
    return sum;
  }

  DEVICE bool load(u32 from, u32 w, u32& seen) const {
    u32 at = place(from, w);
    if (a->kind == TAGGED) {
      Pair got[1];
      bool there = s.collect<1>(tag, [&](int) { return a->tagged + at; }, got);
      return seen = got[0].payload, there;
    }
    seen = a->kind == THROUGH ? load_device(a->bulk + at, tag) : load_plain(a->bulk + at, tag);
    return true;
  }

  DEVICE void note(u32 from, u32 w, u32 seen) const {
    lds_add(wrong_words, 0, 1);
    u32* mine = a->faults + FAULT_WORDS * block_id();
    if (!claim(mine)) return;
    const u32 what[] = {from, round, w, word_of(from, tag, w), seen};
    for (int i = 0; i < 5; ++i) store_device(mine + 1 + i, what[i], 0u);
  }

  DEVICE bool read(u32 from) const {
    if (a->kind != TAGGED && !s.wait_flags(1, tag, [&](int) { return a->ready + from; })) return false;
    if (a->kind == RELEASED) acquire_device();
    bool ok = true;
    for (u32 w = thread_id(); w < WORDS && ok; w += THREADS) {
      u32 seen = 0;
      ok = load(from, w, seen);
      if (ok && seen != word_of(from, tag, w)) note(from, w, seen);
    }
    return s.all_ok(ok);
  }

  DEVICE bool run(u32& sum) const {
    u32 n = n_blocks(), mine = block_id(), from = n == 1 ? 0 : (mine + 1 + round % (n - 1)) % n;
    s.begin(WRITE, mine, tag);
    if (round >= 2 && !s.wait_flags((int)n, tag - 2, [&](int i) { return a->done + i; })) return false;
    write();
    sum ^= stream();
    s.begin(READ, from, tag);
    if (!read(from)) return false;
    if (thread_id() == 0) publish(a->done + mine, {0, tag});
    return true;
  }
};

KERNEL void stress(const StressArgs* args) {
  Const<StressArgs> a = as_const(args);
  if (thread_id() == 0) wrong_words[0] = 0, store_plain(a->xcds + block_id(), (u32)xcc_id(), 0u);
  Step s(1, 0, a->poll_limit, a->error, nullptr);
  block_barrier();
  u32 sum = 0;
  bool ok = true;
  for (u32 round = 0; round < a->rounds && ok; ++round) ok = Stress{a, s, a->first_tag + round, round}.run(sum);
  if (!ok) s.report();
  block_barrier();
  if (thread_id() == 0) store_plain(a->faults + FAULT_WORDS * block_id() + 6, (u32)wrong_words[0], 0u);
  store_plain(a->sums + block_id() * THREADS + thread_id(), sum, 0u);
}

struct ExchangeArgs {  // mirrored there, too
  u32 values, rounds, first_tag, poll_limit;
  Pair* words;  // [2][values]
  u32* error;   // [1 + n_blocks][ERROR_WORDS]
};

// Every block waits for all values of a round, of which each block makes its part: as many values as blocks are a barrier of
// the grid. Two slots are enough: who writes a round has read all of the last one, whose writers had read the one before.
KERNEL void exchange(const ExchangeArgs* args) {
  Const<ExchangeArgs> a = as_const(args);
  constexpr int AT_ONCE = 8;
  Step s(1, 0, a->poll_limit, a->error, nullptr);
  u32 values = a->values, n = n_blocks(), t = thread_id();
  for (u32 round = 0; round < a->rounds; ++round) {
    u32 tag = a->first_tag + round;
    Pair* words = a->words + (round & 1) * values;
    s.begin(EXCHANGE, block_id(), tag);
    for (u32 i = block_id() + n * t; i < values; i += n * THREADS) store_pair(words + i, {i, tag});
    bool ok = true;
    for (u32 first = t; first < values && ok; first += AT_ONCE * THREADS) {
      Pair got[AT_ONCE];
      auto at = [&](int i) { return words + (first + i * THREADS < values ? first + i * THREADS : first); };
      ok = s.collect<AT_ONCE>(tag, at, got);
    }
    if (!s.all_ok(ok)) return s.report();
  }
}
