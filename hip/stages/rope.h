// Rotary embedding of adjacent pairs: channels (2i, 2i + 1) turn by position * theta^(-2i / ROPE).
#pragma once
#include "platform/numeric.h"
#include "platform/platform.h"

// table: [positions][ROPE / 2][2] cosine and sine; `channel` even.
template <int ROPE> DEVICE void load_angle(const f32* table, u32 position, int channel, f32 (&angle)[2]) {
  const f32* at = table + (u64)position * ROPE + channel;
  angle[0] = load_constant(at), angle[1] = load_constant(at + 1);
}
DEVICE void rotate_by(const f32 (&angle)[2], f32 (&v)[2]) {
  f32 a = v[0], b = v[1];
  v[0] = a * angle[0] - b * angle[1];
  v[1] = a * angle[1] + b * angle[0];
}
template <int ROPE> DEVICE void rotate(const f32* table, u32 position, int channel, f32 (&v)[2]) {
  f32 angle[2];
  load_angle<ROPE>(table, position, channel, angle);
  rotate_by(angle, v);
}
