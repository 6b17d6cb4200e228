// LDS: one store of words per block, and who touched each word since the last barrier. A barrier of a wave is enough between
// threads of that wave.
#include <stdlib.h>

#include "internal.h"

namespace host {
namespace {

uint32_t reserved;
constexpr uint16_t NOBODY = 0, SEVERAL = 0xffff;

constexpr uint16_t SEVERAL_OF_WAVE = 0x8000;  // and the wave's number

bool other(uint16_t who, uint16_t me) { return who != NOBODY && who != me; }
uint16_t of_wave(uint16_t thread) { return SEVERAL_OF_WAVE | (thread - 1) / LANES; }
uint16_t join(uint16_t who, uint16_t me) {
  if (who == NOBODY || who == me) return me;
  if (who != SEVERAL && (who & SEVERAL_OF_WAVE ? who : of_wave(who)) == of_wave(me)) return of_wave(me);
  return SEVERAL;
}
bool of_others(uint16_t who, uint16_t me) { return who != NOBODY && join(who, me) == SEVERAL; }

// What this thread's wave did before its barrier orders it among its lanes; other waves have yet to learn of it.
void wave_has_met(LdsShadow& s, uint16_t me) {
  s.wave_era = self->wave->era;
  uint16_t* now[] = {&s.writer, &s.reader, &s.atomic};
  for (int i = 0; i < 3; ++i) {
    if (*now[i] == NOBODY || of_others(*now[i], me)) continue;
    s.before[i] = s.before[i] == NOBODY ? of_wave(me) : join(s.before[i], me);
    *now[i] = NOBODY;
  }
}

}  // namespace

uint32_t lds_reserve(uint32_t words) {  // in whole 16 bytes, as every array is aligned
  uint32_t at = reserved;
  reserved += (words + 3) / 4 * 4;
  return at;
}
uint32_t lds_size() { return reserved; }

void lds_start(Block& b) {
  for (uint32_t i = 0; i < reserved; ++i) b.lds[i] = 0xffa5a5a5;  // garbage at the start, and a NaN
  if (!checking) return;
  if (!b.shadow) b.shadow = (LdsShadow*)allocate(reserved * sizeof(LdsShadow) + 1);
  memset(b.shadow, 0, reserved * sizeof(LdsShadow));
}

void lds_check(const char* name, uint32_t word, uint32_t index, LdsAccess access) {
  Block& b = *self->wave->block;
  LdsShadow& s = b.shadow[word];
  uint16_t me = self->thread + 1;
  if (s.era != b.era) s = {b.era, self->wave->era, NOBODY, NOBODY, NOBODY, 0, 0, {}};
  if (s.wave_era != self->wave->era) wave_has_met(s, me);
  bool wrote = other(s.writer, me) || of_others(s.before[0], me);
  bool read = access != LDS_READ && (other(s.reader, me) || of_others(s.before[1], me));
  bool changed = access != LDS_ATOMIC && (other(s.atomic, me) || of_others(s.before[2], me));
  if (wrote || read || changed) {
    constexpr const char* DOES[] = {"reads", "writes", "changes atomically"};
    report(
        "LDS race: %s stage %s task %u thread %d %s %s[%u], which another thread %s in stage %s task %u with "
        "no barrier between",
        block_name(b.index), stage_name(self->place.stage), self->place.task, me - 1, DOES[access], name, index,
        wrote  ? "wrote"
        : read ? "read"
               : "changed atomically",
        stage_name(s.stage), s.task);
  }
  s.stage = self->place.stage, s.task = self->place.task;
  uint16_t& mine = access == LDS_READ ? s.reader : access == LDS_WRITE ? s.writer : s.atomic;
  mine = join(mine, me);
}

void lds_outside(const char* name, uint32_t index, uint32_t size) {
  report("%s stage %s task %u thread %d: %s[%u] of an array of %u words (or not 16 bytes aligned)",
         block_name(self->wave->block->index), stage_name(self->place.stage), self->place.task, self->thread, name,
         index, size);
  give_up();
}

}  // namespace host
