// Attention over the selected positions in the absorbed form, split over the context and merged.
//
// attend: a task is SPLIT positions of one row, all heads.
//   in   latent_query [row][head][LATENT] and query [row][head][NOPE + ROPE] (its rotated part) as tagged pairs; the selection
//        of the row after its flag (rows not longer than the selection: simply all positions); cache entries, the newest of
//        them after their flags
//   out  per head the maximum and sum of the softmax over these positions and the sum of p * latent, plain stores + release,
//        flag [row][split]
// merge: a task is one head of one row.
//   in   the row's splits, after all their flags;  out  latent_out [row][head][LATENT] as tagged pairs
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
  static constexpr int WIDTH_K = LATENT + ROPE, MAX_SPLITS = (K + SPLIT - 1) / SPLIT;
  using Tile = AttendTile<F, WIDTH_K, LATENT, SPLIT>;

  PairRows latent_query, query;
  const void* cache;  // [pages][PAGE][WIDTH_K]
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
      acquire_device();
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
        Tile::weighted_sum([&](int head, int channel, f32 v) {
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
  DEVICE bool wait_for_entries(Step& s, RowPart at, u32 tag) const {
    bool ok = true;
    if (thread_id() == 0) {
      if (selected.listed(at.row)) ok = s.wait_flag(selection_flags + at.row, selection_tag);
      if ((at.part + 1) * SPLIT + written.count(at.row) > selected.count(at.row))
        ok = ok && written.wait(s, at.row, tag);
    }
    return s.all_ok(ok);
  }
  DEVICE void load_entries(RowPart at, u32 tag) const {
    constexpr int UNITS = WIDTH_K / Tile::PER_16, TOTAL = SPLIT * UNITS, BATCH = 4;
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
    constexpr int WORDS = WIDTH_K / 2, MOST = (HEADS < 16 ? HEADS : 16) * WORDS,
                  BATCH = MOST <= THREADS      ? 1
                          : MOST / THREADS < 8 ? MOST / THREADS
                                               : 8;
    int me = thread_id(), total = heads_of(group) * WORDS;
    bool ok = true;
    for (int from = 0; from < total; from += THREADS * BATCH) {
      auto word = [&](int b) { return from + b * THREADS + me; };
      auto at = [&](int i) {
        int w = word(i / 2) < total ? word(i / 2) : 0, head = group + w / WORDS, k = w % WORDS * 2 + i % 2;
        return k < LATENT ? latent_query.at(row, head * LATENT + k)
                          : query.at(row, head * (NOPE + ROPE) + NOPE + k - LATENT);
      };
      Pair got[2 * BATCH];
      ok = ok && s.collect(query.tag, at, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int w = word(b);
        if (w < total)
          put_activations<F>(w / WORDS * Tile::STRIDE16 * 4 + w % WORDS * F::ACT_BYTES / 2,
                             {value_of(got[2 * b]), value_of(got[2 * b + 1])});
      }
    }
    return s.all_ok(ok);
  }
  DEVICE static int heads_of(int group) { return HEADS - group < 16 ? HEADS - group : 16; }
};

template <int HEADS, int LATENT, int MAX_SPLITS>
DEVICE bool merge(Step& s, u32 stage, u32 tag, const Selected& selected, const Partials& from, Pair* latent_out) {
  constexpr int PIECE = LATENT < THREADS ? LATENT : THREADS, PER_HEAD = LATENT / PIECE, BATCH = 8;
  static_assert(LATENT % PIECE == 0 && MAX_SPLITS <= LDS_WORDS / 2, "");
  int tasks = s.rows * HEADS * PER_HEAD, me = thread_id();
  for (int task = s.first_task(); task < tasks; task += n_blocks()) {
    s.begin(stage, task, tag);
    int row = task / PER_HEAD / HEADS, head = task / PER_HEAD % HEADS, splits = selected.splits(row);
    if (!s.wait_flags(splits, tag, [&](int split) { return from.flags + row * MAX_SPLITS + split; })) return false;
    s.input_is_there();
    acquire_device();
    u64 first = ((u64)row * MAX_SPLITS) * HEADS + head;  // this head's entry of the first split
    for (int split = me; split < splits; split += THREADS) {
      set_lds_value(2 * split, load_plain(from.stat + (first + (u64)split * HEADS) * 2, tag));
      set_lds_value(2 * split + 1, load_plain(from.stat + (first + (u64)split * HEADS) * 2 + 1, tag));
    }
    block_barrier();
    f32 most = lds_value(0), sum = 0, out = 0;
    for (int split = 1; split < splits; ++split) most = larger(most, lds_value(2 * split));
    int c = task % PER_HEAD * PIECE + (me < PIECE ? me : 0);
    for (int begin = 0; begin < splits; begin += BATCH) {
      f32 v[BATCH];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int split = begin + b < splits ? begin + b : splits - 1;
        v[b] = load_plain(from.out + (first + (u64)split * HEADS) * LATENT + c, tag);
      }
      UNROLL for (int b = 0; b < BATCH; ++b) {
        if (begin + b >= splits) break;
        f32 weight = exp_exact(lds_value(2 * (begin + b)) - most);
        sum += weight * lds_value(2 * (begin + b) + 1), out += weight * v[b];
      }
    }
    if (me < PIECE) put(latent_out + ((u64)row * HEADS + head) * LATENT + c, out / sum, tag);
    s.end();
    block_barrier();  // before LDS is written again
  }
  s.finish(tasks);
  return true;
}
