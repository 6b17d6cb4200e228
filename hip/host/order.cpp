// Vector clocks. A wave's clock counts its segments, and each of its accesses belongs to one. Of every wave, itself included,
// a wave knows up to which segment
//   order     its instructions are behind us
//   arrived   its stores have left it (drain): those of device and system scope are in memory, plain ones in its XCD's L2
//   visible   its plain stores are in memory too (release)
// It knows that from its own instructions, from tags and flags that it has seen, each of which brings what its writer knew,
// and from block barriers. What it knew when it last acquired is what its plain loads may rely on.
//
// So an access is judged by what holds in every run that has these hand-offs, not by what the caches happened to hold. A
// drain, a release, an acquire, a wait or a slot that is missing is found on the first seed, and by name.
#include <stdio.h>
#include <stdlib.h>

#include "memory_model.h"
#include "order.h"

namespace host {

struct Snapshot {
  uint32_t wave, clock;
  uint32_t known[];  // [order, arrived, visible][waves]
};
struct Readers {
  uint32_t count, size_class;
  union {
    Reader items[1];
    Readers* next_spare;
  };
};

namespace {

constexpr int MOST_WAVES = 2048;  // clocks grow with the square
enum Kind { ORDER, ARRIVED, VISIBLE, KINDS };

struct Knowledge {
  uint32_t* of[KINDS];
  uint32_t *arrived_at_acquire, *visible_at_acquire;
  const Snapshot* latest;  // of all that it knows; null: it has learned since
  bool closed;             // others know of this segment: what comes now belongs to the next
  bool acquired;           // nothing learned since the last acquire
};
Knowledge* knowledge;
uint32_t* clocks;
int made_for;
bool on;

// Snapshots and readers live as long as the launch; the memory is kept for the next.
constexpr size_t CHUNK = 1 << 20, CLASSES = 24;
struct Chunk {
  Chunk* next;
  char bytes[CHUNK];
};
Chunk *first_chunk, *chunk;
size_t used;
Readers* spare[CLASSES];

void* take(size_t bytes) {
  bytes = (bytes + 7) / 8 * 8;
  if (bytes > CHUNK) abort();
  if (!chunk || used + bytes > CHUNK) {
    Chunk*& next = chunk ? chunk->next : first_chunk;
    if (!next) next = (Chunk*)allocate(sizeof(Chunk));
    chunk = next, used = 0;
  }
  return chunk->bytes + (used += bytes) - bytes;
}

int me() { return self->wave - waves; }
int wave_of(const History& h) { return h.block * (n_waves / n_blocks) + h.thread / LANES; }
History& history_of(Spot at) { return at.region->history[at.word]; }
bool of_launch(const History& h) { return h.launch == launch.serial; }
Readers* readers_of(const History& h) { return h.read_in == launch.serial ? h.readers : nullptr; }

void next_segment(int w) {
  Knowledge& k = knowledge[w];
  ++k.of[ORDER][w], k.latest = nullptr, k.closed = false;
}
void open_segment(int w) {
  if (knowledge[w].closed) next_segment(w);
}

void raise(uint32_t* __restrict to, const uint32_t* __restrict from, int n) {
  for (int i = 0; i < n; ++i) to[i] = to[i] > from[i] ? to[i] : from[i];
}

void learn(const Snapshot& s, Spot at, uint32_t tag) {
  int w = me();
  Knowledge& k = knowledge[w];
  if (k.of[ORDER][s.wave] >= s.clock) return;
  open_segment(w);
  raise(k.of[ORDER], s.known, KINDS * n_waves);
  k.latest = nullptr, k.acquired = false;
  story_note(w, Sync::LEARN, k.of[ORDER][w], at, tag, s.wave);
}

void add_reader(History& h, bool of_flag) {
  int w = me();
  open_segment(w);
  Reader mine{(uint32_t)w, knowledge[w].of[ORDER][w], self->place.task, (uint16_t)self->place.stage, of_flag};
  Readers* r = readers_of(h);
  for (uint32_t i = 0; r && i < r->count; ++i)
    if ((int)r->items[i].wave == w) {
      r->items[i] = mine;
      return;
    }
  uint32_t size_class = r ? r->size_class : 0;
  if (!r || r->count == 2u << size_class) {  // the next size
    if (r) ++size_class;
    Readers* bigger = spare[size_class];
    if (bigger)
      spare[size_class] = bigger->next_spare;
    else
      bigger = (Readers*)take(sizeof(Readers) + (2 << size_class) * sizeof(Reader));
    bigger->count = r ? r->count : 0, bigger->size_class = size_class;
    if (r) {
      memcpy(bigger->items, r->items, r->count * sizeof(Reader));
      r->next_spare = spare[r->size_class], spare[r->size_class] = r;
    }
    h.readers = r = bigger, h.read_in = launch.serial;
  }
  r->items[r->count++] = mine;
}

void forget_readers(History& h) {
  if (Readers* r = readers_of(h)) r->next_spare = spare[r->size_class], spare[r->size_class] = r;
  h.read_in = 0;
}

// What is missing between a store and this wave's load.
const char* missing(const History& h, Scope load, char (&text)[160]) {
  int u = wave_of(h), w = me();
  if (u == w) return nullptr;
  const Knowledge& k = knowledge[w];
  const Block &theirs = *waves[u].block, &mine = *waves[w].block;
  bool plain_far = SCOPES[h.scope].in_l2 && theirs.xcd != mine.xcd;
  uint32_t c = h.clock;
  if (k.of[ORDER][u] < c)
    return "anything that orders the load behind the store: a wait for its flag or tag, or a barrier";
  if (k.of[ARRIVED][u] < c) {
    snprintf(text, sizeof text, "drain() by %s between the store and what announces it", wave_text(u));
    return text;
  }
  if (plain_far && k.of[VISIBLE][u] < c) {
    snprintf(text, sizeof text, "release_device() on XCD %d between the plain store and what announces it", theirs.xcd);
    return text;
  }
  if (!SCOPES[load].in_l2 || &theirs == &mine) return nullptr;
  if (k.arrived_at_acquire[u] >= c && (!plain_far || k.visible_at_acquire[u] >= c)) return nullptr;
  return "acquire_device() by this wave after it learned of the store and before its plain load (no acquire)";
}

void report_store(Spot at, uint32_t epoch, int other, uint32_t since, const char* what, const char* missing) {
  report("%s %s stores %s for epoch %u, which %s; missing: %s", wave_text(me()),
         place_text(self->place.stage, self->place.task), where_text(at), epoch, what, missing);
  story_tell(other, since, me());
}

// All readers are behind this store? Says so where one is not; true if at least one was.
bool check_readers(Spot at, const History& h, uint32_t epoch) {
  const Knowledge& k = knowledge[me()];
  bool seen = false;
  Readers* readers = readers_of(h);
  for (uint32_t i = 0; readers && i < readers->count; ++i) {
    const Reader& r = readers->items[i];
    bool ordered = (int)r.wave == me() || k.of[ORDER][r.wave] >= r.clock;
    seen |= ordered;
    if (ordered || r.of_flag) continue;
    char what[200];
    snprintf(what, sizeof what, "%s %s has read%s", wave_text(r.wave), place_text(r.stage, r.task),
             of_launch(h) ? " of the epoch before" : "");
    report_store(
        at, epoch, r.wave, r.clock, what,
        "anything that orders that read before this store: a slot more, or a wait for what the reader publishes");
  }
  return seen;
}

// A tagged word that nobody has seen may be overwritten and still arrive: that matters if the new one is waited for.
void check_writer(Spot at, History& h, uint32_t epoch, bool seen, bool tagged) {
  int u = wave_of(h), w = me();
  h.doubtful = false;
  if (!of_launch(h) || u == w) return;
  const Knowledge& k = knowledge[w];
  bool plain_far = SCOPES[h.scope].in_l2 && waves[u].block->xcd != waves[w].block->xcd;
  bool ordered = k.of[ORDER][u] >= h.clock;
  bool arrived = (plain_far ? k.of[VISIBLE] : k.of[ARRIVED])[u] >= h.clock || (h.tagged && seen);
  if (ordered && arrived) return;
  if (ordered && h.tagged && tagged) {
    h.doubtful = true;
    return;
  }
  char what[200];
  snprintf(what, sizeof what, "%s %s stored for epoch %u%s", wave_text(u), place_text(h.stage, h.task), h.epoch,
           ordered ? " and which may arrive after it" : "");
  report_store(at, epoch, u, h.clock, what,
               !ordered    ? "anything that orders the two stores"
               : plain_far ? "release_device() after the plain store"
                           : "drain() after the first store");
}

}  // namespace

bool order_on() { return on; }
uint32_t order_clock() { return on ? knowledge[me()].of[ORDER][me()] : 0; }

void order_start() {
  on = n_waves <= MOST_WAVES;
  if (!on) return;
  if (made_for != n_waves) {
    free(knowledge), free(clocks);
    knowledge = (Knowledge*)allocate(n_waves * sizeof(Knowledge));
    clocks = (uint32_t*)allocate((size_t)n_waves * n_waves * 5 * sizeof(uint32_t));
    made_for = n_waves;
  }
  memset(clocks, 0, (size_t)n_waves * n_waves * 5 * sizeof(uint32_t));
  for (int w = 0; w < n_waves; ++w) {
    uint32_t* mine = clocks + (size_t)w * n_waves * 5;
    for (int kind = 0; kind < KINDS; ++kind) knowledge[w].of[kind] = mine + kind * n_waves;
    knowledge[w].arrived_at_acquire = mine + 3 * n_waves, knowledge[w].visible_at_acquire = mine + 4 * n_waves;
    knowledge[w].latest = nullptr, knowledge[w].closed = knowledge[w].acquired = false;
    mine[w] = 1;
  }
  chunk = nullptr, used = 0;
  memset(spare, 0, sizeof spare);
  story_start();
}

const Snapshot* order_publish(Spot at, uint32_t tag) {
  if (!on) return nullptr;
  int w = me();
  Knowledge& k = knowledge[w];
  if (!k.latest) {
    Snapshot* s = (Snapshot*)take(sizeof(Snapshot) + KINDS * n_waves * sizeof(uint32_t));
    s->wave = w, s->clock = k.of[ORDER][w];
    memcpy(s->known, k.of[ORDER], KINDS * n_waves * sizeof(uint32_t));
    k.latest = s;
    story_note(w, Sync::PUBLISH, s->clock, at, tag);
  }
  k.closed = true;
  return k.latest;
}

void order_arrived(Spot at, const Snapshot* s, uint32_t tag) {
  History& h = history_of(at);
  h.published = s, h.published_in = launch.serial, h.published_tag = tag;
}

void order_poll(Spot at, uint32_t tag, bool is_flag) {
  if (!on) return;
  History& h = history_of(at);
  if (h.published && h.published_in == launch.serial && h.published_tag == tag) learn(*h.published, at, tag);
  if (of_launch(h) && h.doubtful && h.epoch == tag && wave_of(h) != me()) {
    report(
        "%s %s waits for tag %u of %s, over which an older store may still arrive; missing: somebody who waits for "
        "every tag that is stored there, or a drain() after the store",
        wave_text(me()), place_text(self->place.stage, self->place.task), tag, where_text(at));
    story_tell(wave_of(h), h.clock, me());
  }
  if (!is_flag && of_launch(h) && h.epoch != tag && wave_of(h) != me()) {
    report(
        "%s %s waits for tag %u of %s and just gets it: %s %s has already stored tag %u over it; missing: anything "
        "that "
        "orders this read before that store: a slot more, or a wait for what the reader publishes",
        wave_text(me()), place_text(self->place.stage, self->place.task), tag, where_text(at), wave_text(wave_of(h)),
        place_text(h.stage, h.task), h.epoch);
    story_tell(wave_of(h), h.clock, me());
    return;  // no reader of the word that is coming
  }
  add_reader(h, is_flag);
}

void order_claim(Spot at, bool mine) {
  if (!on) return;
  History& h = history_of(at);
  if (h.published && h.published_in == launch.serial) learn(*h.published, at, 1);
  if (mine) open_segment(me()), order_arrived(at, order_publish(at, 1), 1);
}

void order_store(Spot at, Scope, uint32_t epoch, bool tagged) {
  if (!on) return;
  History& h = history_of(at);
  if (!tagged) open_segment(me());
  bool seen = check_readers(at, h, epoch);
  check_writer(at, h, epoch, seen, tagged);
  forget_readers(h);
}

void order_load(Spot at, Scope scope) {
  if (!on) return;
  History& h = history_of(at);
  char text[160];
  if (const char* what = of_launch(h) ? missing(h, scope, text) : nullptr) {
    report("%s %s loads %s%s, which %s %s stored%s for epoch %u; missing: %s", wave_text(me()),
           place_text(self->place.stage, self->place.task), where_text(at), scope == PLAIN ? " (plain)" : "",
           wave_text(wave_of(h)), place_text(h.stage, h.task), h.scope == PLAIN ? " (plain)" : "", h.epoch, what);
    story_tell(wave_of(h), h.clock, me());
  }
  add_reader(h, false);
}

void order_drain(Wave& wave) {
  if (!on) return;
  int w = &wave - waves;
  Knowledge& k = knowledge[w];
  k.of[ARRIVED][w] = k.of[ORDER][w];
  story_note(w, Sync::DRAIN, k.of[ORDER][w]);
  next_segment(w);
}

void order_release() {
  if (!on) return;
  int w = me();
  Knowledge& k = knowledge[w];
  k.of[ARRIVED][w] = k.of[ORDER][w];
  for (int u = 0; u < n_waves; ++u)
    if (waves[u].block->xcd == waves[w].block->xcd && k.of[VISIBLE][u] < k.of[ARRIVED][u])
      k.of[VISIBLE][u] = k.of[ARRIVED][u];
  story_note(w, Sync::RELEASE, k.of[ORDER][w]);
  next_segment(w);
}

void order_acquire() {
  if (!on) return;
  int w = me();
  Knowledge& k = knowledge[w];
  if (k.acquired) return;
  memcpy(k.arrived_at_acquire, k.of[ARRIVED], 2 * n_waves * sizeof(uint32_t));
  k.acquired = true;
  story_note(w, Sync::ACQUIRE, k.of[ORDER][w]);
}

void order_barrier(Block& block) {
  if (!on) return;
  int per_block = n_waves / n_blocks, first = block.index * per_block;
  uint32_t* all = knowledge[first].of[ORDER];
  for (int w = first + 1; w < first + per_block; ++w) raise(all, knowledge[w].of[ORDER], KINDS * n_waves);
  for (int w = first; w < first + per_block; ++w) {
    story_note(w, Sync::BARRIER, all[w]);
    if (w > first) memcpy(knowledge[w].of[ORDER], all, KINDS * n_waves * sizeof(uint32_t));
    knowledge[w].acquired = false;
  }
  for (int w = first; w < first + per_block; ++w) next_segment(w);
}

}  // namespace host
