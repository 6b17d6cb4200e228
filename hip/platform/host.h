// The host: every thread a fiber (hip/host). Waves are as on AMD, so the bits are too.
#pragma once
#include "host/runtime.h"

// Everything but kernels is called directly, not by way of a table.
#pragma GCC visibility push(hidden)

#define DEVICE inline
#define STAGE DEVICE
#define COLD DEVICE
#define KERNEL extern "C" __attribute__((visibility("default")))
#define SHARED(T, name, N) static const host::Lds<T, (N)> name(#name)
#define SHARED_LARGE(T, name, N) SHARED(T, name, N)

constexpr int WIDTH = 64, WAVES = 4;
static_assert(WIDTH == host::LANES, "");

DEVICE int thread_id() { return host::self->thread; }
DEVICE int block_id() { return host::self->wave->block->id; }
DEVICE int n_blocks() { return host::launch_blocks; }
DEVICE int wave_id() { return host::self->wave->index; }
DEVICE int lane_id() { return host::self->lane; }
DEVICE int xcc_id() { return host::self->wave->block->xcd; }
DEVICE u64 clock_ticks() { return host::turns; }
DEVICE void pause() { host::pause(); }
DEVICE int lowest_bit(u64 v) { return __builtin_ctzll(v); }
DEVICE int count_bits(u32 v) { return __builtin_popcount(v); }
DEVICE u32 uniform(u32 v) { return v; }
DEVICE void mark(u32 stage, u32 task, u32 epoch) { host::self->place = {stage, task, epoch}; }

// LDS
DEVICE void block_barrier() { host::block_barrier(); }
DEVICE void wave_barrier() {
  host::meet([](host::Wave& w) { ++w.era; });
}
template <u32 N> DEVICE u32 lds_add(const host::Lds<u32, N>& array, int i, u32 v) {
  u32& word = array.atomic(i);
  return word += v, word - v;
}
template <u32 N> DEVICE u32 lds_or(const host::Lds<u32, N>& array, int i, u32 v) {
  u32 &word = array.atomic(i), old = word;
  word |= v;
  return old;
}
template <class T, u32 N> DEVICE Vec4 lds_load4(const host::Lds<T, N>& array, int i) {
  Vec4 v;
  array.read4(i, v.w);
  return v;
}

// Wave: a lane leaves its value in its slot and finds its result there.
DEVICE u32 wave_read(u32 v, int lane) {
  host::self->wave->slots[host::self->lane] = (u64)lane << 32 | v;
  host::meet([](host::Wave& w) {
    u64 now[WIDTH];
    for (int l = 0; l < WIDTH; ++l) now[l] = (u32)w.slots[w.slots[l] >> 32 & (WIDTH - 1)];
    __builtin_memcpy(w.slots, now, sizeof now);
  });
  return (u32)host::self->wave->slots[host::self->lane];
}
DEVICE float wave_sum(float v) {
  host::set_slot(v);
  host::meet([](host::Wave& w) {
    float old[WIDTH], now[WIDTH];
    for (int l = 0; l < WIDTH; ++l) __builtin_memcpy(&now[l], &w.slots[l], 4);
    for (int o = WIDTH / 2; o; o /= 2) {
      __builtin_memcpy(old, now, sizeof old);
      for (int l = 0; l < WIDTH; ++l) now[l] = old[l] + old[l ^ o];
    }
    for (int l = 0; l < WIDTH; ++l) __builtin_memcpy(&w.slots[l], &now[l], 4);
  });
  return host::get_slot<float>();
}
DEVICE u64 wave_max(u64 v) {
  host::set_slot(v);
  host::meet([](host::Wave& w) {
    u64 most = 0;
    for (int l = 0; l < WIDTH; ++l) most = w.slots[l] > most ? w.slots[l] : most;
    for (int l = 0; l < WIDTH; ++l) w.slots[l] = most;
  });
  return host::get_slot<u64>();
}
DEVICE u32 wave_max(u32 v) { return (u32)wave_max((u64)v); }
DEVICE u64 wave_ballot(bool b) {
  host::set_slot((u64)b);
  host::meet([](host::Wave& w) {
    u64 bits = 0;
    for (int l = 0; l < WIDTH; ++l) bits |= w.slots[l] << l;
    for (int l = 0; l < WIDTH; ++l) w.slots[l] = bits;
  });
  return host::get_slot<u64>();
}
DEVICE bool wave_any(bool b) { return wave_ballot(b) != 0; }

