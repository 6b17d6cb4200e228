// Small kernels that keep the protocol, each in its own way, and for each the ways of breaking it that others have shipped.
// `mutant` 0 is correct. The structs begin as rocmega.check.Kernel says.
#include "platform/numeric.h"
#include "platform/platform.h"

enum Stage : u32 { WRITE, READ, ANSWER };
constexpr int ROUNDS = 4;

DEVICE u32 me() { return (u32)thread_id(); }
DEVICE u32 block() { return (u32)block_id(); }
DEVICE u32 blocks() { return (u32)n_blocks(); }

// Thread `i` of those below `count` waits for one flag or pair each; then the whole block goes on.
template <class At> DEVICE void wait_flags(u32 count, u32 tag, At at) {
  for (u32 i = me(); i < count; i += THREADS)
    while ((i32)(load_flag(at(i), tag).tag - tag) < 0) pause();
  block_barrier();
}
DEVICE u32 take(const Pair* p, u32 tag) {
  for (;;) {
    Pair got = load_pair(p, tag);
    if (got.tag == tag) return got.payload;
    pause();
  }
}
DEVICE void announce(Pair* flag, u32 tag) {
  drain();
  block_barrier();
  if (me() == 0) publish(flag, {0, tag});
}

// Each round every block writes a slice and reads all. Two slots: who writes round r + 2 has seen all flags of r + 1, each set
// by a block that had read round r.
struct Slices {
  u32 epoch, rows;
  const u32* mutant;
  u32* data;    // [2][blocks][THREADS]
  Pair* flags;  // [blocks]
  u32* out;     // [THREADS]
};
KERNEL void double_buffer(const Slices* args) {
  Slices p = *args;
  u32 mutant = load_constant(p.mutant), sum = 0;
  for (u32 round = 0; round < ROUNDS; ++round) {
    u32 tag = p.epoch + round, slot = mutant == 1 ? 0 : round & 1;
    u32 *to = p.data + (slot * 16 + block()) * THREADS, *from = p.data + slot * 16 * THREADS;
    mark(WRITE, block(), tag);
    if (mutant == 2 && me() == 0) publish(&p.flags[block()], {0, tag});
    store_device(to + me(), block() + round + sum % 7, tag);
    if (mutant != 3 && (mutant != 4 || wave_id() == 0)) drain();
    if (mutant != 5) block_barrier();
    if (me() == 0 && mutant != 2) publish(&p.flags[block()], {0, tag});
    mark(READ, block(), tag);
    if (mutant != 6)
      wait_flags(blocks(), tag, [&](u32 i) { return &p.flags[i]; });
    else if (me() < blocks())
      while ((i32)(load_flag(&p.flags[me()], tag).tag - tag) < 0) pause();
    for (u32 b = 0; b < blocks(); ++b) sum += load_device(from + b * THREADS + (me() * 7) % THREADS, tag);
  }
  if (block() == 0) store_plain(p.out + me(), sum - sum, p.epoch);
}

// The same through L2: plain stores, written back by one wave; every wave forgets what it has.
KERNEL void released(const Slices* args) {
  Slices p = *args;
  u32 mutant = load_constant(p.mutant);
  for (u32 round = 0; round < ROUNDS; ++round) {
    u32 tag = p.epoch + round, *slot = p.data + (round & 1) * 16 * THREADS;
    mark(WRITE, block(), tag);
    store_plain(slot + block() * THREADS + me(), block() * 3 + round, tag);
    if (mutant == 1 && wave_id() == 0) release_device();
    drain();
    block_barrier();
    if (wave_id() == 0 && mutant != 1 && mutant != 2) release_device();
    if (me() == 0) publish(&p.flags[block()], {0, tag});
    mark(READ, block(), tag);
    if (mutant == 3) acquire_device();
    wait_flags(blocks(), tag, [&](u32 i) { return &p.flags[i]; });
    if (mutant != 3 && mutant != 4 && (mutant != 5 || wave_id() == 0)) acquire_device();
    u32 sum = 0;
    for (u32 b = 0; b < blocks(); ++b) sum |= load_plain(slot + b * THREADS + THREADS - 1 - me(), tag) == b * 3 + round;
    if (block() == 0) store_plain(p.out + me(), sum, tag);
    block_barrier();
  }
}

