// Matrix tiles. A weight matrix [N][K] is kept in tiles of 16 output rows and 1 KB, [N / 16][K / COLUMNS]; a tile has 64
// slots of 16 bytes, slot = chunk * 16 + row, and chunk c of a row holds its columns c * COLUMNS / 4 and up. So a lane's
// load is 16 bytes and a wave's 1 KB in one piece (NVIDIA: four whole 128-byte lines a load), and what arrives is an operand
// of the matrix instruction as it is. rocmega/checkpoint/tiles.py packs. N is padded to 16, K to UNIT, with zeros.
//
// Weights are the A operand and requests (rows of the step) the B operand: one instruction serves 1 to 16 rows, and a row's
// result does not depend on the others.
#pragma once
#include "platform/numeric.h"
#include "platform/platform.h"

constexpr int TILE_BYTES = 1024, TILE_ROWS = 16;
constexpr int ACCS = sizeof(Acc) / sizeof(f32);

// All of LDS that is large: activations in front, each wave's share of a tile behind (attention takes the whole).
constexpr int PART_WORDS = 2 * WAVES * TILE_ROWS * 16;
constexpr int ACT_WORDS = LDS_WORDS - PART_WORDS;
SHARED_LARGE(u32, lds, LDS_WORDS);

DEVICE f32 lds_value(int word) { return bits<f32>((u32)lds[word]); }
DEVICE void set_lds_value(int word, f32 v) { lds[word] = bits<u32>(v); }

// Two neighbouring activations.
template <class F> DEVICE void put_activations(int word, const f32 (&v)[2]) {
  if constexpr (F::ACT_BYTES == 4)
    set_lds_value(word, v[0]), set_lds_value(word + 1, v[1]);
  else
    lds[word] = pack_bf16(v[0], v[1]);
}

// 16 bytes of activations a lane and piece: at[piece] counts 16-byte units of LDS, -1 gives zeros.
DEVICE Frag act_frag(const int (&at)[PIECES], int offset) {
  Frag f;
  UNROLL for (int p = 0; p < PIECES; ++p) {
    Vec4 v = {};
    if (at[p] >= 0) v = lds_load4(lds, (at[p] + offset) * 4);
    UNROLL for (int i = 0; i < 4; ++i) f.w[p][i] = v.w[i];
  }
  return f;
}

// Formats: COLUMNS of a tile, k that belong together (UNIT: one scale block, or one tile) and their tiles, units kept in
// flight per wave (AHEAD: 4 to 8 KB a wave, 16 to 32 KB a block of 4 waves: about bandwidth x latency of a compute unit; chunks of
// activations have to be multiples of it, so a small LDS bounds it), bytes of an activation in LDS, and the product of a tile with the activations whose first 16-byte unit is `k16`.
struct F32 {
  static constexpr int COLUMNS = 16, UNIT = 16, TILES = 1, AHEAD = 8, ACT_BYTES = 4;
  static constexpr bool SCALED = false;
  DEVICE static void multiply(const Frag& w, const int (&at)[PIECES], int k16, Acc& acc) {
    mma_f32(w, act_frag(at, k16 + frag_chunk()), acc);
  }
};
struct Bf16 {
  static constexpr int COLUMNS = 32, UNIT = 32, TILES = 1, AHEAD = 8, ACT_BYTES = 2;
  static constexpr bool SCALED = false;
  DEVICE static void multiply(const Frag& w, const int (&at)[PIECES], int k16, Acc& acc) {
    mma_bf16(w, act_frag(at, k16 + frag_chunk()), acc);
  }
};
// bf16 weights with f32 activations, for the router and the indexer's head weights: what they decide is discrete.
struct Bf16Wide {
  static constexpr int COLUMNS = 32, UNIT = 32, TILES = 1, AHEAD = 4, ACT_BYTES = 4;
  static constexpr bool SCALED = false;
  DEVICE static void multiply(const Frag& w, const int (&at)[PIECES], int k16, Acc& acc) {
    Frag wide[2];
    frag_bf16_to_f32(w, wide);
    UNROLL for (int p = 0; p < 2; ++p) mma_f32(wide[p], act_frag(at, k16 + 2 * frag_chunk() + p), acc);
  }
};
// e4m3 weights with one f32 scale per 128 x 128, widened to bf16 in registers (exact) for bf16 activations.
struct Fp8 {
  static constexpr int COLUMNS = 64, UNIT = 128, TILES = 2, AHEAD = LDS_WORDS >= 32768 ? 4 : 2, ACT_BYTES = 2;
  static constexpr bool SCALED = true;
  DEVICE static void multiply(const Frag& w, const int (&at)[PIECES], int k16, Acc& acc) {
    Frag wide[2];
    frag_fp8_to_bf16(w, wide);
    UNROLL for (int p = 0; p < 2; ++p) mma_bf16(wide[p], act_frag(at, k16 + 2 * frag_chunk() + p), acc);
  }
};

