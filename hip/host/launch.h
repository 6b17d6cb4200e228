// What the host driver and the runtime tell each other. Mirrored in rocmega/drivers/host_abi.py, which compares HOST_ABI.
#pragma once
#include <stdint.h>

namespace host {

constexpr uint32_t HOST_ABI = 3;

struct Snapshot;
struct Readers;

struct History {  // of a word: who stored it last, what came with that, and who has read it since
  uint16_t block, thread, stage;
  uint8_t scope;
  bool tagged, doubtful;                // doubtful: an older store to it, of another wave, may arrive after it
  uint32_t task, epoch, launch, clock;  // launch 0: nobody yet; clock: see order.cpp
  uint32_t read_in, published_in, published_tag;  // launches that the next two are of; the tag that is in memory
  Readers* readers;
  const Snapshot* published;
};

static_assert(sizeof(History) == 56, "host_abi.py frees them");

struct Region {
  char name[64];
  uint64_t offset, bytes;  // in the arena
  uint32_t* epochs;        // of every word; this and the next are made by the first checked launch, with mmap
  History* history;
  uint64_t peers;   // other ranks write it
  uint64_t stages;  // that may store there, a bit each
};

// All shared memory of a process: two equal ranges of addresses, of which kernels know the first and may not touch it.
// Regions are ordered by offset, with gaps between, and lie at the end of their pages. The driver owns it, so that every
// loaded module sees the same.
struct Arena {
  char *window, *data;
  uint64_t bytes;
  Region* regions;
  uint64_t count;
};

// PEERS: other processes write some of the memory, so a wait that nobody here can end may end. REPLAY_CHOICES: the order is
// calm but for `choices`. IN_STEP: the lanes of a wave take turns at every access. KIND_MEMORY: nothing is evicted, arrives
// or is fetched before it has to be.
enum Flags : uint32_t { CHECK = 1, WATCH_WAITS = 2, PEERS = 4, REPLAY_CHOICES = 8, IN_STEP = 16, KIND_MEMORY = 32 };

struct Launch {
  void (*kernel)(const void*);
  const void* const* arguments;  // of each rank that runs here
  const Arena* arena;
  const char* const* stages;                     // names for reports
  uint32_t n_stages, serial;                     // serial: grows with every launch of the process, from 1
  uint32_t ranks, blocks, threads, xcds, flags;  // blocks and xcds: of a rank
  uint64_t seed;
  double patience;  // seconds that a wait which can never end is left to the kernel's own limit, without WATCH_WAITS
  char* stacks;     // one for each thread, and inaccessible memory below
  uint64_t stack_bytes;
  const uint64_t* choices;  // turn << 16 | wave, ascending
  uint64_t n_choices;
  uint64_t* record;  // where to note the choices that were not calm, or null
  uint64_t record_room;
};

struct Result {
  uint64_t turns, switches, reports, recorded;
  double seconds;
  uint32_t finished, stuck;                           // stuck: the report is of a wait that can never end
  uint32_t rank, block, stage, task, expected, seen;  // of that wait; rank: which of those that run here
  char report[1500], story[2500];
};

}  // namespace host

extern "C" __attribute__((visibility("default"))) uint32_t rocmega_host_abi();
extern "C" __attribute__((visibility("default"))) void rocmega_host_launch(const host::Launch*, host::Result*);
