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

  // What another lane has.
  DEVICE TileRow of_lane(int lane) const {
    auto read = [lane](const void* p) {
      u64 v = (u64)p;
      return (const u8*)((u64)wave_read((u32)(v >> 32), lane) << 32 | wave_read((u32)v, lane));
    };
    return {read(tiles), SAME<typename F::Scale, NoScale> ? nullptr : read(scales)};
  }
  // `tile`: of a packed tensor, the first of the rows'; `block`: of its f32 scales, likewise.
  DEVICE static TileRow at(const void* tiles, const void* scales, u32 tile, u32 block) {
    if constexpr (SAME<typename F::Scale, f32>)
      scales = (const f32*)scales + block;
    else if constexpr (!SAME<typename F::Scale, NoScale>)
      scales = (const u8*)scales + (u64)tile * 64;
    return {(const u8*)tiles + (u64)tile * TILE_BYTES, scales};
  }

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

// Tiles of a packed row of K.
template <class F, int K> constexpr u32 TILES_OF_K =
    (u32)((K + K_PADDING<F> - 1) / K_PADDING<F> * (K_PADDING<F> / F::COLUMNS));

// A unit in registers, and its product.
template <class F> struct Unit {
  Frag frag[F::TILES];
  typename F::Scale scale;

  DEVICE void load(const TileRow<F>& from, int unit) {
    UNROLL for (int t = 0; t < F::TILES; ++t) frag[t] = from.load(unit * F::TILES + t);
    scale = from.scale(unit);
  }
  DEVICE void multiply(const Columns& x, int at, Acc& acc) const { F::multiply(frag, scale, x, at, acc); }
};

// Units on their way: SLOTS are asked for ahead of use, then one after each use. load() is called for every slot, in order,
// even if there is nothing more to ask for.
#if defined(STREAM_BY_LDS)
// In LDS, a wave's own part, written by asynchronous copies. `slot` counts for registers only. Where a lane reads and writes
// is worked out once: in the loop it took longer than the product.
template <class F, int> struct Ring {
  static constexpr int SLOTS = RING_TILES / F::TILES, UNROLLED = 1, SLOT_WORDS = RING_WORDS / SLOTS;
  static constexpr int TILE_WORDS = TILE_BYTES / 4, SCALES = F::TILES * TILE_WORDS;
  static constexpr bool BYTES = !SAME<typename F::Scale, NoScale> && !SAME<typename F::Scale, f32>;

  // Chunk c of row r lies in place of row r ^ 2c: so eight lanes that read together meet all banks.
  DEVICE static u32 place(u32 slot16) { return (slot16 ^ slot16 / 16 % 4 * 2) * 4; }

  const u32 begin = ACT_WORDS + wave_id() * RING_WORDS, end = begin + SLOTS * SLOT_WORDS, lane = lane_id();
  const u32 to = place(lane);  // of the wave's first 16-byte units; the next WIDTH of them are two chunks on
  u32 loaded = begin, taken = begin, from[PIECES], scale_from[PIECES];

  DEVICE Ring() {
    UNROLL for (int p = 0; p < PIECES; ++p) from[p] = place(TileRow<F>::slot(p)), scale_from[p] = TileRow<F>::slot(p);
  }
  DEVICE void load(int, const TileRow<F>& row, int unit, bool there) {
    if (there) {
      const u8* source = row.tiles + (u64)(unit * F::TILES) * TILE_BYTES + lane * 16;
      constexpr u32 CHUNKS = WIDTH / 16, SWAP = CHUNKS % 4 * 2 * 4;
      UNROLL for (u32 i = 0; i < F::TILES * 64 / WIDTH; ++i)
          copy_to_lds(lds, loaded + (to ^ i * SWAP % 32) + i * WIDTH * 4, source + i * WIDTH * 16);
      if constexpr (SAME<typename F::Scale, f32>) {
        if (lane == 0) copy_word_to_lds(lds, loaded + SCALES, (const f32*)row.scales + unit);
      } else if constexpr (BYTES) {
        if (lane < 4) copy_to_lds(lds, loaded + SCALES + lane * 4, (const u8*)row.scales + unit * 64 + lane * 16);
      }
    }
    end_of_copies();
    loaded = loaded + SLOT_WORDS == end ? begin : loaded + SLOT_WORDS;
  }
  DEVICE Unit<F> take(int) {
    wait_for_copies<SLOTS - 1>();
    wave_barrier();
    Unit<F> unit;
    UNROLL for (int t = 0; t < F::TILES; ++t) UNROLL for (int p = 0; p < PIECES; ++p) {
      Vec4 v = lds_load4(lds, taken + from[p] + t * TILE_WORDS);
      UNROLL for (int i = 0; i < 4; ++i) unit.frag[t].w[p][i] = v.w[i];
    }
    if constexpr (SAME<typename F::Scale, f32>)
      unit.scale = lds_value(taken + SCALES);
    else if constexpr (BYTES)
      UNROLL for (int p = 0; p < PIECES; ++p) unit.scale.e8m0[p] =
          lds[taken + SCALES + scale_from[p] / 4] >> scale_from[p] % 4 * 8 & 255;
    wave_barrier();
    taken = taken + SLOT_WORDS == end ? begin : taken + SLOT_WORDS;
    return unit;
  }
};
#define UNROLL_SLOTS _Pragma("unroll 1")
#else
// In registers. `slot` has to be a constant, or the ring would live in scratch: so loops over it are unrolled, UNROLLED times.
template <class F, int MOST> struct Ring {
  static constexpr int SLOTS = MOST, UNROLLED = MOST;
  Unit<F> unit[SLOTS];

  DEVICE void load(int slot, const TileRow<F>& row, int number, bool there) {
    // Where nothing is left, the first once more: with a branch around the load clang loses count of those on their way, and
    // waits for all of them before each unit (4 KB in flight in a compute unit instead of 16, by the assembly for gfx950).
    unit[slot].load(row, there ? number : 0);
  }
  DEVICE const Unit<F>& take(int slot) const { return unit[slot]; }
};
#define UNROLL_SLOTS UNROLL
#endif

