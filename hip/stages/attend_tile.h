// Attention of up to 16 heads over up to SPLIT entries that lie in LDS: scores, softmax numerators, the weighted sum of values.
// Values are the first VALUE channels of the entries, of WIDTH_K. Who brings queries and entries, and where results go, is the
// stage's business.
//
// LDS: queries [16 heads][STRIDE16], later probabilities; entries [SPLIT][STRIDE16]; scores [K_PARTS][16 heads][SPLIT].
#pragma once
#include "tile/tile.h"

template <class F, int WIDTH_K, int VALUE, int SPLIT> struct AttendTile {
  static constexpr int PER_16 = 16 / F::ACT_BYTES, STRIDE16 = WIDTH_K / PER_16 + 1;
  static constexpr int TILES = SPLIT / 16, K_PARTS = WAVES / TILES, K_STEPS = WIDTH_K / F::COLUMNS;
  static constexpr int P_STRIDE16 = SPLIT / PER_16 + 1, P_LOW16 = 16 * P_STRIDE16;
  static constexpr int P_UNITS =
      F::ACT_BYTES == 4 ? P_LOW16 : 2 * P_LOW16;  // probabilities may need more than queries do
  static constexpr int ENTRIES16 = 16 * STRIDE16 > P_UNITS ? 16 * STRIDE16 : P_UNITS;
  static constexpr int SCORES = (ENTRIES16 + SPLIT * STRIDE16) * 4;
  static_assert(WIDTH_K % F::COLUMNS == 0 && VALUE % 16 == 0 && VALUE <= WIDTH_K, "");
  static_assert(SPLIT == 32 && WIDTH % SPLIT == 0 && 16 * SPLIT % THREADS == 0, "");
  static_assert(SCORES + K_PARTS * 16 * SPLIT <= USED_WORDS, "attention does not fit in LDS");

  // Entries are the A operand (16 a tile), heads the free axis; waves split tiles, then K.
  DEVICE static void scores(int heads) {
    int tile = wave_id() % TILES, part = wave_id() / TILES, last = heads - 1;  // stands for heads that are not there
    Columns queries([last](int head) { return (head < last ? head : last) * STRIDE16; }, heads > 8);
    Columns rows([tile](int entry) { return ENTRIES16 + (tile * 16 + entry) * STRIDE16; });
    Acc acc = {};
    for (int step = part; step < K_STEPS; step += K_PARTS) {
      int at = step * F::COLUMNS / PER_16;
      F::multiply({act_frag(rows, at + frag_chunk())}, {}, queries, at, acc);
    }
    UNROLL for (int i = 0; i < ACCS; ++i)
        set_lds_value(SCORES + (part * 16 + acc_col(i)) * SPLIT + tile * 16 + acc_row(i), acc.v[i]);
  }
  // Softmax numerators over the first `count` entries, to where the queries were; stat(head, maximum, sum). One of 16 heads x
  // SPLIT entries a thread and turn: a head's entries are those of SPLIT neighbouring lanes.
  template <class Stat> DEVICE static void probabilities(int count, f32 scale, Stat stat) {
    UNROLL for (int i = thread_id(); i < 16 * SPLIT; i += THREADS) {
      int head = i / SPLIT, entry = i % SPLIT;
      f32 score = 0;
      UNROLL for (int part = 0; part < K_PARTS; ++part) score += lds_value(SCORES + (part * 16 + head) * SPLIT + entry);
      score = entry < count ? score * scale : -__builtin_inff();
      f32 most = score;
      UNROLL for (int o = 1; o < SPLIT; o *= 2) most = larger(most, neighbour(most, o));
      f32 p = entry < count ? exp_exact(score - most) : 0.f, sum = p;
      UNROLL for (int o = 1; o < SPLIT; o *= 2) sum += neighbour(sum, o);
      put_probability(head, entry, p);
      if (entry == 0) stat(head, most, sum);
    }
  }
  // 16 channels of the values a tile, entries transposed on the way out of LDS; out(head, channel, value).
  template <class Out> DEVICE static void weighted_sum(int heads, Out out) {
    constexpr int STEPS = SPLIT / F::COLUMNS, PER_CHUNK = F::COLUMNS / 4;
    bool wide = heads > 8;
    Columns high([](int head) { return head * P_STRIDE16; }, wide);
    Columns low([](int head) { return P_LOW16 + head * P_STRIDE16; }, wide);
    for (int tile = wave_id(); tile < VALUE / 16; tile += WAVES) {
      Acc acc = {};
      UNROLL for (int step = 0; step < STEPS; ++step) {
        Frag values;
        UNROLL for (int p = 0; p < PIECES; ++p) UNROLL for (int i = 0; i < 4; ++i) {
          int entry = step * F::COLUMNS + frag_chunk() * PER_CHUNK + i * PER_CHUNK / 4;
          values.w[p][i] = channel(entry, tile * 16 + frag_row(p));
        }
        F::multiply({values}, {}, high, step * F::COLUMNS / PER_16, acc);
        if constexpr (F::ACT_BYTES == 2) F::multiply({values}, {}, low, step * F::COLUMNS / PER_16, acc);
      }
      UNROLL for (int i = 0; i < ACCS; ++i) out(acc_col(i), tile * 16 + acc_row(i), acc.v[i]);
    }
  }

 private:
  DEVICE static f32 neighbour(f32 v, int distance) { return bits<f32>(wave_read(bits<u32>(v), lane_id() ^ distance)); }
  DEVICE static void put_probability(int head, int entry, f32 p) {
    int word = head * P_STRIDE16 * 4 + entry * F::ACT_BYTES / 4;
    if constexpr (F::ACT_BYTES == 4) {
      set_lds_value(word, p);
    } else {  // as the sum of two bf16, 2^-17 exact: one would make the result depend on the split's maximum
      f32 next = neighbour(p, 1);
      if (entry % 2) return;
      u32 high = pack_bf16(p, next);
      lds[word] = high;
      lds[word + P_LOW16 * 4] = pack_bf16(p - from_bf16(high & 0xffff), next - from_bf16(high >> 16));
    }
  }
  // A word of the A operand: channel c of entry e (and of the next, where two share a word).
  DEVICE static u32 channel(int e, int c) {
    int word = (ENTRIES16 + e * STRIDE16) * 4;
    if constexpr (F::ACT_BYTES == 4) return lds[word + c];
    u32 low = lds[word + c / 2], high = lds[word + STRIDE16 * 4 + c / 2];
    return c % 2 ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
  }
};
