// What most of a model's matrix stages have in common (linear.h asks them): of the context C, publishing activations as format A
// takes them. Matrix is the model's descriptor's.
#pragma once
#include "stages/linear.h"

// Where 16 output rows of a packed tensor are. What a stage says of it is numbers; addresses are made of them once for all
// stages, which as code of every stage were a sixth of what a layer runs through (linear.h).
struct RowsOf {
  Const<Matrix> of;
  u32 row, block;      // of tiles; of the blocks of 128 x 128 that scales are for
  u32 tiles, columns;  // a row of each has
  u32 first = 0;       // tile

  template <class F> DEVICE TileRow<F> tile_row() const {
    Matrix m = copy_of(of);
    return TileRow<F>::at(m.tiles, m.scales, row * tiles + first, block * columns);
  }
  // From column k on, a multiple of COLUMNS, without scales.
  template <class F> DEVICE RowsOf from_k(int k) const {
    RowsOf rows = *this;
    rows.first = (u32)k / F::COLUMNS;
    return rows;
  }
};

template <class C, class A> struct MatrixStageOf {
  C& c;
  DEVICE static constexpr int matrices() { return 1; }
  DEVICE static constexpr int most() { return MOST_TILES; }
  DEVICE static constexpr bool light() { return false; }
  DEVICE static constexpr bool separate() { return false; }
  DEVICE static constexpr int known() { return 1 << 30; }
  DEVICE static constexpr int sure() { return 1 << 30; }
  DEVICE static bool decide(bool) { return true; }
  DEVICE static bool exists(int) { return true; }
  DEVICE static void ahead(int, Output, Kept&) {}
  // Tile row `row` of matrix number `matrix`, [n][K], of a packed tensor.
  template <class F, int K> DEVICE static RowsOf rows(Const<Matrix> m, int n, int row, u32 matrix = 0) {
    u32 tile_rows = (n + TILE_ROWS - 1) / TILE_ROWS, blocks = (n + 127) / 128;
    return {m, matrix * tile_rows + row, matrix * blocks + row * TILE_ROWS / 128, TILES_OF_K<F, K>, (K + 127) / 128};
  }
  DEVICE static void put_f32(const PairRows& out, int at, Output to, const f32 (&v)[2], f32 scale = 1) {
    if (to.there)
      for (int j = 0; j < 2; ++j) put((Pair*)out.at(to.row, at + to.n + j), v[j] * scale, out.tag);
  }
  DEVICE static void put_activations_of(const PairRows& out, int at, Output to, const f32 (&v)[2]) {
    if (to.there) put_words<A>((Pair*)out.at(to.row, 0), at + to.n, v, out.tag);
  }
};
