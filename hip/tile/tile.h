// Matrix tiles. A weight matrix [N][K] is kept in tiles of 16 output rows and 1 KB, [N / 16][K / COLUMNS]; a tile has 64
// slots of 16 bytes, slot = chunk * 16 + row, and chunk c of a row holds its columns c * COLUMNS / 4 and up. So a lane's
// load is 16 bytes and a wave's 1 KB in one piece (NVIDIA: four whole 128-byte lines a load), and what arrives is an operand
// of the matrix instruction as it is. rocmega/checkpoint/tiles.py packs. N is padded to 16, K to UNIT, with zeros.
//
// Weights are the A operand and requests (rows of the step) the B operand: one instruction serves 1 to 16 rows, and a row's
// result does not depend on the others.
#pragma once
#include "tile/format.h"

template <class F> DEVICE constexpr int padded(int k) { return (k + F::UNIT - 1) / F::UNIT * F::UNIT; }

// 16 output rows of a matrix. `scales`: f32 [K / 128] of these rows; or E8M0 bytes, 64 a tile in the order of slots.
template <class F> struct TileRow {
  const u8* tiles;
  const void* scales;

  // The same rows from column k on, a multiple of COLUMNS, without scales.
  DEVICE TileRow from_k(int k) const { return {tiles + (u64)k / F::COLUMNS * TILE_BYTES, scales}; }

  DEVICE static int slot(int piece) { return frag_chunk() * 16 + frag_row(piece); }
  DEVICE Frag load(int tile) const {
    Frag f;
    UNROLL for (int p = 0; p < PIECES; ++p) {
      Vec4 v = load_weights(tiles + (u32)tile * TILE_BYTES + slot(p) * 16);
      UNROLL for (int i = 0; i < 4; ++i) f.w[p][i] = v.w[i];
    }
    return f;
  }
  DEVICE typename F::Scale scale(int unit) const {
    if constexpr (SAME<typename F::Scale, NoScale>) {
      return {};
    } else if constexpr (SAME<typename F::Scale, f32>) {
      return load_constant((const f32*)scales + unit);
    } else {
      typename F::Scale bytes;
      UNROLL for (int p = 0; p < PIECES; ++p) bytes.e8m0[p] =
          load_constant((const u32*)scales + (unit * 64 + slot(p)) / 4) >> slot(p) % 4 * 8 & 255;
      return bytes;
    }
  }
};

// Row `row` of matrix number `matrix` [n][K] of a packed tensor.
template <class F, int K>
DEVICE TileRow<F> tile_row(const void* tiles, const void* scales, int n, u64 matrix, int row) {
  constexpr u64 TILES = (u64)padded<F>(K) / F::COLUMNS;
  u64 rows = (n + TILE_ROWS - 1) / TILE_ROWS, at = matrix * rows + row;
  if constexpr (SAME<typename F::Scale, f32>)
    scales = (const f32*)scales + (matrix * ((n + 127) / 128) + row * TILE_ROWS / 128) * ((K + 127) / 128);
  else if constexpr (!SAME<typename F::Scale, NoScale>)
    scales = (const u8*)scales + at * TILES * 64;
  return {(const u8*)tiles + at * TILES * TILE_BYTES, scales};
}

// A unit in registers, and its product.
template <class F> struct Unit {
  Frag frag[F::TILES];
  typename F::Scale scale;

  DEVICE void load(const TileRow<F>& from, int unit) {
    UNROLL for (int t = 0; t < F::TILES; ++t) frag[t] = from.load(unit * F::TILES + t);
    scale = from.scale(unit);
  }
  DEVICE void multiply(const Columns& x, int k, Acc& acc) const { F::multiply(frag, scale, x, k, acc); }
};

// One wave's share of 16 output rows: units wave_id(), wave_id() + WAVES, ... of K, in this order whatever the number of
// rows or blocks. Up to AHEAD of them are in flight; the ring is indexed by constants only, or it would live in scratch.
template <class F, int K, int AT_MOST = F::AHEAD> struct Slice {
  static constexpr int UNITS = padded<F>(K) / F::UNIT, TURNS = (UNITS + WAVES - 1) / WAVES;
  static constexpr int AHEAD = TURNS < AT_MOST ? TURNS : AT_MOST < 1 ? 1 : AT_MOST;
  static constexpr bool EVEN = UNITS % WAVES == 0;       // every wave has a unit in every turn
  static constexpr int GRAIN = F::UNIT * WAVES * AHEAD;  // activations may come in chunks that are multiples of this
  TileRow<F> row;
  Unit<F> ring[AHEAD];

  DEVICE void load(int slot, int turn) {
    int unit = turn * WAVES + wave_id();
    if (EVEN ? turn < TURNS : unit < UNITS) ring[slot].load(row, unit);
  }
  DEVICE void open(const TileRow<F>& from) {  // issues the first loads; nothing waits for them here
    row = from;
    UNROLL for (int i = 0; i < AHEAD; ++i) load(i, i);
  }
  // Adds the products of k in [begin, end), whose activations are in LDS from each column's begin on.
  DEVICE void run(const Columns& x, int begin, int end, Acc& acc) {
    int first = begin / (F::UNIT * WAVES), last = (end + F::UNIT * WAVES - 1) / (F::UNIT * WAVES);
    for (int turn = first; turn < last; turn += AHEAD) UNROLL for (int i = 0; i < AHEAD; ++i) {
        int unit = (turn + i) * WAVES + wave_id();
        if (turn + i < last && (EVEN || unit < UNITS)) {
          ring[i].multiply(x, unit * F::UNIT - begin, acc);
          load(i, turn + i + AHEAD);
        }
      }
  }
};

// Each wave leaves its share of a tile in LDS; `half` 0 or 1.
DEVICE void leave_part(const Acc& acc, int half) {
  UNROLL for (int i = 0; i < ACCS; ++i)
      set_lds_value(ACT_WORDS + ((half * WAVES + wave_id()) * 16 + acc_col(i)) * TILE_ROWS + acc_row(i), acc.v[i]);
}
// The sum over waves, in their order.
DEVICE f32 sum_parts(int half, int row, int n) {
  f32 sum = 0;
  UNROLL for (int w = 0; w < WAVES; ++w) sum += lds_value(ACT_WORDS + ((half * WAVES + w) * 16 + row) * TILE_ROWS + n);
  return sum;
}
