// Attention over the selected positions in the absorbed form, split over the context and merged.
//
// attend: a task is SPLIT positions of one row, all heads.
//   in   latent_query [row][head][LATENT] and query [row][head][NOPE + ROPE] (its rotated part) as tagged words; the selection
//        of the row after its flag (rows not longer than the selection: simply all positions); cache entries, the newest of
//        them after their flags
//   out  per head the maximum and sum of the softmax over these positions and the sum of p * latent, plain stores + release,
//        flag [row][split]
// merge: a task is MERGE_PIECE channels of one head of one row.
//   in   the row's splits, after all their flags;  out  latent_out [row][head][LATENT] as tagged words
// Splits have a fixed number of positions and are merged in order, so nothing depends on who computes them.
#pragma once
#include "stages/attend_tile.h"
#include "stages/cache_entry.h"
#include "stages/row_parts.h"

constexpr int SPLIT = 32;

// Split results, [rows][splits][heads]...; one slot: the next layer's are written after its input is whole, which needs this
// layer's output, hence the end of every merge.
struct Partials {
  f32* out;     // [rows][splits][heads][LATENT]
  f32* stat;    // [rows][splits][heads][2] maximum, sum
  Pair* flags;  // [rows][splits]
};

// What a row attends to: the first `count` entries of `list`, or positions 0 ... count - 1 where it is null.
struct Selected {
  const u32* positions;
  const u32* selection;  // [rows][K]
  u32 k;

  DEVICE u32 count(int row) const {
    u32 n = load_constant(positions + row) + 1;
    return n < k ? n : k;
  }
  DEVICE bool listed(int row) const { return load_constant(positions + row) + 1 > k; }
  DEVICE int splits(int row) const { return (count(row) + SPLIT - 1) / SPLIT; }
};

template <class F, int HEADS, int NOPE, int ROPE, int LATENT, int K> struct Attend {
  static constexpr int WIDTH_K = LATENT + ROPE, MAX_SPLITS = (K + SPLIT - 1) / SPLIT,
                       WORDS_K = WIDTH_K * F::ACT_BYTES / 4;
  using Tile = AttendTile<F, WIDTH_K, LATENT, SPLIT>;

  PairRows latent_query, query;  // words
  const void* cache;             // [pages][PAGE][WIDTH_K]
  Pages pages;
  Selected selected;
  Written written;
  const Pair* selection_flags;  // [rows]
  u32 selection_tag;            // of the layer whose selection this is
  Partials partials;

  DEVICE bool run(Step& s, u32 stage, u32 tag) const {
    auto splits = [this](int row) { return selected.splits(row); };
    int tasks = count_parts(s.rows, splits);
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      RowPart at = find_part(task, s.rows, splits);
      if (!wait_for_entries(s, at, tag)) return false;
      if (written_now(at)) acquire_device();
      load_entries(at, tag);
      for (int group = 0; group < HEADS; group += 16) {
        if (!load_queries(s, at.row, group)) return false;  // ends with a barrier: entries are there too
        s.input_is_there();
        u64 first = ((u64)at.row * MAX_SPLITS + at.part) * HEADS + group;
        Tile::scores(heads_of(group));
        block_barrier();
        Tile::probabilities(entries(at), SOFTMAX_SCALE, [&](int head, f32 most, f32 sum) {
          if (head >= heads_of(group)) return;
          store_plain(partials.stat + (first + head) * 2, most, tag);
          store_plain(partials.stat + (first + head) * 2 + 1, sum, tag);
        });
        block_barrier();
        Tile::weighted_sum(heads_of(group), [&](int head, int channel, f32 v) {
          if (head < heads_of(group)) store_plain(partials.out + (first + head) * LATENT + channel, v, tag);
        });
        block_barrier();
      }
      s.announce(partials.flags + at.row * MAX_SPLITS + at.part, tag, Stored::PLAIN);
    }
    s.finish(tasks);
    return true;
  }

 private:
  DEVICE int entries(RowPart at) const {
    int left = (int)selected.count(at.row) - at.part * SPLIT;
    return left < SPLIT ? left : SPLIT;
  }
  // What the step writes are the last positions, so only the last splits can have them.
  DEVICE bool has_new_entries(RowPart at) const {
    return (at.part + 1) * SPLIT + written.count(at.row) > selected.count(at.row);
  }
  // Whether something that this launch has written is read: a selection, or new entries.
  DEVICE bool written_now(RowPart at) const { return selected.listed(at.row) || has_new_entries(at); }
  DEVICE bool wait_for_entries(Step& s, RowPart at, u32 tag) const {
    bool ok = true;
    if (thread_id() == 0) {
      if (selected.listed(at.row)) ok = s.wait_flag(selection_flags + at.row, selection_tag);
      if (has_new_entries(at)) ok = ok && written.wait(s, at.row, tag);
    }
    return s.all_ok(ok);
  }
  DEVICE void load_entries(RowPart at, u32 tag) const {
    constexpr int UNITS = WIDTH_K / Tile::PER_16, TOTAL = SPLIT * UNITS, BATCH = 5;
    int count = entries(at), me = thread_id();
    u32 first = written.first_of(at.row);
    for (int from = 0; from < TOTAL; from += THREADS * BATCH) {
      Vec4 v[BATCH];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * THREADS + me, entry = i / UNITS;
        v[b] = {};
        if (i >= TOTAL || entry >= count) continue;
        u32 j = at.part * SPLIT + entry;
        if (selected.listed(at.row)) j = load_plain(selected.selection + at.row * K + j, selection_tag);
        u64 byte = pages.slot(at.row, j) * WIDTH_K * F::ACT_BYTES + i % UNITS * 16;
        v[b] = load_plain((const Vec4*)((const u8*)cache + byte), j >= first ? tag : ANY_EPOCH);
      }
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * THREADS + me;
        if (i >= TOTAL) continue;
        UNROLL for (int w = 0; w < 4; ++w) lds[(Tile::ENTRIES16 + i / UNITS * Tile::STRIDE16 + i % UNITS) * 4 + w] =
            v[b].w[w];
      }
    }
  }
  // Up to 16 heads: [latent part | rotated part].
  DEVICE bool load_queries(Step& s, int row, int group) const {
    constexpr int PER_HEAD = WORDS_K / 2, LATENT_WORDS = LATENT * F::ACT_BYTES / 4, ROTATED = NOPE * F::ACT_BYTES / 4,
                  HEAD_WORDS = (NOPE + ROPE) * F::ACT_BYTES / 4, BATCH = 5;
    int me = thread_id(), total = heads_of(group) * PER_HEAD;
    bool ok = true;
    for (int from = 0; from < total; from += THREADS * BATCH) {
      const Pair* at[BATCH];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * THREADS + me, head = group + i / PER_HEAD, word = i % PER_HEAD * 2;
        at[b] = word < LATENT_WORDS ? latent_query.at(row, head * LATENT_WORDS + word)
                                    : query.at(row, head * HEAD_WORDS + ROTATED + word - LATENT_WORDS);
        if (i >= total) at[b] = nullptr;
      }
      Pair got[BATCH][2];
      ok = ok && s.collect_twos(query.tag, at, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * THREADS + me, word = i / PER_HEAD * Tile::STRIDE16 * 4 + i % PER_HEAD * 2;
        if (i >= total) continue;
        lds[word] = got[b][0].payload, lds[word + 1] = got[b][1].payload;
      }
    }
    return s.all_ok(ok);
  }
  DEVICE static int heads_of(int group) { return HEADS - group < 16 ? HEADS - group : 16; }
};