// Words that carry their own tags, all to all.
struct Lines {
  u32 epoch, rows;
  const u32* mutant;
  Pair* lines;  // [2][16 blocks][THREADS]
  u32* other;   // [THREADS]: a region of other stages
  u32* out;     // [THREADS]
};
KERNEL void ll_lines(const Lines* args) {
  Lines p = *args;
  u32 mutant = load_constant(p.mutant), value = me();
  for (u32 round = 0; round < ROUNDS; ++round) {
    u32 tag = p.epoch + (mutant == 1 ? round % 2 : round), slot = mutant == 2 ? 0 : round & 1;
    Pair* here = p.lines + slot * 16 * THREADS;
    mark(WRITE, block(), tag);
    for (u32 i = block() * THREADS / blocks() + me(); i < (block() + 1) * THREADS / blocks(); i += THREADS) {
      Pair line{i * 3 + round, tag};
      if (mutant == 3)
        store_plain((u64*)(here + i), (u64)line.tag << 32 | line.payload, tag);
      else if (mutant == 4)
        store_device(&here[i].payload, line.payload, tag), store_pair(here + i + 8 * THREADS, line);
      else if (mutant == 5 && i == 77 && round == 2)
        continue;
      else
        store_pair(here + i, line);
      if (mutant == 6 && i == 0) store_device(p.other, 1u, tag);
    }
    mark(READ, block(), tag);
    value += take(here + (me() * 31 + round) % THREADS, tag) % 16;
    if (mutant == 7) continue;
    if (mutant != 2) block_barrier();
    mark(ANSWER, block(), tag);  // nobody may go on before all have read: each tells everybody that it has
    if (me() == 0) store_pair(here + 9 * THREADS + block(), {0, tag});
    if (me() < blocks()) take(here + 9 * THREADS + me(), tag);
    block_barrier();
  }
  if (block() == 0) store_plain(p.out + me(), value, p.epoch);
}

// Whoever comes takes the next piece of work; its result goes to a place that depends on the piece alone.
struct Tickets {
  u32 epoch, rows;
  const u32* mutant;
  u32* tickets;  // [64], of the launch
  u32* results;  // [64][THREADS]
  Pair* flags;   // [64]
  u32* out;      // [THREADS]
};
SHARED(u32, my_ticket, 1);
KERNEL void tickets(const Tickets* args) {
  Tickets p = *args;
  u32 mutant = load_constant(p.mutant), tag = p.epoch;
  constexpr u32 WORK = 12;
  u32* mine = p.tickets + p.epoch * WORK;
  for (u32 task = 0; task < WORK; ++task) {
    mark(WRITE, task, tag);
    if (me() == 0) my_ticket[0] = mutant == 1 ? !load_device(mine + task, ANY_EPOCH) : claim(mine + task);
    if (mutant == 1 && me() == 0) store_device(mine + task, 1u, ANY_EPOCH);
    block_barrier();
    bool is_mine = my_ticket[0];
    if (mutant != 2) block_barrier();
    if (!is_mine) continue;
    store_device(p.results + task * THREADS + me(), task * me(), tag);
    announce(p.flags + task, tag);
  }
  if (block() != 0) return;
  mark(READ, 0, tag);
  u32 sum = 0;
  wait_flags(mutant == 3 ? WORK - 1 : WORK, tag, [&](u32 i) { return &p.flags[i]; });
  for (u32 task = 0; task < WORK; ++task) sum += load_device(p.results + task * THREADS + me(), tag);
  store_plain(p.out + me(), sum, tag);
}

// Blocks arrive at the leader of their XCD, leaders at block 0, which lets everybody go. Orders all that was stored before.
struct Arrivals {
  u32 epoch, rows;
  const u32* mutant;
  u32* data;      // [2][16 blocks]
  Pair* arrived;  // [16 blocks]
  Pair* xcds;     // [8], one word each
  Pair* go;       // [1]
  u32* out;       // [THREADS]
};
DEVICE u32 leader_of(u32 b) { return b % 8; }  // blocks go round the XCDs; the first of each leads
KERNEL void two_level(const Arrivals* args) {
  Arrivals p = *args;
  u32 mutant = load_constant(p.mutant), leaders = blocks() < 8 ? blocks() : 8, ok = 1;
  for (u32 round = 0; round < ROUNDS; ++round) {
    u32 tag = p.epoch + round, *data = p.data + (round & 1) * 16;
    mark(WRITE, block(), tag);
    if (me() == 0) store_device(data + block(), block() + round, tag);
    announce(p.arrived + block(), tag);
    if (leader_of(block()) == block()) {
      mark(READ, block(), tag);
      u32 members = mutant == 1 ? 1 : (blocks() - block() + 7) / 8;
      wait_flags(members, tag, [&](u32 i) { return &p.arrived[block() + 8 * i]; });
      if (me() == 0) publish(p.xcds + block(), {0, tag});
    }
    if (block() == 0) {
      wait_flags(mutant == 2 ? 1 : leaders, tag, [&](u32 i) { return &p.xcds[i]; });
      if (me() == 0) publish(p.go, {0, tag});
    }
    mark(ANSWER, block(), tag);
    if (mutant != 3 || block() == 0) wait_flags(1, tag, [&](u32) { return p.go; });
    if (me() < blocks()) ok &= load_device(data + me(), tag) == me() + round;
    block_barrier();
  }
  if (block() == 0) store_plain(p.out + me(), ok, p.epoch);
}

