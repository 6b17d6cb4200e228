// The memory model (its parameters: memory_model.h): stores that take their time, one L2 per XCD that is not coherent with the
// others, and with each copy of a word the epoch it was written in. It is adversarial: what hardware may do, it does on some
// seed.
#include <stdio.h>
#include <stdlib.h>

#include "memory_model.h"
#include "order.h"

namespace host {

// A store on its way: issued by a lane, not yet in its XCD's L2 (plain) or in memory (device scope).
struct Store {
  Region* region;
  uint64_t word;  // in the region
  uint32_t count, data[WHOLE], epoch;
  Scope scope;
  uint8_t lane;
  const Snapshot* published;  // tagged words: what their readers learn
};
struct StoreQueue {
  size_t count, room;
  Store* items;
  uint16_t of_hash[256];  // how many there are, by a hash of the place: most loads need not look at the items
  uint16_t& hash(const Region* r, uint64_t word) { return of_hash[(r->offset / 4 + word) / 2 % 256]; }
};

namespace {

struct Line {
  Line* next;  // of the same hash
  Region* region;
  uint64_t first;         // word in the region
  uint32_t size;          // words; fewer than LINE at the end of a region
  uint32_t valid, dirty;  // a bit for each word
  bool listed;
  uint32_t data[LINE], epoch[LINE];
};
constexpr uint32_t BUCKETS = 1 << 15;
struct Cache {
  Line** buckets;
  Line** listed;  // lines that hold anything
  size_t n_listed, room;
};

struct Word {
  uint32_t data, epoch;
};

constexpr int MAX_XCDS = 64;  // of all ranks; the driver sees to it
Cache l2[MAX_XCDS];
Habits habits;

// Lines are handed out of chunks that stay for the next launch.
constexpr size_t CHUNK_LINES = 4096;
struct Chunk {
  Chunk* next;
  Line lines[CHUNK_LINES];
};
Chunk *chunks, *chunk;
size_t used_lines;

Line* new_line() {
  if (!chunk || used_lines == CHUNK_LINES) {
    Chunk*& next = chunk ? chunk->next : chunks;
    if (!next) next = (Chunk*)allocate(sizeof(Chunk));
    chunk = next, used_lines = 0;
  }
  return &chunk->lines[used_lines++];
}

template <class T> void append(T*& items, size_t& count, size_t& room, const T& item) {
  if (count == room) {
    room = room ? 2 * room : 64;
    items = (T*)realloc(items, room * sizeof(T));
    if (!items) abort();
  }
  items[count++] = item;
}

Spot spot_of(const void* p, int words) {
  uint64_t offset = (const char*)p - window;
  Region* r = offset < window_bytes && offset % 4 == 0 ? find_region(offset) : nullptr;
  if (!r) bad_access(p);
  if (offset - r->offset + 4 * words > r->bytes) bad_access((const char*)r->offset + r->bytes + (uintptr_t)window);
  if (!r->epochs) {
    r->epochs = (uint32_t*)map(r->bytes);
    r->history = (History*)map((r->bytes + 3) / 4 * sizeof(History));
  }
  return {r, (offset - r->offset) / 4};
}

uint32_t& memory_of(Region* r, uint64_t word) { return ((uint32_t*)(data + r->offset))[word]; }
Cache& own_cache() { return l2[self->wave->block->xcd]; }

uint32_t bucket_of(const Region* r, uint64_t line) {
  uint64_t at = r->offset / (LINE * 4) + line;
  return (at * 0x9e3779b97f4a7c15 >> 32) % BUCKETS;
}

Line* find_line(Cache& cache, Region* r, uint64_t word) {
  for (Line* line = cache.buckets[bucket_of(r, word / LINE)]; line; line = line->next)
    if (line->region == r && line->first == word / LINE * LINE) return line;
  return nullptr;
}

// The line around the word, in the list of those that hold something, which the caller sees to.
Line* touch_line(Cache& cache, Region* r, uint64_t word) {
  Line* line = find_line(cache, r, word);
  if (!line) {
    Line*& bucket = cache.buckets[bucket_of(r, word / LINE)];
    line = new_line();
    line->next = bucket, line->region = r, line->first = word / LINE * LINE;
    line->valid = line->dirty = 0, line->listed = false;
    uint64_t left = r->bytes / 4 - line->first;
    line->size = left < LINE ? left : LINE;
    bucket = line;
  }
  if (!line->listed) line->listed = true, append(cache.listed, cache.n_listed, cache.room, line);
  return line;
}

// A miss fills the line around what is dirty.
Line* fill_line(Cache& cache, Region* r, uint64_t word) {
  Line* line = touch_line(cache, r, word);
  for (uint32_t i = 0; i < line->size; ++i)
    if (!(line->dirty >> i & 1))
      line->data[i] = memory_of(r, line->first + i), line->epoch[i] = r->epochs[line->first + i],
      line->valid |= 1u << i;
  return line;
}

// Any XCD may fetch any line at any time (for a neighbour in the line, say); the nastiest is just before it changes.
void before_change(Region* r, uint64_t word) {
  if ((int)random(256) < habits.fetch) fill_line(l2[random(n_xcds)], r, word);
}

void write_memory(Region* r, uint64_t word, Word v) {
  before_change(r, word);
  memory_of(r, word) = v.data, r->epochs[word] = v.epoch, ++changes;
}

// Writes back and/or forgets one line; what stays dirty stays.
void flush_line(Line* line, bool write, bool forget) {
  for (uint32_t dirty = write ? line->dirty : 0; dirty; dirty &= dirty - 1) {
    uint32_t i = __builtin_ctz(dirty);
    Word v{line->data[i], line->epoch[i]};
    line->dirty &= ~(1u << i);
    write_memory(line->region, line->first + i, v);  // which may fill this very line before
    line->data[i] = v.data, line->epoch[i] = v.epoch;
  }
  if (forget) line->valid &= line->dirty;
}

// Takes lines that hold nothing off the list.
void flush_lines(Cache& cache, bool write, bool forget) {
  size_t kept = 0, n = cache.n_listed;
  for (size_t i = 0; i < n; ++i) flush_line(cache.listed[i], write, forget);
  for (size_t i = 0; i < cache.n_listed; ++i) {
    Line* line = cache.listed[i];
    if (line->valid)
      cache.listed[kept++] = line;
    else
      line->listed = false;
  }
  cache.n_listed = kept;
}

void arrive(Wave& wave, const Store& s) {
  Cache& cache = l2[wave.block->xcd];
  --wave.stores->hash(s.region, s.word);
  for (uint32_t i = 0; i < s.count; ++i) {
    uint64_t word = s.word + i;
    uint32_t bit = 1u << word % LINE;
    if (SCOPES[s.scope].in_l2) {
      Line* line = touch_line(cache, s.region, word);
      line->data[word % LINE] = s.data[i], line->epoch[word % LINE] = s.epoch, line->valid |= bit, line->dirty |= bit;
      ++changes;
      continue;
    }
    write_memory(s.region, word, {s.data[i], s.epoch});
    if (s.published && i + 1 == s.count) order_arrived({s.region, word}, s.published, s.epoch);
    Line* line = find_line(cache, s.region, word);
    if (!line) continue;
    line->data[word % LINE] = s.data[i], line->epoch[word % LINE] = s.epoch;  // renews a copy in this L2
    line->dirty &= ~bit;
  }
}

bool overlap(const Store& a, const Store& b) {
  return a.region == b.region && a.word < b.word + b.count && b.word < a.word + a.count;
}

// One store arrives: any, but not before older ones of the wave to the same word.
void arrive_one(Wave& wave, size_t pick) {
  StoreQueue& q = *wave.stores;
  for (size_t i = 0; i < pick; ++i)
    if (overlap(q.items[i], q.items[pick])) pick = i;
  arrive(wave, q.items[pick]);
  memmove(q.items + pick, q.items + pick + 1, (--q.count - pick) * sizeof(Store));
}

// Some do; the last may be the first, as a flag that overtakes its data.
void arrive_some(Wave& wave) {
  StoreQueue& q = *wave.stores;
  size_t n = q.count;
  for (n = n && random(2) ? 1 + random(n) : n != 0; n; --n)
    arrive_one(wave, habits.newest_first ? q.count - 1 : random(q.count));
}

void arrive_all(Wave& wave) {
  for (size_t i = 0; i < wave.stores->count; ++i) arrive(wave, wave.stores->items[i]);
  wave.stores->count = 0;
}

Word load_word(const Fiber& f, Spot at, Scope scope) {
  StoreQueue& q = *f.wave->stores;
  bool maybe = q.hash(at.region, at.word) || (at.word && q.hash(at.region, at.word - 1));
  for (size_t i = maybe ? q.count : 0; i-- > 0;) {  // a thread sees its own stores
    const Store& s = q.items[i];
    if (s.lane == f.lane && s.region == at.region && at.word - s.word < s.count)
      return {s.data[at.word - s.word], s.epoch};
  }
  Cache& cache = l2[f.wave->block->xcd];
  uint32_t i = at.word % LINE;
  Line* line = find_line(cache, at.region, at.word);
  if (!SCOPES[scope].in_l2) {
    if (line && line->dirty >> i & 1) return {line->data[i], line->epoch[i]};
    return {memory_of(at.region, at.word), at.region->epochs[at.word]};
  }
  if (!line || !(line->valid >> i & 1)) line = fill_line(cache, at.region, at.word);
  return {line->data[i], line->epoch[i]};
}

void explain(Spot at, char* text, size_t size) {
  const History& w = at.region->history[at.word];
  int n = w.launch == 0 ? snprintf(text, size, "never written by a kernel")
                        : snprintf(text, size, "last written by %s stage %s task %u for epoch %u%s",
                                   block_name(w.block), stage_name(w.stage), w.task, w.epoch,
                                   w.launch == launch.serial ? "" : " of an earlier launch");
  for (int i = 0; i < n_waves; ++i)
    for (size_t j = 0; j < waves[i].stores->count; ++j) {
      const Store& s = waves[i].stores->items[j];
      if (s.region != at.region || at.word - s.word >= s.count) continue;
      snprintf(text + n, size - n, ", not drained from wave %d; missing: drain() before others look", waves[i].index);
      return;
    }
  for (int x = 0; x < n_xcds; ++x) {
    Line* line = find_line(l2[x], at.region, at.word);
    if (line && line->dirty >> at.word % LINE & 1)
      snprintf(text + n, size - n, ", a plain store that XCD %d has not released; missing: release_device()", x);
  }
}

void note_writer(Spot at, Scope scope, uint32_t epoch, bool tagged) {
  History& w = at.region->history[at.word];
  const Place& place = self->place;
  uint16_t block = self->wave->block->index, thread = self->thread;
  if (epoch && w.launch == launch.serial && w.epoch == epoch && (w.block != block || w.thread != thread))
    report(
        "%s stage %s task %u stores byte %llu of %s for epoch %u, which %s stage %s task %u stored too; "
        "missing: one task alone that stores a word in an epoch",
        block_name(block), stage_name(place.stage), place.task, (unsigned long long)at.word * 4, at.region->name, epoch,
        block_name(w.block), stage_name(w.stage), w.task);
  w.block = block, w.thread = thread, w.stage = place.stage, w.scope = scope, w.tagged = tagged;
  w.task = place.task, w.epoch = epoch, w.launch = launch.serial, w.clock = order_clock();
}

// Tags of a word only grow.
void check_tag(Spot at, uint32_t tag) {
  const History& w = at.region->history[at.word];
  if (w.launch && (int)(tag - w.epoch) <= 0)
    report(
        "%s stage %s task %u stores tag %u where %s stage %s task %u stored tag %u: epochs must grow; "
        "missing: an epoch of its own for this store",
        block_name(self->wave->block->index), stage_name(self->place.stage), self->place.task, tag, block_name(w.block),
        stage_name(w.stage), w.task, w.epoch);
}

void wrong_epoch(Spot at, Scope scope, uint32_t wanted, uint32_t got) {
  char why[300], what[32] = "the newest data";
  explain(at, why, sizeof why);
  if (wanted != ANY) snprintf(what, sizeof what, "epoch %u", wanted);
  const History& w = at.region->history[at.word];
  bool not_yet = wanted != ANY && (w.launch != launch.serial || (int)(w.epoch - wanted) < 0);
  bool stale = SCOPES[scope].in_l2 && at.region->epochs[at.word] == (wanted == ANY ? w.epoch : wanted);
  report("%s load by %s (XCD %d) stage %s task %u wants %s of byte %llu of %s and gets that of epoch %u: %s%s",
         SCOPES[scope].name, block_name(self->wave->block->index), self->wave->block->xcd,
         stage_name(self->place.stage), self->place.task, what, (unsigned long long)at.word * 4, at.region->name, got,
         why,
         stale                    ? ", a stale line; missing: acquire_device()"
         : strstr(why, "missing") ? ""
         : not_yet                ? "; missing: anything that orders the load behind the store, or the store"
                                  : "; missing: anything that orders the load before the later store: a slot more");
}

}  // namespace

void memory_start(Habits h) {
  habits = h;
  for (int x = 0; x < n_xcds; ++x) {
    if (!l2[x].buckets) l2[x].buckets = (Line**)map(BUCKETS * sizeof(Line*));
    memset(l2[x].buckets, 0, BUCKETS * sizeof(Line*));
    l2[x].n_listed = 0;
  }
  chunk = nullptr, used_lines = 0;
  order_start();
  for (int i = 0; i < n_waves; ++i) {
    if (!waves[i].stores) waves[i].stores = (StoreQueue*)allocate(sizeof(StoreQueue));
    waves[i].stores->count = 0;
    memset(waves[i].stores->of_hash, 0, sizeof waves[i].stores->of_hash);
  }
}

void memory_tick() {
  if ((int)random(256) < habits.evict) {
    Cache& cache = l2[random(n_xcds)];
    if (cache.n_listed) flush_line(cache.listed[random(cache.n_listed)], true, true);
  }
  if ((int)random(256) < habits.arrive) arrive_some(waves[random(n_waves)]);
}

bool memory_settle() {
  for (int i = 0, from = random(n_waves); i < n_waves; ++i) {
    Wave& w = waves[(from + i) % n_waves];
    if (!w.stores->count) continue;
    arrive_some(w);
    return true;
  }
  return false;
}

void memory_finish() {
  habits.fetch = 0;
  for (int i = 0; i < n_waves; ++i) arrive_all(waves[i]);
  for (int x = 0; x < n_xcds; ++x) flush_lines(l2[x], true, true);
}

void explain_word(const void* p, char* text, size_t size) {
  text[0] = 0;
  if (checking) explain(spot_of(p, 1), text, size);
}

void check_scope(const void* p, Scope scope) {
  Spot at = spot_of(p, 1);
  if (!at.region->peers || SCOPES[scope].to_peers) return;
  report(
      "%s stage %s task %u accesses byte %llu of %s, which other ranks write, with less than system scope; missing: "
      "the "
      "accessors for peers' memory, whose names end with _system",
      block_name(self->wave->block->index), stage_name(self->place.stage), self->place.task,
      (unsigned long long)at.word * 4, at.region->name);
}

void checked_store(void* p, const void* v, int words, Scope scope, uint32_t epoch, bool tagged) {
  check_scope(p, scope);
  Spot at = spot_of(p, words);
  if (!(at.region->stages >> self->place.stage % 64 & 1))
    report(
        "%s %s stores %s, a region that is not its own; missing: the right address, or the region in what the stage is "
        "said to write",
        wave_text(self->wave - waves), place_text(self->place.stage, self->place.task), where_text(at));
  if (tagged) check_tag({at.region, at.word + 1}, epoch);
  for (int i = 0; i < words; i += WHOLE) {  // what is wider may be torn
    Store s{at.region,           at.word + i, (uint32_t)(words - i < WHOLE ? words - i : WHOLE), {}, epoch, scope,
            (uint8_t)self->lane, nullptr};
    memcpy(s.data, (const uint32_t*)v + i, 4 * s.count);
    for (uint32_t j = tagged; j < s.count; ++j) order_store({at.region, s.word + j}, scope, epoch, tagged);
    for (uint32_t j = 0; j < s.count; ++j) note_writer({at.region, s.word + j}, scope, epoch, tagged);
    if (tagged) s.published = order_publish({at.region, at.word + 1}, epoch);
    StoreQueue& q = *self->wave->stores;
    append(q.items, q.count, q.room, s);
    ++q.hash(s.region, s.word);
  }
  maybe_yield();
}

void checked_load(const void* p, void* v, int words, Scope scope, uint32_t epoch) {
  check_scope(p, scope);
  Spot at = spot_of(p, words);
  maybe_yield();
  for (int i = 0; i < words; ++i) {
    Spot word{at.region, at.word + i};
    Word got = load_word(*self, word, scope);
    ((uint32_t*)v)[i] = got.data;
    const History& w = at.region->history[word.word];
    bool right = epoch == ANY ? w.launch != launch.serial || w.epoch == got.epoch : got.epoch == epoch;
    order_load(word, scope);
    if (!right) wrong_epoch(word, scope, epoch, got.epoch);
  }
}

void checked_poll(const void* p, void* pair, uint32_t wanted, bool is_flag) {
  Spot at = spot_of(p, 2);
  checked_peek(*self, p, pair);
  uint32_t seen = ((uint32_t*)pair)[1];
  if (is_flag ? (int)(seen - wanted) >= 0 : seen == wanted) order_poll({at.region, at.word + 1}, seen, is_flag);
}

void checked_peek(const Fiber& f, const void* p, void* pair) {
  Spot at = spot_of(p, 2);
  for (int i = 0; i < 2; ++i) ((uint32_t*)pair)[i] = load_word(f, {at.region, at.word + i}, DEVICE_SCOPE).data;
}

void checked_claim(const void* p, bool mine) { order_claim(spot_of(p, 1), mine); }

void drain() {
  meet([](Wave& w) { arrive_all(w), order_drain(w); });
}

void release() {  // like the instruction: waits for this wave's stores, then writes back all of the L2
  arrive_all(*self->wave);
  flush_lines(own_cache(), true, false);
  order_release();
}

void acquire() {
  flush_lines(own_cache(), false, true);
  order_acquire();
}

}  // namespace host
