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
  static constexpr int WIDTH_K = LATENT + ROPE, PER_16 = 16 / F::ACT_BYTES, STRIDE16 = WIDTH_K / PER_16 + 1;
  static constexpr int MAX_SPLITS = (K + SPLIT - 1) / SPLIT, HEAD_BYTES = (NOPE + ROPE) * 4;
  static constexpr int TILES = SPLIT / 16, K_PARTS = WAVES / TILES, K_STEPS = WIDTH_K / F::COLUMNS;
  static_assert(WIDTH_K % F::COLUMNS == 0 && LATENT % 16 == 0, "");
  // LDS: queries [16 heads][STRIDE16], later probabilities; entries [SPLIT][STRIDE16]; scores [K_PARTS][16 heads][SPLIT]
  static constexpr int ENTRIES16 = 16 * STRIDE16, SCORES = (16 + SPLIT) * STRIDE16 * 4, P_STRIDE16 = SPLIT / PER_16 + 1;
  static constexpr int P_LOW16 = 16 * P_STRIDE16;
  static_assert(SCORES + K_PARTS * 16 * SPLIT <= LDS_WORDS, "attention does not fit in LDS");
  static_assert((F::ACT_BYTES == 2 ? 2 : 1) * P_LOW16 <= ENTRIES16, "probabilities would lie over the entries");

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
        scores(group);
        block_barrier();
        probabilities(at, group, tag);
        block_barrier();
        weighted_sum(at, group, tag);
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
    constexpr int UNITS = WIDTH_K / PER_16, TOTAL = SPLIT * UNITS, BATCH = 4;
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
        UNROLL for (int w = 0; w < 4; ++w) lds[(ENTRIES16 + i / UNITS * STRIDE16 + i % UNITS) * 4 + w] = v[b].w[w];
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
          put_activations<F>(w / WORDS * STRIDE16 * 4 + w % WORDS * F::ACT_BYTES / 2,
                             {value_of(got[2 * b]), value_of(got[2 * b + 1])});
      }
    }
    return s.all_ok(ok);
  }
  DEVICE static int heads_of(int group) { return HEADS - group < 16 ? HEADS - group : 16; }
  // Entries are the A operand (16 a tile), heads the free axis; waves split tiles, then K.
  DEVICE void scores(int group) const {
    int tile = wave_id() % TILES, part = wave_id() / TILES;
    int last = heads_of(group) - 1;  // stands for those that are not there
    Columns heads([last](int head) { return (head < last ? head : last) * STRIDE16; });
    Columns rows([tile](int entry) { return ENTRIES16 + (tile * 16 + entry) * STRIDE16; });
    Acc acc = {};
    for (int step = part; step < K_STEPS; step += K_PARTS)
      F::multiply({act_frag(rows, step * F::COLUMNS / PER_16 + frag_chunk())}, {}, heads, step * F::COLUMNS, acc);
    UNROLL for (int i = 0; i < ACCS; ++i) {
      set_lds_value(SCORES + (part * 16 + acc_col(i)) * SPLIT + tile * 16 + acc_row(i), acc.v[i]);
    }
  }
  DEVICE f32 score(int head, int entry) const {
    f32 sum = 0;
    UNROLL for (int part = 0; part < K_PARTS; ++part) sum += lds_value(SCORES + (part * 16 + head) * SPLIT + entry);
    return sum * SOFTMAX_SCALE;
  }
  // Softmax numerators of 16 heads x SPLIT entries, two neighbouring entries a thread, to where the queries were.
  DEVICE void probabilities(RowPart at, int group, u32 tag) const {
    static_assert(16 * SPLIT / 2 == THREADS, "");
    int me = thread_id(), head = me / (SPLIT / 2), pair = me % (SPLIT / 2), count = entries(at);
    f32 most = score(head, 0);
    for (int e = 1; e < count; ++e) {
      f32 x = score(head, e);
      most = x > most ? x : most;
    }
    f32 p[2];
    for (int j = 0; j < 2; ++j) p[j] = 2 * pair + j < count ? exp_exact(score(head, 2 * pair + j) - most) : 0.f;
    int word = head * P_STRIDE16 * 4 + pair * F::ACT_BYTES / 2;
    if constexpr (F::ACT_BYTES == 4) {
      set_lds_value(word, p[0]), set_lds_value(word + 1, p[1]);
    } else {  // as the sum of two bf16, 2^-17 exact: one would make the result depend on the split's maximum
      u32 high = pack_bf16(p[0], p[1]);
      lds[word] = high;
      lds[word + P_LOW16 * 4] = pack_bf16(p[0] - from_bf16(high & 0xffff), p[1] - from_bf16(high >> 16));
    }
    if (pair == 0 && group + head < HEADS) {
      f32 sum = 0;
      for (int e = 0; e < count; ++e) sum += exp_exact(score(head, e) - most);
      f32* stat = partials.stat + (((u64)at.row * MAX_SPLITS + at.part) * HEADS + group + head) * 2;
      store_plain(stat, most, tag), store_plain(stat + 1, sum, tag);
    }
  }
  // 16 channels of the latent a tile, entries transposed on the way out of LDS.
  DEVICE void weighted_sum(RowPart at, int group, u32 tag) const {
    constexpr int STEPS = SPLIT / F::COLUMNS, PER_CHUNK = F::COLUMNS / 4;
    Columns high([](int head) { return head * P_STRIDE16; }), low([](int head) { return P_LOW16 + head * P_STRIDE16; });
    for (int tile = wave_id(); tile < LATENT / 16; tile += WAVES) {
      Acc acc = {};
      UNROLL for (int step = 0; step < STEPS; ++step) {
        Frag values;
        UNROLL for (int p = 0; p < PIECES; ++p) {
          UNROLL for (int i = 0; i < 4; ++i) {
            int entry = step * F::COLUMNS + frag_chunk() * PER_CHUNK + i * PER_CHUNK / 4;
            values.w[p][i] = channel(entry, tile * 16 + frag_row(p));
          }
        }
        F::multiply({values}, {}, high, step * F::COLUMNS, acc);
        if constexpr (F::ACT_BYTES == 2) F::multiply({values}, {}, low, step * F::COLUMNS, acc);
      }
      UNROLL for (int i = 0; i < ACCS; ++i) {
        u64 head = group + acc_col(i), split = (u64)at.row * MAX_SPLITS + at.part;
        if (head < HEADS)
          store_plain(partials.out + (split * HEADS + head) * LATENT + tile * 16 + acc_row(i), acc.v[i], tag);
      }
    }
  }
  // A word of the A operand: channel c of entry e (and of the next, where two share a word).
  DEVICE u32 channel(int e, int c) const {
    int word = (ENTRIES16 + e * STRIDE16) * 4;
    if constexpr (F::ACT_BYTES == 4) return lds[word + c];
    u32 low = lds[word + c / 2], high = lds[word + STRIDE16 * 4 + c / 2];
    return c % 2 ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
  }
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
