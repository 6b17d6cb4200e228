// Who knows what of whom (order.cpp): vector clocks of waves, and what they say of each access to shared memory.
#pragma once
#include "internal.h"

#pragma GCC visibility push(hidden)
namespace host {

struct Spot {
  Region* region;
  uint64_t word;  // in the region
};

struct Snapshot;  // all that a wave knew when it published a word
struct Reader {
  uint32_t wave, clock, task;
  uint16_t stage;
  bool of_flag;  // a flag may move on under its readers; they are kept as proof that it arrived
};

enum class Sync : uint8_t { DRAIN, RELEASE, ACQUIRE, BARRIER, PUBLISH, LEARN };

void order_start();
bool order_on();
const Snapshot* order_publish(Spot, uint32_t tag);           // what the readers of this word learn
void order_arrived(Spot, const Snapshot*, uint32_t tag);     // the word is in memory
void order_poll(Spot, uint32_t tag, bool is_flag);           // a tag that was waited for has been seen
void order_claim(Spot, bool mine);                           // an atomic: learns, and publishes
void order_store(Spot, Scope, uint32_t epoch, bool tagged);  // before the history notes it
void order_load(Spot, Scope);                                // of untagged data
void order_drain(Wave&), order_release(), order_acquire(), order_barrier(Block&);
uint32_t order_clock();  // of this wave's current segment

// story.cpp: what the two waves of a report did around the accesses in question
void story_start();
void story_note(int wave, Sync, uint32_t clock, Spot at = {}, uint32_t tag = 0, int from = -1);
void story_tell(int writer, uint32_t since, int reader);
const char* where_text(Spot);     // "byte 64 of x"
const char* wave_text(int wave);  // "block 1 (XCD 1) wave 2"
const char* place_text(uint32_t stage, uint32_t task);

}  // namespace host
#pragma GCC visibility pop
