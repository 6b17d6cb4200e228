// Quantized activations, made in LDS and in place: a group's numbers come as bf16 and leave half of their room free, where
// the scale goes. So whoever reads them finds both from the group's address.
#pragma once
#include "tile/lds.h"

// 16-byte units from a group's first to its scale.
constexpr int FP8_GROUP_SCALE16 = 8, MX_GROUP_SCALE16 = 2;

// N bf16 of LDS, from 16-byte unit `at` on, and the largest magnitude.
template <int N> DEVICE f32 load_group(int at, f32 (&v)[N]) {
  f32 most = 0;
  UNROLL for (int i = 0; i < N / 8; ++i) {
    Vec4 four = lds_load4(lds, (at + i) * 4);
    UNROLL for (int j = 0; j < 8; ++j) {
      v[8 * i + j] = from_bf16(four.w[j / 2] >> j % 2 * 16 & 0xffff);
      most = larger(most, __builtin_fabsf(v[8 * i + j]));
    }
  }
  return most;
}
// Four numbers, already divided by their scale, as the bytes that this target's FP8 instructions want: always the grid of
// OCP e4m3, whose bytes FNUZ reads as half the value (and its -0 as NaN).
DEVICE u32 fp8_bytes(const f32 (&v)[4]) {
  u32 word = 0;
  UNROLL for (int i = 0; i < 4; ++i) {
    u32 byte = to_fp8_ocp(v[i]);
    if (FP8_FNUZ && byte == 0x80) byte = 0;
    word |= byte << 8 * i;
  }
  return word;
}

constexpr f32 LEAST_LARGEST = 1e-10f;  // a group of smaller numbers is scaled as if it had this: 448 / it stays finite

// Groups of 128 with an f32 scale, largest magnitude / 448: eight neighbouring lanes a group. `group(i)`: the 16-byte unit
// where group i begins. Done by the wave whose activations they are, after its barrier; ends without one.
template <class Group> DEVICE void quantize_fp8(int groups, Group group) {
  int lane = thread_id() % WIDTH;
  for (int from = 0; from < groups; from += WIDTH / 8) {
    int i = from + lane / 8, at = group(i < groups ? i : groups - 1);
    f32 v[16], most = load_group(at + lane % 8 * 2, v);
    UNROLL for (int o = 1; o < 8; o *= 2) most = larger(most, bits<f32>(wave_read(bits<u32>(most), lane ^ o)));
    wave_barrier();  // the group has been read: its eight lanes write where others of them have read
    if (i >= groups) continue;
    most = larger(most, LEAST_LARGEST);
    f32 scale = most / 448.f, inverse = 448.f / most;
    UNROLL for (int w = 0; w < 4; ++w) {
      f32 four[4];
      UNROLL for (int j = 0; j < 4; ++j) four[j] = v[4 * w + j] * inverse;
      lds[(at + lane % 8) * 4 + w] = fp8_bytes(four);
    }
    if (lane % 8 == 0) set_lds_value((at + FP8_GROUP_SCALE16) * 4, FP8_FNUZ ? 2 * scale : scale);
  }
}

// Groups of 32 with an E8M0 scale, the power of two next to largest magnitude / 448 from above: one thread a group. With a
// scaled matrix instruction bytes and scale; else the bf16 numbers that they stand for, which are exact.
template <class Group> DEVICE void quantize_mx(int groups, Group group) {
  for (int i = lane_id(); i < groups; i += WIDTH) {
    int at = group(i);
    f32 v[32];
    u32 ratio = bits<u32>(load_group(at, v) / 448.f);
    u32 e8m0 = (ratio >> 23) + ((ratio & 0x7fffff) != 0);
    e8m0 = e8m0 < 1 ? 1 : e8m0;
    f32 scale = bits<f32>(e8m0 << 23), inverse = bits<f32>((254 - e8m0) << 23);
    UNROLL for (int w = 0; w < 8; ++w) {
      f32 four[4];
      UNROLL for (int j = 0; j < 4; ++j) four[j] = v[4 * w + j] * inverse;
#if defined(NATIVE_MX)
      lds[at * 4 + w] = fp8_bytes(four);
#else
      UNROLL for (int j = 0; j < 4; ++j) four[j] = fp8_ocp(to_fp8_ocp(four[j])) * scale;
      lds[at * 4 + 2 * w] = pack_bf16(four[0], four[1]);
      lds[at * 4 + 2 * w + 1] = pack_bf16(four[2], four[3]);
#endif
    }
#if defined(NATIVE_MX)
    lds[(at + MX_GROUP_SCALE16) * 4] = e8m0;
#endif
  }
}

// `units` units of activations of format F; `unit(i)`: the 16-byte unit where unit i begins. Begins after and ends with a
// barrier of the wave.
template <class F, class UnitAt> DEVICE void quantize(int units, UnitAt unit) {
  if constexpr (F::GROUP != 0) {
    constexpr int PER_UNIT = F::UNIT / F::GROUP;
    auto group = [&](int i) { return unit(i / PER_UNIT) + i % PER_UNIT * (F::GROUP / 8); };
    if constexpr (F::GROUP == 128)
      quantize_fp8(units * PER_UNIT, group);
    else
      quantize_mx(units * PER_UNIT, group);
    wave_barrier();
  }
}
