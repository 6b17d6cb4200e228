// Shared memory without the memory model: where addresses lie, and what can be said of wrong ones.
#include <stdio.h>

#include "order.h"

namespace host {

char *window, *data;
uint64_t window_bytes, unchecked_bytes;

// The last region that begins at or before the offset; null if there is none.
static Region* region_before(uint64_t offset) {
  Region* regions = launch.arena->regions;
  uint64_t low = 0, high = launch.arena->count;
  while (low < high) {
    uint64_t middle = (low + high) / 2;
    if (regions[middle].offset <= offset)
      low = middle + 1;
    else
      high = middle;
  }
  return low ? &regions[low - 1] : nullptr;
}

Region* find_region(uint64_t offset) {
  static Region* last;
  Region *begin = launch.arena->regions, *end = begin + launch.arena->count;
  if (last >= begin && last < end && offset - last->offset < last->bytes) return last;
  Region* r = region_before(offset);
  return r && offset - r->offset < r->bytes ? last = r : nullptr;
}

void describe_address(const void* p, char* text, size_t size) {
  uint64_t in_window = (const char*)p - window, in_data = (const char*)p - data;
  bool raw = in_window < window_bytes;
  if (!raw && in_data >= window_bytes) {
    snprintf(text, size, "address %p, which is not shared memory", p);
    return;
  }
  uint64_t offset = raw ? in_window : in_data;
  const Region *r = region_before(offset), *end = launch.arena->regions + launch.arena->count;
  const Region* after = r ? r + 1 : launch.arena->regions;
  if (r && offset - r->offset < r->bytes) {
    snprintf(text, size, "byte %llu of %s", (unsigned long long)(offset - r->offset), r->name);
  } else if (after < end && after->offset - offset <= 4096 &&
             (!r || after->offset - offset < offset - r->offset - r->bytes)) {
    snprintf(text, size, "memory %llu bytes before the beginning of %s", (unsigned long long)(after->offset - offset),
             after->name);
  } else if (r) {
    uint64_t past = offset - r->offset - r->bytes;
    snprintf(text, size, "memory %llu bytes past the end of %s, which has %llu bytes", (unsigned long long)past,
             r->name, (unsigned long long)r->bytes);
  } else {
    snprintf(text, size, "shared address %p, where nothing is", p);
  }
}

void bad_access(const void* p) {
  char where[300];
  describe_address(p, where, sizeof where);
  report("%s stage %s task %u loads or stores %s", block_name(self->wave->block->index), stage_name(self->place.stage),
         self->place.task, where);
  give_up();
}

void peek(const Fiber& f, const void* p, void* pair) {
  if (checking)
    checked_peek(f, p, pair);
  else
    memcpy(pair, data_of(p), 8);
}

bool claim(uint32_t* p) {
  if ((uint64_t)((const char*)p - window) >= window_bytes) bad_access(p);
  uint32_t* word = (uint32_t*)data_of(p);
  bool mine = *word == 0;
  if (checking) checked_claim(p, mine);
  if (mine) *word = 1, notice(p), changes += checking;
  return mine;
}

}  // namespace host
