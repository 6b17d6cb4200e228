// The indexer's scores of one row's cached keys, PAGE keys a task; a key stands for `ratio` positions:
//   score[j] = sum over heads h of weight[h] * relu(query[h] . key[j] * DIM^-0.5)
// Only for rows that have more keys than a selection: the others attend to everything.
//   in   query [row][HEADS][DIM] as tagged words and weights [row][HEADS] as tagged f32; keys from the cache, the newest after
//        their flags
//   out  scores [row][key] f32, written through; flag [row][task]
// Keys are the A operand, read from the cache as they lie, heads the free axis. Heads are added in order, so that the score
// of a position is the same wherever it is computed.
#pragma once
#include "stages/cache_entry.h"
#include "stages/row_parts.h"

template <class F, int HEADS, int DIM> struct IndexScores {
  static_assert(HEADS % 16 == 0 && DIM % F::COLUMNS == 0, "");
  static constexpr int PER_16 = 16 / F::ACT_BYTES, STRIDE16 = DIM / PER_16 + 1, STEPS = DIM / F::COLUMNS;
  static constexpr int DOTS = HEADS * STRIDE16 * 4;  // words: [key][head] products; behind them the head weights
  static constexpr int WEIGHTS = DOTS + PAGE * HEADS;
  static_assert(WEIGHTS + HEADS <= USED_WORDS, "");

  PairRows query, weights;  // rows of the step
  const void* cache;        // [pages][PAGE / ratio][DIM]: a key lies in the page of its last position
  Pages pages;
  const u32* positions;
  Written written;
  f32* scores;  // [rows][stride]
  u64 stride;
  Pair* flags;      // [rows][max_pages]
  u32 longer_than;  // rows with more keys than this have scores
  u32 ratio = 1;    // at most PAGE / 16: 16 neighbouring keys lie in one page
  u32 key_tag = 0;  // of the layer that made the newest key; 0: this one

  DEVICE u32 made(int row) const { return (load_constant(positions + row) + 1) / ratio; }
  DEVICE int parts(int row) const {
    u32 n = made(row);
    return n > longer_than ? (n + PAGE - 1) / PAGE : 0;
  }

  DEVICE bool run(Step& s, u32 stage, u32 tag) const {
    auto parts_of = [this](int row) { return parts(row); };
    int tasks = count_parts(s.rows, parts_of);
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      RowPart at = find_part(task, s.rows, parts_of);
      u32 n = made(at.row);
      u32 of_keys = key_tag ? key_tag : tag;
      if (!gather(s, at.row, (u32)(at.part + 1) * PAGE * ratio > written.first_of(at.row), of_keys)) return false;
      s.input_is_there();
      acquire_device();
      for (int group = wave_id(); group < PAGE / 16; group += WAVES) dot_products(at, group, n, of_keys);
      block_barrier();
      for (int key = thread_id(); key < PAGE; key += THREADS) {
        u32 j = at.part * PAGE + key;
        if (j >= n) continue;
        f32 score = 0;
        for (int h = 0; h < HEADS; ++h) {
          f32 dot = lds_value(DOTS + key * HEADS + h) * INDEX_SCALE;
          score += (dot > 0 ? dot : 0.f) * lds_value(WEIGHTS + h);
        }
        store_device(scores + at.row * stride + j, score, tag);
      }
      s.announce(flags + at.row * pages.max_pages + at.part, tag, Stored::THROUGH);
    }
    s.finish(tasks);
    return true;
  }

 private:
  DEVICE bool gather(Step& s, int row, bool newest, u32 tag) const {
    constexpr int PER_HEAD = DIM * F::ACT_BYTES / 8, TOTAL = HEADS * PER_HEAD, BATCH = 4;
    bool ok = true;
    int me = thread_id();
    block_barrier();  // everybody is done with what was in LDS
    for (int from = 0; from < TOTAL; from += THREADS * BATCH) {
      const Pair* at[BATCH];
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * THREADS + me;
        at[b] = i < TOTAL ? query.at(row, i * 2) : nullptr;
      }
      Pair got[BATCH][2];
      ok = ok && s.collect_twos(query.tag, at, got);
      UNROLL for (int b = 0; b < BATCH; ++b) {
        int i = from + b * THREADS + me, word = i / PER_HEAD * STRIDE16 * 4 + i % PER_HEAD * 2;
        if (i >= TOTAL) continue;
        lds[word] = got[b][0].payload, lds[word + 1] = got[b][1].payload;
      }
    }
    if (me < HEADS) {
      Pair w[1];
      ok = ok && weights.take(s, row, [&](int) { return me; }, w);
      set_lds_value(WEIGHTS + me, value_of(w[0]));
    }
    if (newest && me == 0) ok = ok && written.wait(s, row, tag);
    return s.all_ok(ok);
  }
  DEVICE void dot_products(RowPart at, int group, u32 n, u32 tag) const {
    u32 begin = at.part * PAGE + group * 16, first = written.first_of(at.row);
    if (begin >= n) return;
    u64 slot = pages.slot(at.row, begin * ratio) / ratio;
    Frag keys[STEPS];
    UNROLL for (int step = 0; step < STEPS; ++step) UNROLL for (int p = 0; p < PIECES; ++p) {
      // What lies behind the row's last key is another row's, and nobody has waited for it: the last key stands for it.
      u32 key = begin + frag_row(p) < n ? begin + frag_row(p) : n - 1;
      u64 byte = ((slot + key - begin) * DIM + step * F::COLUMNS) * F::ACT_BYTES + frag_chunk() * 16;
      Vec4 w = load_plain((const Vec4*)((const u8*)cache + byte), (key + 1) * ratio > first ? tag : ANY_EPOCH);
      UNROLL for (int i = 0; i < 4; ++i) keys[step].w[p][i] = w.w[i];
    }
    for (int heads = 0; heads < HEADS; heads += 16) {
      Acc acc = {};
      Columns x([&](int head) { return (heads + head) * STRIDE16; });
      UNROLL for (int step = 0; step < STEPS; ++step) F::multiply({keys[step]}, {}, x, step * F::COLUMNS / PER_16, acc);
      UNROLL for (int i = 0; i < ACCS; ++i)
          set_lds_value(DOTS + (group * 16 + acc_row(i)) * HEADS + heads + acc_col(i), acc.v[i]);
    }
  }
};
