// Attention over a window and compressed entries, each of which is key and value at once, with a sink for each head.
//
// attend: a task is up to SPLIT entries of one row for up to 16 heads: first the window's, in the order of positions, then the
// compressed ones, all of them or those of a selection. (All heads by one block would read the entries once, and take as many
// times as long: with 1,024 tokens, 20 of a GPU's blocks would be at work.)
//   in   query [row][head][D] as tagged pairs, rotated, and unless they are normalized already their sums of squares; the
//        window's ring and the pages of entries, the step's own after their flags; the selection after its flag
//   out  per head the maximum and sum of the softmax over these entries and the sum of p * entry, plain stores + release,
//        flag [row][split][group of heads]
// merge: a task is one head of one row.
//   in   the row's splits, after the flags of the head's group;  out  out [row][head][D] as tagged words, the last channels turned back
// The sink is one more score in the softmax, without a value. Splits are fixed, and merged in order.
#pragma once
#include "stages/attend_tile.h"
#include "stages/cache_entry.h"
#include "stages/row_parts.h"

// A row's entries.
struct SinkEntries {
  static constexpr int SPLIT = 32;

  const u32 *positions, *slots;  // [rows]: of the token; of the request's state
  const void* ring;              // [slots][window][D]
  u32 window;
  const void* entries;  // [pages][places][D]; null: the window alone
  Pages pages;
  u32 ratio;             // tokens of an entry
  const u32* selection;  // [rows][k] numbers of entries, ascending, of rows that have more than k; null: all of them
  u32 k;

  DEVICE u32 in_window(int row) const {
    u32 n = load_constant(positions + row) + 1;
    return n < window ? n : window;
  }
  DEVICE u32 made(int row) const { return entries ? (load_constant(positions + row) + 1) / ratio : 0; }
  DEVICE bool listed(int row) const { return selection && made(row) > k; }
  DEVICE u32 compressed(int row) const { return listed(row) ? k : made(row); }
  DEVICE int window_splits(int row) const { return (in_window(row) + SPLIT - 1) / SPLIT; }
  DEVICE int splits(int row) const { return window_splits(row) + (compressed(row) + SPLIT - 1) / SPLIT; }
  DEVICE bool finishes_one(int row) const { return entries && (load_constant(positions + row) + 1) % ratio == 0; }

  // Where entry `at` of a split lies, in units of entries of its memory; whether it is the step's own.
  DEVICE u64 place(RowPart part, u32 at, u32 selection_tag, bool& own) const {
    u32 position = load_constant(positions + part.row);
    int before = window_splits(part.row);
    if (part.part < before) {
      u32 token = position + 1 - in_window(part.row) + part.part * SPLIT + at;
      own = token == position;
      return (u64)load_constant(slots + part.row) * window + token % window;
    }
    u32 entry = (part.part - before) * SPLIT + at;
    if (listed(part.row)) entry = load_plain(selection + part.row * k + entry, selection_tag);
    own = finishes_one(part.row) && entry == made(part.row) - 1;
    u32 last = ratio * (entry + 1) - 1, places = ratio < PAGE ? PAGE / ratio : 1;
    return (u64)load_constant(pages.table + part.row * pages.max_pages + last / PAGE) * places + entry % places;
  }
  DEVICE int count(RowPart part) const {
    int before = window_splits(part.row);
    bool of_window = part.part < before;
    int all = of_window ? in_window(part.row) : compressed(part.row);
    int left = all - (part.part - (of_window ? 0 : before)) * SPLIT;
    return left < SPLIT ? left : SPLIT;
  }
};

// Flags [rows] of tasks that nobody else may wait for; a task that nobody waits for could be overtaken. Null: none.
struct Held {
  const Pair* flags;
  u32 tag;
};
SHARED(f32, head_scale, 16);  // of the queries of a group of heads

