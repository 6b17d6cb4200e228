// What a report is about, told: the last things of each wave that order it among others.
#include <stdarg.h>
#include <stdio.h>

#include "order.h"

namespace host {
namespace {

constexpr int KEPT = 64, TOLD = 5;
struct Event {
  Sync sync;
  uint16_t stage;
  int from;
  uint32_t clock, task, tag;
  Spot at;
};
struct Log {
  uint64_t count;
  Event events[KEPT];
};
Log* logs;
int made_for;

const Event& event(const Log& log, uint64_t number) { return log.events[number % KEPT]; }

char* end_of_story() { return result.story + strlen(result.story); }
__attribute__((format(printf, 1, 2))) void tell(const char* format, ...) {
  va_list list;
  va_start(list, format);
  char* end = end_of_story();
  vsnprintf(end, result.story + sizeof result.story - end, format, list);
  va_end(list);
}

void tell_event(const Event& e) {
  tell("    %s: ", place_text(e.stage, e.task));
  switch (e.sync) {
    case Sync::DRAIN:
      return tell("drain\n");
    case Sync::RELEASE:
      return tell("release\n");
    case Sync::ACQUIRE:
      return tell("acquire\n");
    case Sync::BARRIER:
      return tell("block barrier\n");
    case Sync::PUBLISH:
      return tell("stores tag %u to %s\n", e.tag, where_text(e.at));
    case Sync::LEARN:
      return tell("sees tag %u in %s, from %s\n", e.tag, where_text(e.at), wave_text(e.from));
  }
}

}  // namespace

void story_start() {
  if (made_for != n_waves) {
    if (logs) unmap(logs, made_for * sizeof(Log));
    logs = (Log*)map(n_waves * sizeof(Log));
    made_for = n_waves;
  }
  for (int w = 0; w < n_waves; ++w) logs[w].count = 0;
}

void story_note(int wave, Sync sync, uint32_t clock, Spot at, uint32_t tag, int from) {
  Log& log = logs[wave];
  const Place& place = fibers[wave * LANES].place;
  log.events[log.count++ % KEPT] = {sync, (uint16_t)place.stage, from, clock, place.task, tag, at};
}

void story_tell(int writer, uint32_t since, int reader) {
  if (result.reports != 1) return;
  const Log& theirs = logs[writer];
  uint64_t oldest = theirs.count > KEPT ? theirs.count - KEPT : 0, told = 0;
  tell("  %s, from that access on:\n", wave_text(writer));
  for (uint64_t i = oldest; i < theirs.count && told < TOLD; ++i)
    if (event(theirs, i).clock >= since) tell_event(event(theirs, i)), ++told;
  if (!told) tell("    nothing that others could see\n");
  const Log& mine = logs[reader];
  tell("  %s, up to this access:\n", wave_text(reader));
  uint64_t kept = mine.count < KEPT ? mine.count : KEPT, shown = kept < TOLD ? kept : TOLD;
  for (uint64_t i = mine.count - shown; i < mine.count; ++i) tell_event(event(mine, i));
  if (!shown) tell("    nothing that others could have told it\n");
}

// Texts in turn from a few buffers, so that several can stand in one message.
static char* next_text() {
  static char texts[8][120];
  static int at;
  return texts[at++ % 8];
}
const char* where_text(Spot at) {
  char* text = next_text();
  snprintf(text, 120, "byte %llu of %s", (unsigned long long)at.word * 4, at.region ? at.region->name : "?");
  return text;
}
const char* wave_text(int wave) {
  char* text = next_text();
  const Block& b = *waves[wave].block;
  snprintf(text, 120, "%s (XCD %d) wave %d", block_name(b.index), b.xcd, waves[wave].index);
  return text;
}
const char* place_text(uint32_t stage, uint32_t task) {
  char* text = next_text();
  snprintf(text, 120, "stage %s task %u", stage_name(stage), task);
  return text;
}

}  // namespace host
