// Rotary embedding of adjacent pairs: channels (2i, 2i + 1) turn by position * theta^(-2i / ROPE).
#pragma once
#include "platform/numeric.h"
#include "platform/platform.h"

// table: [positions][ROPE / 2][2] cosine and sine; `channel` even.
template <int ROPE> DEVICE void rotate(const f32* table, u32 position, int channel, f32 (&v)[2]) {
  const f32* at = table + (u64)position * ROPE + channel;
  f32 c = load_constant(at), s = load_constant(at + 1), a = v[0], b = v[1];
  v[0] = a * c - b * s;
  v[1] = a * s + b * c;
}