template <class F, int HEADS, int D, int ROPE> struct SinkAttend {
  static constexpr int SPLIT = SinkEntries::SPLIT, HELD = 3, GROUPS_OF_HEADS = (HEADS + 15) / 16;
  using Tile = AttendTile<F, D, D, SPLIT>;

  PairRows query, squares;  // squares: [row][head][D / 16] sums, or without base
  f32 eps;                  // of the norm
  SinkEntries from;
  const Pair *window_flags, *entry_flags, *selection_flags;  // [rows]
  u32 entry_tag, selection_tag;                              // of the layer whose entries and whose selection these are
  Held held[HELD];
  f32 scale;
  f32 *out, *stat;  // [rows][max_splits][HEADS][D], [rows][max_splits][HEADS][2] maximum, sum
  Pair* flags;      // [rows][max_splits][GROUPS_OF_HEADS]
  int max_splits;

  DEVICE bool attend(Step& s, u32 stage, u32 tag) const {
    auto splits = [this](int row) { return from.splits(row); };
    int tasks = count_parts(s.rows, splits) * GROUPS_OF_HEADS;
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      RowPart at = find_part(task / GROUPS_OF_HEADS, s.rows, splits);
      int group = task % GROUPS_OF_HEADS * 16, heads = HEADS - group < 16 ? HEADS - group : 16;
      if (!wait_for_entries(s, at, tag)) return false;
      acquire_device();
      load_entries(at, tag);
      u64 split = (u64)at.row * max_splits + at.part, first = split * HEADS + group;
      if (!load_queries(s, at.row, group, heads)) return false;  // ends with a barrier: entries are there too
      s.input_is_there();
      Tile::scores(heads);
      block_barrier();
      Tile::probabilities(from.count(at), scale, [&](int head, f32 most, f32 sum) {
        if (head >= heads) return;
        store_plain(stat + (first + head) * 2, most, tag);
        store_plain(stat + (first + head) * 2 + 1, sum, tag);
      });
      block_barrier();
      Tile::weighted_sum(heads, [&](int head, int channel, f32 v) {
        if (head < heads) store_plain(out + (first + head) * D + channel, v, tag);
      });
      s.announce(flags + split * GROUPS_OF_HEADS + group / 16, tag, Stored::PLAIN);
    }
    s.finish(tasks);
    return true;
  }

  // sinks: [HEADS]; rope: of the layer's angles; To: the activations that are published. Two channels a thread.
  template <class To>
  DEVICE bool merge(Step& s, u32 stage, u32 tag, const f32* sinks, const f32* rope, Pair* merged) const {
    static_assert(D / 2 <= THREADS && D % 2 == 0, "");
    int tasks = s.rows * HEADS, c = 2 * (thread_id() < D / 2 ? thread_id() : 0);
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      int row = task / HEADS, head = task % HEADS, splits = from.splits(row);
      auto flag = [&](int split) { return flags + (row * max_splits + split) * GROUPS_OF_HEADS + head / 16; };
      if (!s.wait_flags(splits, tag, flag)) return false;
      s.input_is_there();
      acquire_device();
      auto at = [&](int split) { return ((u64)row * max_splits + split) * HEADS + head; };
      f32 most = load_constant(sinks + head), sum = 0, v[2] = {};
      for (int split = 0; split < splits; ++split) most = larger(most, load_plain(stat + at(split) * 2, tag));
      for (int split = 0; split < splits; ++split) {
        f32 weight = exp_exact(load_plain(stat + at(split) * 2, tag) - most);
        sum += weight * load_plain(stat + at(split) * 2 + 1, tag);
        u64 both = load_plain((const u64*)(out + at(split) * D + c), tag);
        v[0] += weight * bits<f32>((u32)both), v[1] += weight * bits<f32>((u32)(both >> 32));
      }
      sum += exp_exact(load_constant(sinks + head) - most);
      v[0] /= sum, v[1] /= sum;
      if (c >= D - ROPE) turn_back(rope, load_constant(from.positions + row), c - (D - ROPE), v);
      if (thread_id() < D / 2) put_words<To>(merged + ((u64)row * HEADS + head) * (D * To::ACT_BYTES / 4), c, v, tag);
      s.end();
    }
    s.finish(tasks);
    return true;
  }

 private:
  DEVICE static void turn_back(const f32* table, u32 position, int channel, f32 (&v)[2]) {
    f32 swapped[2] = {v[1], v[0]};  // turning the mirrored pair forward is turning the pair back
    rotate<ROPE>(table, position, channel, swapped);
    v[0] = swapped[1], v[1] = swapped[0];
  }
  // The step's own entries are the last of the window and, of a row that finishes one, the newest compressed one.
  DEVICE bool wait_for_entries(Step& s, RowPart at, u32 tag) const {
    bool ok = true;
    if (thread_id() == 0) {
      int before = from.window_splits(at.row);
      if (at.part == before - 1) {
        ok = s.wait_flag(window_flags + at.row, tag);
        UNROLL for (int i = 0; i < HELD; ++i) if (held[i].flags) ok =
            ok && s.wait_flag(held[i].flags + at.row, held[i].tag);
      }
      if (at.part >= before && from.listed(at.row)) ok = ok && s.wait_flag(selection_flags + at.row, selection_tag);
      if (at.part >= before && from.finishes_one(at.row)) ok = ok && s.wait_flag(entry_flags + at.row, entry_tag);
    }
    return s.all_ok(ok);
  }
  DEVICE void load_entries(RowPart at, u32 tag) const {
    constexpr int UNITS = D / Tile::PER_16, TOTAL = SPLIT * UNITS, BATCH = 4;
    bool of_window = at.part < from.window_splits(at.row);
    const u8* memory = (const u8*)(of_window ? from.ring : from.entries);
    int count = from.count(at), me = thread_id();
    for (int first = 0; first < TOTAL; first += THREADS * BATCH) {
      Vec4 v[BATCH];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = first + b * THREADS + me, entry = i / UNITS;
        v[b] = {};
        if (i >= TOTAL || entry >= count) continue;
        bool own;
        u64 byte = from.place(at, entry, selection_tag, own) * D * F::ACT_BYTES + i % UNITS * 16;
        v[b] = load_plain((const Vec4*)(memory + byte), !own ? ANY_EPOCH : of_window ? tag : entry_tag);
      }
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = first + b * THREADS + me;
        if (i >= TOTAL) continue;
        UNROLL for (int w = 0; w < 4; ++w) lds[(Tile::ENTRIES16 + i / UNITS * Tile::STRIDE16 + i % UNITS) * 4 + w] =
            v[b].w[w];
      }
    }
  }
  // 1 / rms of each head's query, by 16 threads a head.
  DEVICE bool scale_heads(Step& s, int row, int group, int heads) const {
    constexpr int PARTS = D / 16, MINE = (PARTS + 15) / 16;
    bool ok = true;
    UNROLL for (int first = 0; first < 16; first += THREADS / 16) {
      int head = first + thread_id() / 16, lane = thread_id() % 16;
      auto part = [&](int i) { return i * 16 + lane < PARTS ? i * 16 + lane : 0; };
      Pair got[MINE];
      int of = head < heads ? group + head : group;
      ok = squares.take(s, row, [&](int i) { return of * PARTS + part(i); }, got) && ok;
      f32 sum = 0;
      UNROLL for (int i = 0; i < MINE; ++i) sum += i * 16 + lane < PARTS ? value_of(got[i]) : 0.f;
      UNROLL for (int o = 1; o < 16; o *= 2) sum += bits<f32>(wave_read(bits<u32>(sum), lane_id() ^ o));
      if (lane == 0) head_scale[head] = 1.f / __builtin_sqrtf(sum / (f32)D + eps);
    }
    return s.all_ok(ok);
  }
  DEVICE bool load_queries(Step& s, int row, int group, int heads) const {
    constexpr int WORDS = D / 2, BATCH = 4;
    int me = thread_id(), total = heads * WORDS;
    bool ok = !squares.base || scale_heads(s, row, group, heads);
    for (int first = 0; first < total; first += THREADS * BATCH) {
      auto word = [&](int b) { return first + b * THREADS + me < total ? first + b * THREADS + me : 0; };
      Pair got[2 * BATCH];
      ok = query.take(s, row, [&](int i) { return group * D + 2 * word(i / 2) + i % 2; }, got) && ok;
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int w = first + b * THREADS + me;
        f32 factor = squares.base ? head_scale[w < total ? w / WORDS : 0] : 1.f;
        if (w < total)
          put_activations<F>(w / WORDS * Tile::STRIDE16 * 4 + w % WORDS * F::ACT_BYTES / 2,
                             {value_of(got[2 * b]) * factor, value_of(got[2 * b + 1]) * factor});
      }
    }
    return s.all_ok(ok);
  }
};
