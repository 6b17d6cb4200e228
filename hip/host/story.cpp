// What a report is about, told: the last things of each wave that order it among others.
#include <stdarg.h>
#include <stdio.h>

#include "order.h"

namespace host {
namespace {

constexpr int KEPT = 64, TOLD = 7;
struct Event {
  Sync sync;
  uint16_t stage;
  int from;
  uint32_t clock, task, tag;
  uint64_t number;  // of all
  Spot at;
};
struct Log {
  uint64_t count;
  Event events[KEPT];
};
Log* logs;
int made_for;
uint64_t noted;

const Event& event(const Log& log, uint64_t number) { return log.events[number % KEPT]; }

char* end_of_story() { return result.story + strlen(result.story); }
__attribute__((format(printf, 1, 2))) void tell(const char* format, ...) {
  va_list list;
  va_start(list, format);
  char* end = end_of_story();
  vsnprintf(end, result.story + sizeof result.story - end, format, list);
  va_end(list);
}

void tell_event(int wave, const Event& e) {
  tell("    %s, wave %d: ", place_text(e.stage, e.task), waves[wave].index);
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

// The first event of a block from number `from` on, or the last before it if not `forward`; null if none is kept. Of barriers
// only those of one wave: they are all waves'.
const Event* next_event(const Block& block, int wave_of_barriers, uint64_t from, bool forward, int& wave) {
  int per_block = n_waves / n_blocks, first = block.index * per_block;
  const Event* best = nullptr;
  for (int w = first; w < first + per_block; ++w)
    for (uint64_t i = logs[w].count > KEPT ? logs[w].count - KEPT : 0; i < logs[w].count; ++i) {
      const Event& e = event(logs[w], i);
      if (e.sync == Sync::BARRIER && w != wave_of_barriers) continue;
      if (forward ? e.number < from || (best && e.number >= best->number)
                  : e.number >= from || (best && e.number <= best->number))
        continue;
      best = &e, wave = w;
    }
  return best;
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
  if (log.count && sync == Sync::RELEASE && event(log, log.count - 1).sync == sync) return;  // each lane's
  const Place& place = fibers[wave * LANES].place;
  log.events[log.count++ % KEPT] = {sync, (uint16_t)place.stage, from, clock, place.task, tag, noted++, at};
}

void story_tell(int writer, uint32_t since, int reader) {
  if (result.reports != 1) return;
  const Log& log = logs[writer];
  uint64_t from = ~0ull;
  for (uint64_t i = log.count > KEPT ? log.count - KEPT : 0; i < log.count && from == ~0ull; ++i)
    if (event(log, i).clock >= since) from = event(log, i).number;
  int wave, told = 0;
  tell("  %s after that access, and its block:\n", wave_text(writer));
  for (const Event* e; told < TOLD && (e = next_event(*waves[writer].block, writer, from, true, wave)); ++told)
    tell_event(wave, *e), from = e->number + 1;
  if (!told) tell("    nothing that others could see\n");

  const Event* last[TOLD];
  int last_wave[TOLD], n = 0;
  from = ~0ull;
  while (n < TOLD && (last[n] = next_event(*waves[reader].block, reader, from, false, last_wave[n])))
    from = last[n++]->number;
  tell("  %s before this access, and its block:\n", wave_text(reader));
  if (!n) tell("    nothing that others could have told it\n");
  while (n--) tell_event(last_wave[n], *last[n]);
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