// A pipeline of blocks with one slot between neighbours: the reader says when the slot is free again.
struct Pipe {
  u32 epoch, rows;
  const u32* mutant;
  Vec4* slots;  // [16 blocks][THREADS]
  Pair* full;   // [16 blocks]
  Pair* empty;  // [16 blocks]
  u32* out;     // [THREADS]
};
KERNEL void pipeline(const Pipe* args) {
  Pipe p = *args;
  u32 mutant = load_constant(p.mutant), last = blocks() - 1;
  for (u32 round = 0; round < ROUNDS; ++round) {
    u32 tag = p.epoch + round;
    Vec4 v{{me(), round, block(), 0}};
    if (block() > 0) {
      mark(READ, block(), tag);
      wait_flags(1, tag, [&](u32) { return p.full + block() - 1; });
      v = load_device(p.slots + (block() - 1) * THREADS + me(), tag);
      block_barrier();
      if (mutant != 1 && me() == 0) publish(p.empty + block() - 1, {0, tag});
    }
    v.w[3] += block() + 1;
    if (block() == last) {
      if (round + 1 == ROUNDS) store_plain(p.out + me(), v.w[0] + v.w[1], tag);
      continue;
    }
    mark(WRITE, block(), tag);
    if (round && mutant != 2 && mutant != 1)
      wait_flags(1, mutant == 3 ? tag - 2 : tag - 1, [&](u32) { return p.empty + block(); });
    store_device(p.slots + block() * THREADS + me(), v, tag);
    announce(p.full + block(), tag);
  }
}

// Two blocks and one word each, back and forth; others look on and do nothing.
struct Mail {
  u32 epoch, rows;
  const u32* mutant;
  Pair* boxes;  // [2]
  u32* out;     // [THREADS]
};
KERNEL void ping_pong(const Mail* args) {
  Mail p = *args;
  u32 mutant = load_constant(p.mutant), last = 0;
  if (blocks() > 1 && block() < 2 && me() == 0) {
    for (u32 round = 0; round < 8; ++round) {
      u32 tag = p.epoch + round;
      mark(block() ? ANSWER : WRITE, round, tag);
      if (block() == 1) last = take(p.boxes, mutant == 1 ? tag + 1 : tag);
      store_pair(p.boxes + block(), {last + 1, tag});
      if (block() == 0 && mutant != 2) last = take(p.boxes + 1, tag);
      if (mutant == 3 && block() == 1 && round == 3) return;
    }
  }
  if (block() == 0) store_plain(p.out + me(), 1u, p.epoch);
}

// Every wave announces its own part: no block barrier is needed for that.
struct Waves {
  u32 epoch, rows;
  const u32* mutant;
  u32* data;    // [16 blocks][THREADS]
  Pair* flags;  // [16 blocks][WAVES]
  u32* out;     // [THREADS]
};
KERNEL void wave_flags(const Waves* args) {
  Waves p = *args;
  u32 mutant = load_constant(p.mutant), tag = p.epoch;
  mark(WRITE, block(), tag);
  store_device(p.data + block() * THREADS + me(), me(), tag);
  drain();
  if (lane_id() == 0) publish(p.flags + block() * WAVES + wave_id(), {0, tag});
  mark(READ, block(), tag);
  u32 from = (block() + 1) % blocks(), wave = (u32)(wave_id() + 1) % WAVES;
  take(p.flags + from * WAVES + (mutant == 1 ? wave_id() : wave), tag);
  u32 got = load_device(p.data + from * THREADS + wave * WIDTH + lane_id(), tag);
  if (block() == 0) store_plain(p.out + me(), got, tag);
}

