// What most of a model's matrix stages have in common (linear.h asks them): of the context C, publishing activations as format A
// takes them. Matrix is the model's descriptor's.
#pragma once
#include "stages/linear.h"

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
  template <class F, int K> DEVICE static TileRow<F> rows(const Matrix& m, int n, int row, u64 matrix = 0) {
    return tile_row<F, K>(m.tiles, m.scales, n, matrix, row);
  }
  DEVICE static void put_f32(const PairRows& out, int at, Output to, const f32 (&v)[2], f32 scale = 1) {
    if (to.there)
      for (int j = 0; j < 2; ++j) put((Pair*)out.at(to.row, at + to.n + j), v[j] * scale, out.tag);
  }
  DEVICE static void put_activations_of(const PairRows& out, int at, Output to, const f32 (&v)[2]) {
    if (to.there) put_words<A>((Pair*)out.at(to.row, 0), at + to.n, v, out.tag);
  }
};