// One wave's share of a few tiles of 16 output rows with the same input of `units` units of k: units wave_id(), wave_id() +
// WAVES, ..., in this order whatever the number of rows or blocks. A turn is a unit of every wave; activations come in chunks of
// turns, and a chunk meets all tiles before the next one comes. rows_of(tile) is where a tile's weights are.
template <class F> struct Slice {
  using Units = Ring<F, F::AHEAD>;
  static constexpr int STRIDE = Units::UNROLLED;  // turns whose loop is unrolled; chunks are multiples of it
  static_assert(Units::SLOTS % STRIDE == 0, "");

  const int wave = wave_id();
  const int mine, padded, chunk;  // turns of this wave; as a multiple of STRIDE; of a chunk
  Units ring;
  TileRow<F> rows, row;          // lane i has tile i's; of the tile at hand
  int tile, tiles, turn, begin;  // next to be asked for; where its chunk begins

  DEVICE Slice(int units, int chunk)
      : mine(units > wave_id() ? (units - wave_id() + WAVES - 1) / WAVES : 0),
        padded((mine + STRIDE - 1) / STRIDE * STRIDE),
        chunk((chunk + STRIDE - 1) / STRIDE * STRIDE) {}

  DEVICE void load(int slot) {
    int at = turn + slot % STRIDE;
    ring.load(slot, row, at * WAVES + wave, at < mine && begin < padded);
  }
  DEVICE void go_on() {  // after STRIDE loads
    turn += STRIDE;
    if (turn < padded && turn < begin + chunk) return;
    if (++tile == tiles) tile = 0, begin += chunk;
    turn = begin;
    row = rows.of_lane(tile);
  }
  // Issues the first loads; nothing waits for them here. Each lane looks up one tile: where a tile's weights are is read from
  // memory, which would hold up whoever does it between two tiles.
  template <class RowsOf> DEVICE void open(int of_tiles, RowsOf rows_of) {
    tile = turn = begin = 0, tiles = of_tiles;
    rows = rows_of(lane_id() < tiles ? lane_id() : 0);
    row = rows.of_lane(0);
    UNROLL_SLOTS for (int i = 0; i < Units::SLOTS; i += STRIDE) {
      UNROLL for (int j = 0; j < STRIDE; ++j) load(i + j);
      go_on();
    }
  }
  // Adds the products of turns [from, from + chunk) of the next tile, whose activations lie behind each column's first.
  DEVICE void run(const Columns& x, int from, Acc& acc) {
    for (int at = 0; at < chunk && from + at < padded; at += STRIDE) {
      UNROLL for (int i = 0; i < STRIDE; ++i) {
        if (from + at + i < mine) ring.take(i).multiply(x, (at + i) * F::UNIT16, acc);
        load(i);
      }
      go_on();
    }
  }
};
