// Starts a launch and ends it: fibers, their stacks, the signal handler, and what is reported.
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

#include "internal.h"

namespace host {

Launch launch;
Result result;

namespace {

constexpr uint64_t CANARY = 0x5afe57ac4ca9a121;

Block* blocks;
int made_blocks, made_fibers;  // what the arrays were made for
MmaQueue* products;

// At the end of each stack. Not where there are so many that the pages would be worth more.
bool has_canaries() { return n_fibers <= 16384; }
char* stack_of(int fiber) { return launch.stacks + fiber * launch.stack_bytes; }

void release_fibers() {
  if (!made_fibers) return;
  unmap(products, mma_bytes(n_waves));
  for (int b = 0; b < made_blocks; ++b) free(blocks[b].lds), free(blocks[b].shadow);
  free(blocks), free(waves), free(fibers);
  made_fibers = made_blocks = 0;
}

// Kept from launch to launch while the shape is the same.
void make_fibers() {
  int blocks_wanted = launch.ranks * launch.blocks, wanted = blocks_wanted * launch.threads;
  if (made_blocks == blocks_wanted && made_fibers == wanted) return;
  release_fibers();
  n_blocks = blocks_wanted, n_fibers = wanted, n_waves = wanted / LANES;
  blocks = (Block*)allocate(n_blocks * sizeof(Block));
  waves = (Wave*)allocate(n_waves * sizeof(Wave));
  fibers = (Fiber*)allocate(n_fibers * sizeof(Fiber));
  products = mma_allocate(n_waves);
  for (int b = 0; b < n_blocks; ++b) blocks[b].lds = (uint32_t*)allocate(lds_size() * 4 + 4);
  made_blocks = n_blocks, made_fibers = wanted;
}

void start_fibers() {
  alive = n_fibers;
  for (int b = 0; b < n_blocks; ++b) {
    Block& block = blocks[b];
    block.index = b, block.rank = b / launch.blocks, block.id = b % launch.blocks;
    block.xcd = block.rank * launch.xcds + block.id % launch.xcds, block.arrived = 0, block.era = 1;
    lds_start(block);
  }
  for (int i = 0; i < n_waves; ++i) {
    Wave& w = waves[i];
    StoreQueue* stores = w.stores;
    LdsCopies* copies = w.copies;
    memset(&w, 0, sizeof w);
    w.block = &blocks[i * LANES / launch.threads], w.index = i * LANES % launch.threads / LANES;
    w.ready = ~0ull, w.looked_at = ~0ull, w.stores = stores;
    lds_forget_copies(w.copies = copies);
    mma_start(w, products, i);
  }
  for (int i = 0; i < n_fibers; ++i) {
    if (has_canaries()) *(uint64_t*)stack_of(i) = CANARY;
    // Tops at different offsets: at equal ones all stacks would share a few sets of the processor's caches.
    void* sp = new_fiber_stack(stack_of(i + 1) - i % 61 * 64);
    Wave* w = &waves[i / LANES];
    fibers[i] = {sp, w, w->block->lds, i % LANES, i % (int)launch.threads, {}, nullptr, 0, {}, 0};
  }
}

bool overflowed(int fiber) { return has_canaries() && fiber < n_fibers && *(uint64_t*)stack_of(fiber) != CANARY; }

void report_overflow(int fiber) {
  const Fiber& f = fibers[fiber];
  report("%s stage %s task %u thread %d overflowed its stack of %zu bytes", block_name(f.wave->block->index),
         stage_name(f.place.stage), f.place.task, f.thread, (size_t)launch.stack_bytes);
}

void on_fault(int, siginfo_t* info, void*) {
  char* at = (char*)info->si_addr;
  int fiber = self - fibers;
  bool mine = at < launch.stacks && at >= launch.stacks - (1 << 20);
  if (mine || overflowed(fiber) || overflowed(fiber + 1)) {  // the stack above grows down into this one
    report_overflow(mine || overflowed(fiber) ? fiber : fiber + 1);
    give_up();
  }
  char where[300];
  describe_address(at, where, sizeof where);
  bool raw = (uint64_t)(at - window) < window_bytes;
  report("%s stage %s task %u touches %s%s", block_name(self->wave->block->index), stage_name(self->place.stage),
         self->place.task, where, raw ? " past the accessors" : "");
  give_up();
}

// Asked each second of the process's time: has any thread been switched to while the launching one had so many of its own? A
// spin that neither polls nor pauses never ends.
constexpr double PATIENT_SECONDS = 2;
pthread_t launching_thread;
uint64_t switches_seen;
double seen_at;

double own_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

void on_timer(int) {
  if (!pthread_equal(pthread_self(), launching_thread)) {
    pthread_kill(launching_thread, SIGVTALRM);
    return;
  }
  if (result.switches != switches_seen) switches_seen = result.switches, seen_at = own_seconds();
  if (own_seconds() - seen_at < PATIENT_SECONDS) return;
  report("%s stage %s task %u runs on and on without looking at anything; missing: a load in its loop that reads anew",
         block_name(self->wave->block->index), stage_name(self->place.stage), self->place.task);
  give_up();
}

struct Watchdog {
  struct sigaction was;
  explicit Watchdog(bool on) : on(on) {
    if (!on) return;
    launching_thread = pthread_self(), switches_seen = 0, seen_at = own_seconds();
    struct sigaction act;
    memset(&act, 0, sizeof act);
    act.sa_handler = on_timer, act.sa_flags = SA_ONSTACK | SA_NODEFER | SA_RESTART;
    sigaction(SIGVTALRM, &act, &was);
    set(1);
  }
  ~Watchdog() {
    if (!on) return;
    set(0);
    sigaction(SIGVTALRM, &was, nullptr);
  }

