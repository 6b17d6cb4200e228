// The step's own entry of the window: RMS norm, RoPE of the last channels, to the request's ring.
//
// A task is a row.
//   in   kv [row][D] as tagged pairs
//   out  the entry, at its position mod WINDOW of the ring, written through; flag [row]
//   read by  attention of this layer in this step, after the flag; by later launches without
#pragma once
#include "stages/cache_entry.h"

template <class F, int D, int ROPE, int WINDOW> struct WindowEntry {
  PairRows kv;
  const f32* norm;  // [D]
  f32 eps;
  const f32* rope;
  const u32 *positions, *slots;  // [rows]: of the token; of the request's state
  void* ring;                    // [slots][WINDOW][D]
  Pair* flags;

  DEVICE bool run(Step& s, u32 stage, u32 tag) const {
    for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
      s.begin(stage, row, tag);
      u32 position = load_constant(positions + row);
      u64 at = ((u64)load_constant(slots + row) * WINDOW + position % WINDOW) * D;
      RowValues<D> entry;
      bool ok = entry.take(s, kv, row);
      if (!s.all_ok(ok)) return false;
      s.input_is_there();
      f32 scale = 1.f / __builtin_sqrtf(entry.sum([](f32 v) { return v * v; }) / D + eps);
      UNROLL for (int t = 0; t < entry.TURNS; ++t) {
        int c = entry.channel(t);
        if (c >= D) continue;
        f32 v[2];
        UNROLL for (int j = 0; j < 2; ++j) v[j] = entry.v[t][j] * scale * load_constant(norm + c + j);
        if (c >= D - ROPE) rotate<ROPE>(rope, position, c - (D - ROPE), v);
        put_cache<F>(ring, at + c, v, tag);
      }
      s.announce(flags + row, tag, Stored::THROUGH);
    }
    s.finish(s.rows);
    return true;
  }
};
