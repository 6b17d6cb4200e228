// The large array of LDS: activations in front, then weights on their way, then each wave's shares of tiles (attention takes
// the whole).
//
// Activations belong to the wave that reads them: a wave multiplies some units of k, and it alone brings their activations.
// So matrix stages have no barrier of the block between input and product.
#pragma once
#include "platform/numeric.h"
#include "platform/platform.h"

constexpr int TILE_BYTES = 1024, TILE_ROWS = 16;
constexpr int ACCS = sizeof(Acc) / sizeof(f32);
// Weights on their way, on targets that stream them through LDS: tiles a wave, each with room for its scales.
#if defined(STREAM_BY_LDS)
constexpr int RING_TILES = 8, RING_WORDS = RING_TILES * (TILE_BYTES + 64) / 4;
#else
constexpr int RING_WORDS = 0;
#endif
// A tile's outputs of 16 rows; of two tiles.
constexpr int SHARE_WORDS = TILE_ROWS * 16, PART_WORDS = RING_WORDS && WAVES < 16 ? 5120 : 2 * WAVES * SHARE_WORDS;
// Zeros, at the end: what a column without activations reads. A unit is at most this long.
constexpr int ZERO_WORDS = 128, ZEROS16 = LDS_WORDS / 4 - ZERO_WORDS / 4, USED_WORDS = LDS_WORDS - ZERO_WORDS;
// The waves' rings; also for what is done between two runs, when nothing is on its way.
constexpr int SPARE_WORDS = RING_WORDS ? WAVES * RING_WORDS : 2048;
constexpr int ACT_WORDS = USED_WORDS - PART_WORDS - SPARE_WORDS;
constexpr int WAVE16 = ACT_WORDS / WAVES / 4;  // 16-byte units of a wave's activations
SHARED_LARGE(u32, lds, LDS_WORDS);

DEVICE f32 lds_value(int word) { return bits<f32>((u32)lds[word]); }
DEVICE void set_lds_value(int word, f32 v) { lds[word] = bits<u32>(v); }

DEVICE void clear_zeros() {  // once a kernel
  for (int i = thread_id(); i < ZERO_WORDS; i += THREADS) lds[USED_WORDS + i] = 0u;
  block_barrier();
}

// Activations as words: two bf16, or an f32 each.
template <class F> constexpr int WORDS_OF_TWO = F::ACT_BYTES / 2;
template <class F> DEVICE void pack_activations(const f32 (&v)[2], u32 (&words)[WORDS_OF_TWO<F>]) {
  if constexpr (F::ACT_BYTES == 4)
    words[0] = bits<u32>(v[0]), words[1] = bits<u32>(v[1]);
  else
    words[0] = pack_bf16(v[0], v[1]);
}
template <class F> DEVICE void put_activations(int word, const f32 (&v)[2]) {
  u32 words[WORDS_OF_TWO<F>];
  pack_activations<F>(v, words);
  UNROLL for (int i = 0; i < WORDS_OF_TWO<F>; ++i) lds[word + i] = words[i];
}

// Where the columns of a product have their activations: 16-byte units of LDS, ZEROS16 for none. `operand` of the B operand's
// pieces, `result` of the accumulator's entries; on AMD both are one column a lane. `wide`: whether any of columns 8 ... 15
// counts.
struct Columns {
  int operand[PIECES], result[ACCS];
  const int chunk = frag_chunk();  // of the lane, asked for once
  bool wide;

  template <class At> DEVICE explicit Columns(At at, bool wide = true) : wide(wide) {
    UNROLL for (int p = 0; p < PIECES; ++p) operand[p] = at(frag_row(p));
    UNROLL for (int i = 0; i < ACCS; ++i) result[i] = at(acc_col(i));
  }
};

// 16 bytes of activations a lane and piece.
DEVICE Frag act_frag(const Columns& columns, int offset) {
  Frag f;
  UNROLL for (int p = 0; p < PIECES; ++p) {
    Vec4 v = {};
    if (p == 0 || columns.wide) v = lds_load4(lds, (columns.operand[p] + offset) * 4);
    UNROLL for (int i = 0; i < 4; ++i) f.w[p][i] = v.w[i];
  }
  return f;
}

// Each wave leaves its share of a tile's outputs for `rows` columns: of MOST_TILES tiles if these are 8 at most, else of half
// as many.
constexpr int MOST_TILES = 4;
DEVICE int most_tiles(int rows) { return rows > 8 ? MOST_TILES / 2 : MOST_TILES; }
DEVICE int share(int tile, int wave, int column, int rows) {
  return USED_WORDS - PART_WORDS + (tile * WAVES + wave) * (rows > 8 ? SHARE_WORDS : SHARE_WORDS / 2) +
         column * TILE_ROWS;
}
DEVICE void leave_share(const Acc& acc, int tile, int rows) {
  UNROLL for (int i = 0; i < ACCS; ++i) if (acc_col(i) < rows)
      set_lds_value(share(tile, wave_id(), acc_col(i), rows) + acc_row(i), acc.v[i]);
}
// What this wave has left, to go on with.
DEVICE Acc left_share(int tile, int rows) {
  Acc acc = {};
  UNROLL for (int i = 0; i < ACCS; ++i) if (acc_col(i) < rows) acc.v[i] =
      lds_value(share(tile, wave_id(), acc_col(i), rows) + acc_row(i));
  return acc;
}
// The sum over waves, in their order.
DEVICE f32 sum_shares(int tile, int row, int n, int rows) {
  f32 sum = 0;
  UNROLL for (int w = 0; w < WAVES; ++w) sum += lds_value(share(tile, w, row, rows) + n);
  return sum;
}