constexpr int MERGE_PIECE = 64;

// Two channels a thread, splits dealt out to GROUPS groups of threads, which are then merged in order.
template <class F, int HEADS, int LATENT, int MAX_SPLITS>
DEVICE bool merge(Step& s, u32 stage, u32 tag, const Selected& selected, const Partials& from, Pair* latent_out) {
  constexpr int PIECE = LATENT % MERGE_PIECE ? 16 : MERGE_PIECE, LANES = PIECE / 2, GROUPS = THREADS / LANES,
                PER_HEAD = LATENT / PIECE, MOST = (MAX_SPLITS + GROUPS - 1) / GROUPS, ENTRY = PIECE + 2;
  static_assert(LATENT % PIECE == 0 && GROUPS * ENTRY <= USED_WORDS, "");
  int tasks = s.rows * HEADS * PER_HEAD, me = thread_id(), group = me / LANES, lane = me % LANES;
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int row = task / PER_HEAD / HEADS, head = task / PER_HEAD % HEADS, splits = selected.splits(row);
    int channel = task % PER_HEAD * PIECE + 2 * lane;
    if (!s.wait_flags(splits, tag, [&](int split) { return from.flags + row * MAX_SPLITS + split; })) return false;
    s.input_is_there();
    acquire_device();
    f32 v[MOST][2], most_of[MOST], sum_of[MOST], most = -__builtin_inff(), sum = 0, out[2] = {};
    UNROLL for (int i = 0; i < MOST; ++i) {
      int split = group + i * GROUPS;
      most_of[i] = -__builtin_inff(), sum_of[i] = v[i][0] = v[i][1] = 0;
      if (split >= splits) continue;
      u64 at = ((u64)row * MAX_SPLITS + split) * HEADS + head;
      most_of[i] = load_plain(from.stat + at * 2, tag), sum_of[i] = load_plain(from.stat + at * 2 + 1, tag);
      UNROLL for (int j = 0; j < 2; ++j) v[i][j] = load_plain(from.out + at * LATENT + channel + j, tag);
    }
    UNROLL for (int i = 0; i < MOST; ++i) most = larger(most, most_of[i]);
    UNROLL for (int i = 0; i < MOST; ++i) {
      if (group + i * GROUPS >= splits) break;
      f32 weight = exp_exact(most_of[i] - most);
      sum += weight * sum_of[i];
      UNROLL for (int j = 0; j < 2; ++j) out[j] += weight * v[i][j];
    }
    int mine = group * ENTRY;
    UNROLL for (int j = 0; j < 2; ++j) set_lds_value(mine + 2 * lane + j, out[j]);
    if (lane == 0) set_lds_value(mine + PIECE, most), set_lds_value(mine + PIECE + 1, sum);
    block_barrier();
    if (group == 0) {
      int groups = splits < GROUPS ? splits : GROUPS;
      for (int g = 1; g < groups; ++g) most = larger(most, lds_value(g * ENTRY + PIECE));
      f32 total = 0, result[2] = {};
      for (int g = 0; g < groups; ++g) {
        f32 weight = exp_exact(lds_value(g * ENTRY + PIECE) - most);
        total += weight * lds_value(g * ENTRY + PIECE + 1);
        UNROLL for (int j = 0; j < 2; ++j) result[j] += weight * lds_value(g * ENTRY + 2 * lane + j);
      }
      f32 normed[2] = {result[0] / total, result[1] / total};
      put_words<F>(latent_out + ((u64)row * HEADS + head) * (LATENT * F::ACT_BYTES / 4), channel, normed, tag);
    }
    s.end();
    block_barrier();  // before LDS is written again
  }
  s.finish(tasks);
  return true;
}
