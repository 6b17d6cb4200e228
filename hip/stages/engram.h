// Engram: rows of large tables that a token's n-grams look up, and what they add to the residual streams.
//
//   look_up   a task is a row.  in tokens;  out [row][COLUMNS * DIM], the rows as tagged words, activations of F
//   (a linear map of them: [row][(STREAMS + 1) * HIDDEN], a key for each stream, then the value)
//   dots      a task is some channels of a row.  in streams, keys;  out per stream: stream^2, key^2 and their product
//   add       a task is some channels of a row.  in those sums, streams, value;  out sink(row, channel, v, there): v[stream][2]
//             with gate * value added; eight threads in a row have 16 channels, and all threads are there
// Rows depend on tokens alone, so look_up and the linear map can run from the step's first moment on.
#pragma once
#include "stages/input.h"

// Which rows: hashes of the n-grams that end with the token, one column for each size (2 ... NGRAM) and head.
template <int NGRAM, int HEADS> struct NgramHash {
  static constexpr int COLUMNS = (NGRAM - 1) * HEADS;

  const u64* multipliers;                 // [NGRAM]
  const u32* heights;                     // [COLUMNS] rows of each column: a prime, below 2^31
  const u32* ids;                         // [vocab] compressed id of a token
  u32 padding;                            // the token that stands for those before the first
  const u32 *tokens, *positions, *slots;  // [rows] of the step: token, position, the request's slot of state
  u32* recent;                            // [slots][NGRAM] a request's last tokens, at position mod NGRAM

  // The row of a column in the whole table.
  DEVICE u64 row_of(int row, int column) const {
    u32 position = load_constant(positions + row);
    u64 hash = 0, first = 0;
    for (int back = 0; back <= column / HEADS + 1; ++back)
      hash ^= (u64)load_constant(ids + token(row, position, back)) * load_constant(multipliers + back);
    for (int before = 0; before < column; ++before) first += load_constant(heights + before);
    return first + hash % load_constant(heights + column);
  }
  DEVICE void remember(int row, u32 tag) const {
    u32* at = recent + load_constant(slots + row) * NGRAM + load_constant(positions + row) % NGRAM;
    store_device(at, load_constant(tokens + row), tag);
  }

 private:
  DEVICE u32 token(int row, u32 position, u32 back) const {
    if (!back) return load_constant(tokens + row);
    if (back > position) return padding;
    return load_plain(recent + load_constant(slots + row) * NGRAM + (position - back) % NGRAM, ANY_EPOCH);
  }
};

SHARED(u32, engram_rows, 2 * 64);  // of the task's columns: low and high word

// Four neighbours of a table's row: e4m3 codes [rows][DIM] with an E8M0 scale for each 32, or where scales is null what Table is
// stored as.
template <class Table, int DIM>
DEVICE void load_four(const void* table, const u8* scales, u64 row, int k, f32 (&v)[4]) {
  u64 at = row * DIM + k;
  if (scales) {
    u32 codes = load_constant((const u32*)table + at / 4);
    f32 scale = e8m0(load_constant(scales + at / 32));
    UNROLL for (int i = 0; i < 4; ++i) v[i] = fp8_ocp(codes >> 8 * i & 255) * scale;
  } else if (Table::ACT_BYTES == 4) {
    UNROLL for (int i = 0; i < 4; ++i) v[i] = load_constant((const f32*)table + at + i);
  } else {
    UNROLL for (int i = 0; i < 4; ++i) v[i] =
        from_bf16(load_constant((const u32*)table + (at + i) / 2) >> i % 2 * 16 & 0xffff);
  }
}
template <class F, class Table, int NGRAM, int HEADS, int DIM>
DEVICE bool engram_look_up(Step& s, u32 stage, u32 tag, const NgramHash<NGRAM, HEADS>& hash, const void* table,
                           const u8* scales, bool remember, Pair* out) {
  constexpr int COLUMNS = NgramHash<NGRAM, HEADS>::COLUMNS;
  static_assert(COLUMNS <= 64 && DIM % 32 == 0, "");
  for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
    s.begin(stage, row, tag);
    if (thread_id() < COLUMNS) {
      u64 at = hash.row_of(row, thread_id());
      engram_rows[2 * thread_id()] = (u32)at, engram_rows[2 * thread_id() + 1] = (u32)(at >> 32);
    }
    if (remember && thread_id() == 0) hash.remember(row, tag);
    block_barrier();
    for (int group = thread_id(); group < COLUMNS * DIM / 4; group += THREADS) {  // four neighbours: a word of codes
      int column = group / (DIM / 4), k = group % (DIM / 4) * 4;
      f32 v[4];
      load_four<Table, DIM>(table, scales, (u64)engram_rows[2 * column + 1] << 32 | engram_rows[2 * column], k, v);
      Pair* to = out + row * (COLUMNS * DIM * F::ACT_BYTES / 4);
      put_words<F>(to, column * DIM + k, {v[0], v[1]}, tag), put_words<F>(to, column * DIM + k + 2, {v[2], v[3]}, tag);
    }
    drain();  // of the token that was remembered: the next launch reads it
    s.end();
    block_barrier();  // before the columns' rows are written again
  }
  s.finish(s.rows);
  return true;
}

