// What the parts of the runtime share among themselves.
#pragma once
#include "launch.h"
#include "runtime.h"

#pragma GCC visibility push(hidden)  // for all that follows: called directly, not by way of a table
namespace host {

extern Launch launch;  // the one that runs
extern Result result;
extern Wave* waves;
extern Fiber* fibers;
extern int n_waves, n_fibers, n_xcds, alive;  // alive: fibers that have not ended

const char* stage_name(uint32_t stage);
const char* block_name(int index);  // "block 3", with its rank where several run here
void* allocate(size_t bytes);       // zeroed; give back with free
void* map(size_t bytes);            // zeroed, made of memory only where it is touched
void unmap(void* p, size_t bytes);

// scheduler.cpp
void scheduler_start();
void scheduler_run();
void* new_fiber_stack(char* top);
void mma_wait();
void mma_wake();

// stuck.cpp
void describe_stuck();

// shared.cpp
Region* find_region(uint64_t offset);                           // null if in none
HOST_COLD void bad_access(const void* p);                       // does not come back
void describe_address(const void* p, char* text, size_t size);  // where it lies in or beside which region

// memory.cpp: one L2 per XCD in front of a common memory, and stores that take their time.
// Chances of 256: in a turn, that a line is evicted, that stores arrive; that an L2 fetches a line just before it changes.
struct Habits {
  int evict, arrive, fetch;
  bool newest_first;
};
void memory_start(Habits);
void memory_tick();    // once per turn: perhaps an eviction, perhaps an arrival
bool memory_settle();  // a few stores arrive; false if none was on its way
void memory_finish();  // end of the kernel: everything to memory
void checked_peek(const Fiber&, const void* p, void* pair);
void checked_claim(const void* p, bool mine);
void explain_word(const void* p, char* text, size_t size);

// lds.cpp
uint32_t lds_size();  // words, of all arrays
void lds_start(Block&);
void lds_forget_copies(LdsCopies*);

// mma.cpp
struct MmaQueue;
MmaQueue* mma_allocate(int n_waves);
size_t mma_bytes(int n_waves);
void mma_start(Wave&, MmaQueue* all, int index);

}  // namespace host