 private:
  bool on;
  static void set(int seconds) {
    itimerval every{{seconds, 0}, {seconds, 0}};
    setitimer(ITIMER_VIRTUAL, &every, nullptr);
  }
};

}  // namespace

void* allocate(size_t bytes) {
  void* p = calloc(1, bytes);
  if (!p) abort();
  return p;
}
void* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}
void unmap(void* p, size_t bytes) { munmap(p, bytes); }

const char* stage_name(uint32_t stage) {
  static char numbers[4][16];
  static int at;
  if (stage < launch.n_stages) return launch.stages[stage];
  char* text = numbers[at++ % 4];
  snprintf(text, sizeof numbers[0], "%u", stage);
  return text;
}

const char* block_name(int index) {
  static char names[4][32];
  static int at;
  char* text = names[at++ % 4];
  int of_rank = launch.blocks;
  if (launch.ranks == 1)
    snprintf(text, sizeof names[0], "block %d", index);
  else
    snprintf(text, sizeof names[0], "rank %d block %d", index / of_rank, index % of_rank);
  return text;
}

void report(const char* format, ...) {
  if (result.reports++) return;
  va_list list;
  va_start(list, format);
  vsnprintf(result.report, sizeof result.report, format, list);
  va_end(list);
}

}  // namespace host

using namespace host;

extern "C" uint32_t rocmega_host_abi() {
  return HOST_ABI << 24 | sizeof(Launch) << 16 | sizeof(Result) << 4 | sizeof(Region) / 8;
}

extern "C" void rocmega_host_launch(const Launch* wanted, Result* out) {
  static char signal_stack[64 << 10];
  stack_t on{}, was_on;
  on.ss_sp = signal_stack, on.ss_size = sizeof signal_stack;
  struct sigaction act, was_segv, was_bus;
  memset(&act, 0, sizeof act);
  act.sa_sigaction = on_fault, act.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaltstack(&on, &was_on), sigaction(SIGSEGV, &act, &was_segv), sigaction(SIGBUS, &act, &was_bus);

  launch = *wanted;
  memset(&result, 0, sizeof result);
  checking = launch.flags & CHECK;
  launch_blocks = launch.blocks, n_xcds = launch.ranks * launch.xcds;
  window = launch.arena->window, data = launch.arena->data, window_bytes = launch.arena->bytes;
  unchecked_bytes = checking ? 0 : window_bytes;
  make_fibers();
  start_fibers();
  scheduler_start();
  {
    Watchdog watchdog(checking);
    scheduler_run();
  }
  for (int i = 0; i < n_fibers; ++i)
    if (overflowed(i)) report_overflow(i);
  if (checking) memory_finish();

  sigaction(SIGSEGV, &was_segv, nullptr), sigaction(SIGBUS, &was_bus, nullptr), sigaltstack(&was_on, nullptr);
  *out = result;
}