// Memory. Without checks an access is a copy from or to the region's data, which lie at a fixed distance.
template <class T> using Const = const T*;
template <class T> DEVICE Const<T> as_const(const T* p) { return p; }
#define NEAR(T, name, N) constexpr T* name = nullptr
template <class T> DEVICE Const<T> nearby(const T*, int, const T* from) { return as_const(from); }
template <class T> DEVICE void bring_near(const T*, int, const T*) {}
DEVICE void brought_near() {}
template <class T> DEVICE Const<T> fresh(Const<T> p) { return p; }
template <class T> DEVICE Const<T> nearby_again(Const<T>, int, Const<T> from) { return fresh(from); }
template <class T> DEVICE T copy_of(const T* p) { return *p; }
template <class T> DEVICE T load_constant(const T* p) { return *p; }
DEVICE Vec4 load_weights(const void* p) {
  Vec4 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T> DEVICE void store_plain(T* p, T v, u32 epoch) { host::store<host::PLAIN>(p, v, epoch); }
template <class T> DEVICE void store_device(T* p, T v, u32 epoch) { host::store<host::DEVICE_SCOPE>(p, v, epoch); }
template <class T> DEVICE void store_system(T* p, T v, u32 epoch) { host::store<host::SYSTEM_SCOPE>(p, v, epoch); }
template <class T> DEVICE T load_plain(const T* p, u32 epoch) { return host::load<host::PLAIN>(p, epoch); }
template <class T> DEVICE T load_device(const T* p, u32 epoch) { return host::load<host::DEVICE_SCOPE>(p, epoch); }
template <class T> DEVICE T load_system(const T* p, u32 epoch) { return host::load<host::SYSTEM_SCOPE>(p, epoch); }

DEVICE void store_pair(Pair* p, Pair v) { host::store_tagged<host::DEVICE_SCOPE>(p, v, v.tag); }
DEVICE void store_pair_system(Pair* p, Pair v) { host::store_tagged<host::SYSTEM_SCOPE>(p, v, v.tag); }
DEVICE Pair load_pair(const Pair* p, u32 tag) {
  Pair v;
  host::poll(p, &v, tag, host::DEVICE_SCOPE, false);
  return v;
}
DEVICE Pair load_flag(const Pair* p, u32 tag) {
  Pair v;
  host::poll(p, &v, tag, host::DEVICE_SCOPE, true);
  return v;
}
DEVICE Pair load_pair_system(const Pair* p, u32 tag) {
  Pair v;
  host::poll(p, &v, tag, host::SYSTEM_SCOPE, false);
  return v;
}
DEVICE void load_pairs(const Pair* p, u32 tag, Pair (&got)[2]) {
  got[0] = load_pair(p, tag), got[1] = load_pair(p + 1, tag);
}
DEVICE void publish(Pair* p, Pair v) { store_pair(p, v); }
DEVICE void publish_system(Pair* p, Pair v) { store_pair_system(p, v); }
DEVICE bool claim(u32* p) { return host::claim(p); }
DEVICE void drain() {
  if (host::checking) host::drain();
}
DEVICE void release_device() {
  if (host::checking) host::release();
}
DEVICE void acquire_device() {
  if (host::checking) host::acquire();
}
DEVICE void release_system() { release_device(); }
DEVICE void acquire_system() { acquire_device(); }

// Tiles: instruction for instruction what gfx950 does, or gfx942 with -DMMA_K=16 (16-deep bf16, FNUZ in mma_fp8).
#ifndef MMA_K
#define MMA_K 32
#endif
#define FP8_FNUZ (MMA_K == 16)
constexpr int PIECES = 1, ACC = 4;
struct Frag {
  u32 w[1][4];
};
using Acc = host::Acc;
DEVICE int frag_row(int) { return lane_id() % 16; }
DEVICE int frag_chunk() { return lane_id() / 16; }
DEVICE int acc_row(int i) { return lane_id() / 16 * 4 + i; }
DEVICE int acc_col(int) { return lane_id() % 16; }
template <bool A_IS_BF16 = false> DEVICE void mma_f32(const Frag& a, const Frag& b, Acc& acc, bool = true) {
  host::mma(host::MMA_F32, a.w[0], b.w[0], acc.v);
}
DEVICE void mma_bf16(const Frag& a, const Frag& b, Acc& acc, bool = true) {
  host::mma(MMA_K == 16 ? host::MMA_BF16_K16 : host::MMA_BF16_K32, a.w[0], b.w[0], acc.v);
}
DEVICE void mma_fp8(const Frag& a, const Frag& b, Acc& acc, bool = true) {
  host::mma(FP8_FNUZ ? host::MMA_FP8_FNUZ : host::MMA_FP8_OCP, a.w[0], b.w[0], acc.v);
}
#if MMA_K == 32
#define NATIVE_MX
DEVICE void mma_mxfp4(const Frag& weights, u32 weight_scale, const Frag (&x)[2], u32 x_scale, Acc& acc) {
  u32 a[5], b[9];
  __builtin_memcpy(a, weights.w[0], 16);
  for (int i = 0; i < 2; ++i) __builtin_memcpy(b + 4 * i, x[i].w[0], 16);
  a[4] = weight_scale, b[8] = x_scale;
  host::mma(host::MMA_MXFP4, a, b, acc.v);
}
#endif

// OCP e4m3 as bf16, exactly.
struct Fp8Table {
  u16 bf16[256];
  constexpr Fp8Table() : bf16{} {
    for (u32 b = 0; b < 256; ++b) {
      u32 exponent = b >> 3 & 15, mantissa = b & 7;
      if (exponent) {
        exponent += 120;
      } else if (mantissa) {
        for (exponent = 121; mantissa < 8; mantissa *= 2) --exponent;
        mantissa &= 7;
      }
      bf16[b] = (b & 0x80) << 8 | ((b & 0x7f) == 0x7f ? 0x7fc0 : exponent << 7 | mantissa << 4);
    }
  }
};
static constexpr Fp8Table FP8_TABLE;
DEVICE void fp8_to_bf16(const u32 (&from)[4], u32 (&to)[8]) {
  for (int i = 0; i < 8; ++i) {
    u32 two = from[i / 2] >> i % 2 * 16;
    to[i] = FP8_TABLE.bf16[two & 255] | FP8_TABLE.bf16[two >> 8 & 255] << 16;
  }
}
