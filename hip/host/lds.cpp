// LDS: one store of words per block, and who touched each word since the last barrier. A barrier of a wave is enough between
// threads of that wave. Asynchronous copies land in it whenever they like, until their wave waits for them.
#include <stdlib.h>

#include "internal.h"

namespace host {

struct LdsCopies {
  static constexpr int MOST = 64;  // of a lane
  struct Copy {
    LdsWord to;
    const void* from;
    bool landed;
  };
  int count[LANES];
  Copy copies[LANES][MOST];
};

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

void lds_forget_copies(LdsCopies* c) {
  if (c) memset(c->count, 0, sizeof c->count);
}

void lds_check(const char* name, uint32_t word, uint32_t index, LdsAccess access) {
  Block& b = *self->wave->block;
  LdsShadow& s = b.shadow[word];
  uint16_t me = self->thread + 1;
  if (s.era != b.era) s = {b.era, self->wave->era, NOBODY, NOBODY, NOBODY, 0, 0, {}, s.filled, s.on_its_way};
  if (s.wave_era != self->wave->era) wave_has_met(s, me);
  bool wrote = other(s.writer, me) || of_others(s.before[0], me);
  bool read = access != LDS_READ && (other(s.reader, me) || of_others(s.before[1], me));
  bool changed = access != LDS_ATOMIC && (other(s.atomic, me) || of_others(s.before[2], me));
  if (s.on_its_way || (access != LDS_WRITE && !s.filled))
    report("LDS: %s stage %s task %u thread %d %s %s[%u], %s", block_name(b.index), stage_name(self->place.stage),
           self->place.task, me - 1, access == LDS_WRITE ? "writes" : "reads", name, index,
           s.on_its_way
               ? "into which an asynchronous copy is on its way; missing: a wait for the wave's copies"
               : "which nobody has written yet in this launch; missing: its initialization, or a barrier before this");
  s.filled = true;
  if (wrote || read || changed) {
    constexpr const char* DOES[] = {"reads", "writes", "changes atomically"};
    report(
        "LDS race: %s stage %s task %u thread %d %s %s[%u], which another thread %s in stage %s task %u with "
        "no barrier between; missing: block_barrier(), or wave_barrier() within a wave",
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

static void land(Wave& w, LdsCopies::Copy& c) {
  if (c.landed) return;
  c.landed = true;
  memcpy(fibers[(&w - waves) * LANES].lds + c.to.word, c.from, 16);
}

void lds_copy(LdsWord to, const void* from) {
  if (!checking) {
    memcpy(self->lds + to.word, from, 16);
    return;
  }
  Wave& w = *self->wave;
  if (!w.copies) w.copies = (LdsCopies*)allocate(sizeof(LdsCopies));
  int& count = w.copies->count[self->lane];
  if (count == LdsCopies::MOST) land(w, w.copies->copies[self->lane][--count]);  // more than any counter holds
  for (uint32_t i = 0; i < 4; ++i) {
    lds_check(to.name, to.word + i, to.index + i, LDS_WRITE);
    ++w.block->shadow[to.word + i].on_its_way;
  }
  w.copies->copies[self->lane][count++] = {to, from, false};
  if (random(2)) land(w, w.copies->copies[self->lane][random(count)]);
  maybe_yield();
}

void lds_wait(int left) {
  if (!checking) return;
  self->wave->slots[self->lane] = left;
  meet([](Wave& w) {
    ++w.era;  // what has landed is there for all lanes
    for (int lane = 0; w.copies && lane < LANES; ++lane) {
      int &count = w.copies->count[lane], done = count - (int)w.slots[lane];
      if (done <= 0) continue;
      LdsCopies::Copy* copies = w.copies->copies[lane];
      for (int i = 0; i < done; ++i) {
        land(w, copies[i]);
        for (uint32_t j = 0; j < 4; ++j) {  // other waves learn of it at the next barrier only
          LdsShadow& s = w.block->shadow[copies[i].to.word + j];
          uint16_t writer = SEVERAL_OF_WAVE | w.index;
          if (s.era != w.block->era) s = {w.block->era, w.era, NOBODY, NOBODY, NOBODY, 0, 0, {}, true, s.on_its_way};
          --s.on_its_way, s.wave_era = w.era, s.before[0] = writer, s.writer = NOBODY;
          s.stage = fibers[(&w - waves) * LANES].place.stage, s.task = fibers[(&w - waves) * LANES].place.task;
        }
      }
      memmove(copies, copies + done, (count -= done) * sizeof *copies);
    }
  });
}

}  // namespace host