template <int STREAMS, int HIDDEN> struct EngramGate {
  static constexpr int PIECE = 2 * THREADS, PIECES = (HIDDEN + PIECE - 1) / PIECE, SUMS = 3 * STREAMS;
  static constexpr int DOTS = PIECES * SUMS;  // of a row

  PairRows streams, mapped;        // [row][STREAMS * HIDDEN], [row][(STREAMS + 1) * HIDDEN]
  const f32 *q_weight, *k_weight;  // [STREAMS][HIDDEN]
  f32 eps;

  DEVICE bool dots(Step& s, u32 stage, u32 tag, Pair* out) const {
    int tasks = s.rows * PIECES;
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      int row = task / PIECES, channel = channel_of(task);
      f32 sum[SUMS] = {};
      bool mine = channel < HIDDEN, ok = true;
      UNROLL for (int stream = 0; stream < STREAMS; ++stream) {
        int at = stream * HIDDEN + (mine ? channel : 0);
        Pair h[2], key[2];
        ok = streams.take(s, row, [at](int i) { return at + i; }, h) && ok;
        ok = mapped.take(s, row, [at](int i) { return at + i; }, key) && ok;
        UNROLL for (int j = 0; j < 2; ++j) {
          f32 a = mine ? value_of(h[j]) : 0.f, b = value_of(key[j]);
          f32 weight = load_constant(q_weight + at + j) * load_constant(k_weight + at + j);
          sum[3 * stream] += a * a, sum[3 * stream + 1] += mine ? b * b : 0.f, sum[3 * stream + 2] += a * weight * b;
        }
      }
      if (!s.all_ok(ok)) return false;
      s.input_is_there();
      UNROLL for (int n = 0; n < SUMS; ++n) {
        f32 of_wave = wave_sum(sum[n]);
        if (lane_id() == 0) set_lds_value(wave_id() * SUMS + n, of_wave);
      }
      block_barrier();
      for (int n = thread_id(); n < SUMS; n += THREADS) {
        f32 all = 0;
        UNROLL for (int w = 0; w < WAVES; ++w) all += lds_value(w * SUMS + n);
        put(out + row * DOTS + task % PIECES * SUMS + n, all, tag);
      }
      s.end();
      block_barrier();  // before the sums of the next task
    }
    s.finish(tasks);
    return true;
  }

  template <class Sink> DEVICE bool add(Step& s, u32 stage, u32 tag, const PairRows& sums, Sink sink) const {
    int tasks = s.rows * PIECES;
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      int row = task / PIECES, channel = channel_of(task);
      bool mine = channel < HIDDEN, ok = true;
      if (thread_id() < SUMS) {
        Pair got[PIECES];
        ok = sums.take(s, row, [](int piece) { return piece * SUMS + thread_id(); }, got);
        f32 all = 0;
        UNROLL for (int piece = 0; piece < PIECES; ++piece) all += value_of(got[piece]);
        set_lds_value(thread_id(), all);
      }
      int at = mine ? channel : 0;
      Pair h[2 * STREAMS], value[2];
      ok = streams.take(s, row, [at](int i) { return i / 2 * HIDDEN + at + i % 2; }, h) && ok;
      ok = mapped.take(s, row, [at](int i) { return STREAMS * HIDDEN + at + i; }, value) && ok;
      if (!s.all_ok(ok)) return false;
      s.input_is_there();
      f32 v[STREAMS][2];
      UNROLL for (int stream = 0; stream < STREAMS; ++stream) {
        f32 weight = gate(stream);
        UNROLL for (int j = 0; j < 2; ++j) v[stream][j] = value_of(h[2 * stream + j]) + weight * value_of(value[j]);
      }
      sink(row, channel, v, mine);
      s.end();
      block_barrier();  // before the sums of the next task
    }
    s.finish(tasks);
    return true;
  }

 private:
  DEVICE static int channel_of(int task) { return task % PIECES * PIECE + 2 * thread_id(); }
  // sigmoid(sign(d) * sqrt(max(|d|, 1e-6))), d = rms(stream) . weights . rms(key) / sqrt(HIDDEN)
  DEVICE f32 gate(int stream) const {
    auto rms = [this](f32 sum) { return 1.f / __builtin_sqrtf(sum / (f32)HIDDEN + eps); };
    f32 dot = lds_value(3 * stream + 2) * rms(lds_value(3 * stream)) * rms(lds_value(3 * stream + 1)) /
              __builtin_sqrtf((f32)HIDDEN);
    f32 size = dot < 0 ? -dot : dot, root = __builtin_sqrtf(size > 1e-6f ? size : 1e-6f);
    return sigmoid(dot < 0 ? -root : root);
  }
};
