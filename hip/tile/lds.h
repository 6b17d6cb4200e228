// The large array of LDS: activations in front, each wave's share of a tile behind (attention takes the whole).
#pragma once
#include "platform/numeric.h"
#include "platform/platform.h"

constexpr int TILE_BYTES = 1024, TILE_ROWS = 16;
constexpr int ACCS = sizeof(Acc) / sizeof(f32);
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

// Where the columns of a product have their activations: 16-byte units of LDS, -1 for none, which is zeros. `operand` of
// the B operand's pieces, `result` of the accumulator's entries; on AMD both are one column a lane.
struct Columns {
  int operand[PIECES], result[ACCS];

  template <class At> DEVICE explicit Columns(At at) {
    UNROLL for (int p = 0; p < PIECES; ++p) operand[p] = at(frag_row(p));
    UNROLL for (int i = 0; i < ACCS; ++i) result[i] = at(acc_col(i));
  }
};

// 16 bytes of activations a lane and piece.
DEVICE Frag act_frag(const Columns& columns, int offset) {
  Frag f;
  UNROLL for (int p = 0; p < PIECES; ++p) {
    Vec4 v = {};
    if (columns.operand[p] >= 0) v = lds_load4(lds, (columns.operand[p] + offset) * 4);
    UNROLL for (int i = 0; i < 4; ++i) f.w[p][i] = v.w[i];
  }
  return f;
}