// LDS: a histogram and its prefix sums, again and again.
struct Counts {
  u32 epoch, rows;
  const u32* mutant;
  u32* out;  // [THREADS]
};
SHARED(u32, bins, 64);
SHARED(u32, totals, WAVES);
KERNEL void histogram(const Counts* args) {
  Counts p = *args;
  u32 mutant = load_constant(p.mutant), sum = 0;
  for (u32 round = 0; round < ROUNDS; ++round) {
    mark(WRITE, round, p.epoch);
    if (mutant != 1 && me() < 64) bins[me()] = 0u;
    if (mutant != 2) block_barrier();
    lds_add(bins, me() * 7 % 61, 1u);
    if (mutant != 3) block_barrier();
    mark(READ, round, p.epoch);
    u32 mine = bins[me() % 64];
    float of_wave = wave_sum((float)mine);
    if (lane_id() == 0) totals[wave_id()] = (u32)of_wave;
    if (mutant != 4 && (mutant != 5 || block() != 0 || me() != 9)) block_barrier();
    for (int w = 0; w < WAVES; ++w) sum += totals[w];
    sum += bins[(me() + round) % 64];
    if (mutant != 6) block_barrier();  // before bins and totals are written again
  }
  if (block() == 0) store_plain(p.out + me(), sum, p.epoch);
}

// A ring of asynchronous copies into LDS: two pieces in flight while one is read.
struct Ring {
  u32 epoch, rows;
  const u32 *mutant, *weights;  // [ROUNDS + 2][4 * THREADS]
  u32* out;                     // [THREADS]
};
SHARED(u32, ring, 3 * 4 * THREADS);
KERNEL void lds_ring(const Ring* args) {
  Ring p = *args;
  u32 mutant = load_constant(p.mutant), sum = 0;
  auto copy = [&](u32 piece) {
    ring.copy4(piece % 3 * 4 * THREADS + 4 * me(), p.weights + (piece * THREADS + me()) * 4);
  };
  mark(WRITE, 0, p.epoch);
  copy(0), copy(1);
  for (u32 round = 0; round < ROUNDS; ++round) {
    mark(READ, round, p.epoch);
    if (mutant == 2) block_barrier();
    if (mutant != 1) host::lds_wait(mutant == 3 ? 2 : 1);
    if (mutant != 2 && mutant != 4) block_barrier();
    if (mutant != 5) copy(round + 2);
    Vec4 v = lds_load4(ring, round % 3 * 4 * THREADS + 4 * ((me() + 70) % THREADS));
    sum += v.w[0] + v.w[3];
    if (mutant == 5) copy(round + 3);
  }
  host::lds_wait(0);
  if (block() == 0) store_plain(p.out + me(), sum, p.epoch);
}

// Partial sums by all blocks, added up by block 0 in their order.
struct Partials {
  u32 epoch, rows;
  const u32* mutant;
  f32* parts;   // [16 tasks][THREADS]
  Pair* flags;  // [16 tasks]
  u32* other;   // [THREADS]
  u32* out;     // [THREADS]
};
KERNEL void fixed_order(const Partials* args) {
  Partials p = *args;
  u32 mutant = load_constant(p.mutant), tag = p.epoch;
  constexpr u32 TASKS = 10;
  for (u32 task = block(); task < TASKS; task += blocks()) {
    mark(WRITE, task, tag);
    u32 place = mutant == 1 && task == 3 ? 4 : task;
    store_device(p.parts + place * THREADS + me(), 1.f / (1.f + (f32)(task * me())), tag);
    if (mutant == 2 && task == 5) store_device(p.other + me(), 1u, tag);
    announce(p.flags + task, mutant == 3 ? 5 : tag);
  }
  if (block() != 0) return;
  mark(READ, 0, tag);
  wait_flags(TASKS, mutant == 3 ? 5 : tag, [&](u32 i) { return &p.flags[i]; });
  f32 sum = 0;
  for (u32 task = 0; task < (mutant == 4 ? TASKS + 1 : TASKS); ++task)
    sum += load_device(p.parts + task * THREADS + me(), tag);
  if (mutant == 5)
    for (volatile u32 forever = 1; forever;) continue;
  store_plain(p.out + me(), bits<u32>(sum), tag);
}