// What activations are rounded to for weights of a format, and the format that takes a matrix with exact activations.
template <class F> struct ActivationsOfFormat {
  using Type = Bf16;
};
template <> struct ActivationsOfFormat<F32> {
  using Type = F32;
};
template <class F> using ActivationsOf = typename ActivationsOfFormat<F>::Type;
template <class F> struct WideOfFormat {
  using Type = F;
};
template <> struct WideOfFormat<Bf16> {
  using Type = Bf16Wide;
};
template <class F> using Wide = typename WideOfFormat<F>::Type;

template <class F> DEVICE constexpr int padded(int k) { return (k + F::UNIT - 1) / F::UNIT * F::UNIT; }

// 16 output rows of a matrix.
template <class F> struct TileRow {
  const u8* tiles;
  const f32* scales;  // [K / 128] of these rows, or null

  DEVICE Frag load(int tile) const {
    Frag f;
    UNROLL for (int p = 0; p < PIECES; ++p) {
      Vec4 v = load_weights(tiles + (u32)tile * TILE_BYTES + (frag_chunk() * 16 + frag_row(p)) * 16);
      UNROLL for (int i = 0; i < 4; ++i) f.w[p][i] = v.w[i];
    }
    return f;
  }
};

// Row `tile_row` of the matrix [n][K] that begins `matrices` equal ones into the packed tensor.
template <class F, int K> DEVICE TileRow<F> tile_row(const void* tiles, const f32* scales, int n, u64 matrix, int row) {
  constexpr u64 ROW_BYTES = (u64)padded<F>(K) / F::COLUMNS * TILE_BYTES;
  u64 rows = (n + TILE_ROWS - 1) / TILE_ROWS;
  const f32* of_rows = nullptr;
  if constexpr (F::SCALED) of_rows = scales + (matrix * ((n + 127) / 128) + row * TILE_ROWS / 128) * ((K + 127) / 128);
  return {(const u8*)tiles + (matrix * rows + row) * ROW_BYTES, of_rows};
}

// A unit in registers, and its product.
template <class F> struct Unit {
  Frag frag[F::TILES];
  f32 scale;

  DEVICE void load(const TileRow<F>& from, int unit) {
    UNROLL for (int t = 0; t < F::TILES; ++t) frag[t] = from.load(unit * F::TILES + t);
    if constexpr (F::SCALED) scale = load_constant(from.scales + unit);
  }
  DEVICE void multiply(const int (&at)[PIECES], int k16, Acc& acc) const {
    constexpr int TILE_K16 = F::COLUMNS * F::ACT_BYTES / 16;
    if constexpr (F::SCALED) {
      Acc block = {};
      UNROLL for (int t = 0; t < F::TILES; ++t) F::multiply(frag[t], at, k16 + t * TILE_K16, block);
      UNROLL for (int i = 0; i < ACCS; ++i) acc.v[i] = __builtin_fmaf(scale, block.v[i], acc.v[i]);
    } else {
      UNROLL for (int t = 0; t < F::TILES; ++t) F::multiply(frag[t], at, k16 + t * TILE_K16, acc);
    }
  }
};

// One wave's share of 16 output rows: units wave_id(), wave_id() + WAVES, ... of K, in this order whatever the number of
// rows or blocks. Up to AHEAD of them are in flight; the ring is indexed by constants only, or it would live in scratch.
template <class F, int K, int AT_MOST = F::AHEAD> struct Slice {
  static constexpr int UNITS = padded<F>(K) / F::UNIT, TURNS = (UNITS + WAVES - 1) / WAVES;
  static constexpr int AHEAD = TURNS < AT_MOST ? TURNS : AT_MOST;
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
  // Adds the products of k in [begin, end) whose activations are in LDS from at[piece] on.
  DEVICE void run(const int (&at)[PIECES], int begin, int end, Acc& acc) {
    int first = begin / (F::UNIT * WAVES), last = (end + F::UNIT * WAVES - 1) / (F::UNIT * WAVES);
    for (int turn = first; turn < last; turn += AHEAD) UNROLL for (int i = 0; i < AHEAD; ++i) {
        int unit = (turn + i) * WAVES + wave_id();
        if (turn + i < last && (EVEN || unit < UNITS)) {
          ring[i].multiply(at, (unit * F::UNIT - begin) * F::ACT_BYTES / 16, acc);
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
