// All blocks resident, every thread a fiber, one OS thread, and an order that depends on the seed alone. A turn runs
// the ready lanes of one wave, each to its next wait; a spinning thread sleeps until what it polls has changed.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "fiber.h"
#include "order.h"

namespace host {

Fiber* self;
int n_blocks, launch_blocks, n_waves, n_fibers, n_xcds;
bool checking;
uint64_t turns, changes;
uint16_t watched[WATCH];
uint32_t watch_all, polls_in_turn;
Wave* waves;
Fiber* fibers;
Fiber launcher;
int alive;

namespace {

// Who comes next. A late block, wave or rank gets a turn when nobody else can go on, and now and then. PRIORITIES: always the
// first that can go on of an order, from which whoever has a turn is moved to the end now and then (probabilistic concurrency
// testing: bugs that need d preemptions are met with a probability that falls with the d-th power of the length only).
// CALM stays with a wave as long as it can go on, and wakes who waits only when nobody else can: the fewest switches.
// REPLAY is calm but for the switches that the launch asks for.
enum Policy { ROUND_ROBIN, RANDOM, ONE_BLOCK_LATE, ONE_WAVE_LATE, PRIORITIES, ONE_RANK_LATE, CALM, REPLAY };

// Waves by state, a bit each. A set bit of `runnable` may be out of date.
struct WaveSet {
  uint64_t* bits;
  void set(int w) { bits[w / 64] |= 1ull << w % 64; }
  void clear(int w) { bits[w / 64] &= ~(1ull << w % 64); }
  // The first member from `w` on, cyclically and `w` included; -1 if there is none.
  int next(int w) const {
    int words = (n_waves + 63) / 64, at = w / 64;
    uint64_t rest = bits[at] & ~0ull << w % 64;
    for (int i = 0; i <= words; ++i) {
      if (rest) return at * 64 + __builtin_ctzll(rest);
      at = at + 1 < words ? at + 1 : 0;
      rest = bits[at];
    }
    return -1;
  }
};
WaveSet runnable, spinners;

// Two streams: the order of waves, and everything else, which then does not depend on how the order was chosen.
uint64_t random_state, order_state, lanes_of_turn, last_chance;
int wave_of_turn, rotation, yield_chance, late, *priority, lowest_priority;
uint64_t next_choice;  // of the launch's, when replaying
double stuck_since;
Policy policy;
bool rotates;  // turns begin with any lane

uint64_t next_random(uint64_t& state, uint64_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (state >> 11) % below;
}
uint64_t order_random(uint64_t below) { return next_random(order_state, below); }

uint64_t bit() { return 1ull << self->lane; }

bool can_go(const Fiber& f) {
  if (!f.polled) return f.paused_at != changes;
  uint32_t now[2];
  peek(f, f.polled, now);
  return now[0] != f.seen[0] || now[1] != f.seen[1];
}

void wake(Wave& w, uint64_t lanes) {
  int index = &w - waves;
  for (uint64_t rest = lanes; rest; rest &= rest - 1) {
    Fiber& f = fibers[index * LANES + __builtin_ctzll(rest)];
    if (f.polled)
      --watch_of(f.polled), f.polled = nullptr;
    else
      --watch_all;
  }
  w.ready |= lanes, w.spinning &= ~lanes;
  runnable.set(index);
  if (!w.spinning) spinners.clear(index);
}

// Wakes the spinning threads that would see something new: those of one wave all or none if `whole`.
bool wake_spinners(bool whole) {
  bool any = false;
  for (int word = 0; word < (n_waves + 63) / 64; ++word)
    for (uint64_t rest = spinners.bits[word]; rest; rest &= rest - 1) {
      int index = word * 64 + __builtin_ctzll(rest);
      Wave& w = waves[index];
      if (w.looked_at == changes) continue;
      uint64_t lanes = 0;
      for (uint64_t spinning = w.spinning; spinning; spinning &= spinning - 1) {
        int lane = __builtin_ctzll(spinning);
        if (can_go(fibers[index * LANES + lane]))
          lanes |= 1ull << lane;
        else if (whole)
          break;
      }
      if (whole && lanes != w.spinning) continue;
      w.looked_at = changes;
      if (lanes) wake(w, lanes), any = true;
    }
  return any;
}

bool wake_all() {
  bool any = false;
  for (int i = 0; i < n_waves; ++i)
    if (waves[i].spinning) wake(waves[i], waves[i].spinning), any = true;
  return any;
}

Wave* first_ready(int from) {
  for (int start = from, w; (w = runnable.next(start)) >= 0;) {
    if (waves[w].ready) return &waves[w];
    runnable.clear(w);
  }
  return nullptr;
}

Wave* choose_calmly() {
  if (waves[wave_of_turn].ready) return &waves[wave_of_turn];
  Wave* w = first_ready(wave_of_turn);
  if (!w && (wake_spinners(true) || wake_spinners(false))) w = first_ready(wave_of_turn);
  return w;
}

bool is_late(const Wave& w) {
  switch (policy) {
    case ONE_BLOCK_LATE:
      return w.block->index == late;
    case ONE_WAVE_LATE:
      return &w - waves == late;
    case ONE_RANK_LATE:
      return w.block->rank == late;
    default:
      return false;
  }
}

Wave* choose_by_priority() {
  if (!order_random(512)) priority[wave_of_turn] = --lowest_priority;
  Wave* best = nullptr;
  for (int w = runnable.next(0), end = -1; w > end; end = w, w = runnable.next((w + 1) % n_waves))
    if (waves[w].ready && (!best || priority[w] > priority[best - waves])) best = &waves[w];
  return best;
}

// What the launch asks for in this turn, if that wave can go on; else stays where it is.
Wave* choose_again() {
  while (next_choice < launch.n_choices && launch.choices[next_choice] >> 16 < turns) ++next_choice;
  uint64_t asked = next_choice < launch.n_choices ? launch.choices[next_choice] : 0;
  if (asked >> 16 == turns && waves[asked & 0xffff].ready) return &waves[asked & 0xffff];
  return first_ready(wave_of_turn);
}

Wave* choose() {
  if (policy == CALM) return choose_calmly();
  wake_spinners(false);
  if (policy == REPLAY) return choose_again();
  if (policy == PRIORITIES) return choose_by_priority();
  int from = policy == ROUND_ROBIN ? wave_of_turn + 1 : order_random(n_waves);
  Wave* w = first_ready(from % n_waves);
  if (!w || !is_late(*w) || turns % 256 == 0) return w;
  for (int i = 1; i < n_waves; ++i) {  // somebody else, if there is anybody
    Wave& other = waves[(w - waves + i) % n_waves];
    if (other.ready && !is_late(other)) return &other;
  }
  return w;
}

// Every switch that staying with the wave would not have made: what REPLAY needs to do the same.
void record(const Wave& chosen) {
  if (!launch.record || &chosen == first_ready(wave_of_turn)) return;
  if (result.recorded < launch.record_room) launch.record[result.recorded] = turns << 16 | (&chosen - waves);
  ++result.recorded;
}

double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// A look at what other processes may have stored, and now and then a poll of everybody: kernels count polls, and every 64 look
// whether somebody gave up. False if nobody spins.
bool wait_for_peers() {
  constexpr double POLLS_PER_SECOND = 400;  // of a thread, at most; the driver counts on it
  for (double end = seconds_now() + 1 / POLLS_PER_SECOND; seconds_now() < end; usleep(100)) {
    ++changes;
    if (wake_spinners(false)) return true;
  }
  return wake_all();
}

// Nobody can go on by itself. Those who do not poll a pair get another look first; then, unless such waits are to be
// reported, all may poll until the kernel's own limit, for a while.
void nobody_can_go_on() {
  if (launch.flags & PEERS && wait_for_peers()) return;
  if (last_chance != changes) {
    last_chance = changes, stuck_since = 0;
    if (watch_all && wake_all()) return;
  }
  if (!(launch.flags & WATCH_WAITS)) {
    double now = seconds_now();
    if (!stuck_since) stuck_since = now;
    if (now - stuck_since < launch.patience && wake_all()) return;
  }
  describe_stuck();
  give_up();
}

// The next lane of this turn. While it runs, the stack of the one that is probably next comes into the cache.
Fiber* next_lane() {
  uint64_t turned = lanes_of_turn >> rotation | lanes_of_turn << (LANES - rotation) % LANES;
  int lane = (__builtin_ctzll(turned) + rotation) % LANES;
  lanes_of_turn &= ~(1ull << lane);
  Fiber* of_wave = fibers + wave_of_turn * LANES;
  const char* sp = (const char*)of_wave[(lane + 1) % LANES].sp;
  for (int i = 0; i < 6; ++i) __builtin_prefetch(sp + 64 * i);
  return of_wave + lane;
}

__attribute__((noinline)) Fiber* next_turn() {
  while (alive) {
    ++turns;
    if (checking) memory_tick();
    if (Wave* w = choose()) {
      record(*w);
      wave_of_turn = w - waves, lanes_of_turn = w->ready;
      rotation = rotates ? random(LANES) : 0;
      return next_lane();
    }
    if (!checking || !memory_settle()) nobody_can_go_on();
  }
  return &launcher;
}

void fiber_main() {
  launch.kernel(launch.arguments[self->wave->block->rank]);
  self->wave->ready &= ~bit(), --alive;
  for (;;) reschedule();
}

}  // namespace

uint64_t random(uint64_t below) { return next_random(random_state, below); }

void reschedule() {
  polls_in_turn = 0;
  Fiber *from = self, *to = lanes_of_turn ? next_lane() : next_turn();
  if (from == to) return;
  self = to, ++result.switches;
  fiber_switch(&from->sp, to->sp);
}

void give_up() {
  void* lost;
  self = &launcher;
  fiber_switch(&lost, launcher.sp);
  __builtin_unreachable();
}

void pause() {
  Wave& w = *self->wave;
  if (self->polled)
    ++watch_of(self->polled);
  else
    ++watch_all;
  self->paused_at = changes;
  w.ready &= ~bit(), w.spinning |= bit(), w.looked_at = ~0ull;
  spinners.set(&w - waves);
  reschedule();
}

void maybe_yield() {
  if (yield_chance && (int)random(256) < yield_chance) reschedule();
}

void block_barrier() {
  Wave& mine = *self->wave;
  Block& b = *mine.block;
  int waves_per_block = n_waves / n_blocks, first = b.index * waves_per_block;
  mine.ready &= ~bit(), mine.at_barrier |= bit();
  if (++b.arrived < (int)launch.threads) return reschedule();
  b.arrived = 0, ++b.era;
  if (checking) order_barrier(b);
  for (int i = first; i < first + waves_per_block; ++i) {
    waves[i].ready |= waves[i].at_barrier, waves[i].at_barrier = 0;
    runnable.set(i);
  }
  maybe_yield();
}

void meet(Collective collective) {
  Wave& w = *self->wave;
  if (w.meeting && w.collective != collective) {
    report("%s wave %d stage %s task %u: lanes meet in different collectives", block_name(w.block->index), w.index,
           stage_name(self->place.stage), self->place.task);
    give_up();
  }
  w.collective = collective, w.meeting |= bit();
  if (~w.meeting) {
    w.ready &= ~bit();
    return reschedule();
  }
  w.meeting = 0, w.ready = ~0ull;
  collective(w);
}

void mma_wait() {
  Wave& w = *self->wave;
  w.ready &= ~bit(), w.at_mma |= bit();
  reschedule();
}
void mma_wake() {
  Wave& w = *self->wave;
  w.ready |= w.at_mma, w.at_mma = 0;
}

// A random order.
static void start_priorities() {
  free(priority);
  priority = (int*)allocate(n_waves * sizeof(int));
  for (int i = 0; i < n_waves; ++i) {
    int other = order_random(i + 1);
    priority[i] = priority[other], priority[other] = i;
  }
  lowest_priority = 0;
}

// The order of this launch, and how the memory behaves.
void scheduler_start() {
  turns = changes = 0, lanes_of_turn = 0, wave_of_turn = 0, polls_in_turn = 0;
  last_chance = ~0ull, stuck_since = 0, watch_all = 0;
  memset(watched, 0, sizeof watched);
  int words = (n_waves + 63) / 64;
  free(runnable.bits), free(spinners.bits);
  runnable.bits = (uint64_t*)allocate(words * 8), spinners.bits = (uint64_t*)allocate(words * 8);
  for (int i = 0; i < n_waves; ++i) runnable.set(i);
  random_state = (launch.seed + 1) * 0x9e3779b97f4a7c15, order_state = ~random_state;
  for (int i = 0; i < 8; ++i) random(1), order_random(1);
  Policy of_seed =
      !checking && launch.seed == 0 ? CALM : Policy(launch.seed % (launch.ranks > 1 ? CALM : ONE_RANK_LATE));
  policy = launch.flags & REPLAY_CHOICES ? REPLAY : of_seed;
  late = order_random(policy == ONE_BLOCK_LATE ? n_blocks : policy == ONE_WAVE_LATE ? n_waves : launch.ranks);
  start_priorities();
  next_choice = 0;
  constexpr int CHANCE[] = {0, 8, 128};
  Habits habits{CHANCE[random(3)], CHANCE[random(3)], CHANCE[random(3)], random(2) != 0};
  yield_chance = checking ? CHANCE[random(3)] : 0;
  rotates = of_seed != ROUND_ROBIN && of_seed != CALM;
  if (launch.flags & IN_STEP) yield_chance = 256, rotates = false;
  if (launch.flags & KIND_MEMORY) habits = {};
  if (checking) memory_start(habits);
}

// Subnormal numbers count, whatever the calling thread has set.
struct FloatMode {
#if defined(__x86_64__)
  uint32_t before;
  FloatMode() : before(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~FloatMode() { __builtin_ia32_ldmxcsr(before); }
#endif
};

void scheduler_run() {
  FloatMode mode;
  double start = seconds_now();
  self = &launcher;
  reschedule();
  result.seconds = seconds_now() - start;
  result.finished = alive == 0, result.turns = turns;
}

void* new_fiber_stack(char* top) { return fiber_stack(top, fiber_main); }

}  // namespace host
