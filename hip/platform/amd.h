// gfx942 and gfx950, with clang's builtins alone: no device library, no inline assembly (the hazard recogniser does not
// look inside). Pointers come out of a descriptor in memory, so the compiler takes them for generic ones; the casts to
// address space 1 turn flat accesses into global ones.
#pragma once

#define DEVICE __attribute__((device)) inline
#define STAGE DEVICE  // a call would need scratch
#define COLD DEVICE
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(WAVES * WIDTH, WAVES * WIDTH)))
#define SHARED(T, name, N) static __attribute__((shared, aligned(16))) T name[N]
#define SHARED_LARGE(T, name, N) SHARED(T, name, N)
#define GLOBAL __attribute__((address_space(1)))

constexpr int WIDTH = 64, WAVES = 4;

// Opaque on purpose: conditions on the thread's number would be worked out once for the whole kernel and each kept in two
// scalar registers, by the hundred (GLM-5.2: 446 spilled ones instead of 209, and 428 vector registers instead of 215).
// So ask once per function.
DEVICE int thread_id() {
  int id = __builtin_amdgcn_workitem_id_x();
  asm volatile("" : "+v"(id));  // no instruction
  return id;
}
DEVICE int block_id() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int n_blocks() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEVICE u32 uniform(u32 v) { return __builtin_amdgcn_readfirstlane(v); }
DEVICE int wave_id() { return __builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x() / WIDTH); }
DEVICE int lane_id() { return __builtin_amdgcn_workitem_id_x() % WIDTH; }
DEVICE int xcc_id() { return __builtin_amdgcn_s_getreg(20 | 3 << 11); }  // 4 bits of HW_REG_XCC_ID
DEVICE u64 clock_ticks() { return __builtin_amdgcn_s_memrealtime(); }
DEVICE void pause() { __builtin_amdgcn_s_sleep(1); }
DEVICE void mark(u32, u32, u32) {}

// LDS
DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// A wave's LDS accesses are done in order; only the compiler has to keep them so.
DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEVICE u32 lds_add(u32* array, int i, u32 v) {
  return __hip_atomic_fetch_add(array + i, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
DEVICE u32 lds_or(u32* array, int i, u32 v) {
  return __hip_atomic_fetch_or(array + i, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
template <class T> DEVICE Vec4 lds_load4(const T* array, int i) {
  Vec4 v;
  __builtin_memcpy(&v, __builtin_assume_aligned(array + i, 16), sizeof v);
  return v;
}

// Wave
DEVICE u32 wave_read(u32 v, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, v); }
DEVICE float wave_sum(float v) {
  for (int o = WIDTH / 2; o; o /= 2)
    v += __builtin_bit_cast(float, wave_read(__builtin_bit_cast(u32, v), lane_id() ^ o));
  return v;
}
DEVICE u32 wave_max(u32 v) {
  for (int o = WIDTH / 2; o; o /= 2) {
    u32 other = wave_read(v, lane_id() ^ o);
    v = other > v ? other : v;
  }
  return v;
}
DEVICE u64 wave_max(u64 v) {
  for (int o = WIDTH / 2; o; o /= 2) {
    u64 other = (u64)wave_read(v >> 32, lane_id() ^ o) << 32 | wave_read((u32)v, lane_id() ^ o);
    v = other > v ? other : v;
  }
  return v;
}
DEVICE u64 wave_ballot(bool b) { return __builtin_amdgcn_ballot_w64(b); }
DEVICE bool wave_any(bool b) { return wave_ballot(b) != 0; }

// Memory. Every access is made as one of an integer or vector type of T's size.
typedef u32 Word4 __attribute__((ext_vector_type(4)));
template <int Bytes> struct RawOf;
template <> struct RawOf<1> {
  using Type = u8;
};
template <> struct RawOf<2> {
  using Type = u16;
};
template <> struct RawOf<4> {
  using Type = u32;
};
template <> struct RawOf<8> {
  using Type = u64;
};
template <> struct RawOf<16> {
  using Type = Word4;
};
template <class T> using Raw = typename RawOf<sizeof(T)>::Type;

template <class T> using Const = const __attribute__((address_space(4))) T*;
template <class T> DEVICE Const<T> as_const(const T* p) { return (Const<T>)p; }
// Scalar loads have a cache of their own.
#define NEAR(T, name, N) constexpr T* name = nullptr
template <class T> DEVICE Const<T> nearby(const T*, int, const T* from) { return as_const(from); }
template <class T> DEVICE void bring_near(const T*, int, const T*) {}
DEVICE void brought_near() {}
// The same pointer, but fields read through it before are not kept: they would fill the scalar registers of a whole kernel.
template <class T> DEVICE Const<T> fresh(Const<T> p) {
  asm volatile("" : "+s"(p));  // no instruction
  return p;
}
template <class T> DEVICE Const<T> nearby_again(const T*, int, Const<T> from) { return fresh(from); }
template <class T> DEVICE T copy_of(Const<T> p) {  // of a whole struct: classes are not copied between address spaces
  T v;
  __builtin_memcpy(&v, (const T*)p, sizeof v);
  return v;
}

// Address space 4: where all lanes want the same, it is a scalar load.
template <class T> DEVICE T load_constant(const T* p) {
  return __builtin_bit_cast(T, *(const __attribute__((address_space(4))) Raw<T>*)p);
}
DEVICE Vec4 load_weights(const void* p) {
  return __builtin_bit_cast(Vec4, __builtin_nontemporal_load((const GLOBAL Word4*)p));
}

template <class T> DEVICE void store_plain(T* p, T v, u32) { *(GLOBAL Raw<T>*)p = __builtin_bit_cast(Raw<T>, v); }
template <class T> DEVICE T load_plain(const T* p, u32) { return __builtin_bit_cast(T, *(const GLOBAL Raw<T>*)p); }

// 16 bytes go as two 8-byte atomics: nothing wider has a scope here, except buffer accesses, which need a base that is
// the same for all lanes.
struct Halves {
  u64 h[2];
};
#define SCOPED(suffix, scope)                                                                                         \
  template <class T> DEVICE void store##suffix(T* p, T v, u32) {                                                      \
    if constexpr (sizeof(T) == 16) {                                                                                  \
      Halves halves = __builtin_bit_cast(Halves, v);                                                                  \
      for (int i = 0; i < 2; ++i) __hip_atomic_store((GLOBAL u64*)p + i, halves.h[i], __ATOMIC_RELAXED, scope);       \
    } else {                                                                                                          \
      __hip_atomic_store((GLOBAL Raw<T>*)p, __builtin_bit_cast(Raw<T>, v), __ATOMIC_RELAXED, scope);                  \
    }                                                                                                                 \
  }                                                                                                                   \
  template <class T> DEVICE T load##suffix(const T* p, u32) {                                                         \
    if constexpr (sizeof(T) == 16) {                                                                                  \
      Halves halves;                                                                                                  \
      for (int i = 0; i < 2; ++i) halves.h[i] = __hip_atomic_load((const GLOBAL u64*)p + i, __ATOMIC_RELAXED, scope); \
      return __builtin_bit_cast(T, halves);                                                                           \
    } else {                                                                                                          \
      return __builtin_bit_cast(T, __hip_atomic_load((const GLOBAL Raw<T>*)p, __ATOMIC_RELAXED, scope));              \
    }                                                                                                                 \
  }
SCOPED(_device, __HIP_MEMORY_SCOPE_AGENT)
SCOPED(_system, __HIP_MEMORY_SCOPE_SYSTEM)
#undef SCOPED

DEVICE void store_pair(Pair* p, Pair v) { store_device(p, v, v.tag); }
DEVICE Pair load_pair(const Pair* p, u32 tag) { return load_device(p, tag); }
DEVICE void load_pairs(const Pair* p, u32 tag, Pair (&got)[2]) {
  got[0] = load_pair(p, tag), got[1] = load_pair(p + 1, tag);
}
DEVICE Pair load_flag(const Pair* p, u32 tag) { return load_pair(p, tag); }
DEVICE void store_pair_system(Pair* p, Pair v) { store_system(p, v, v.tag); }
DEVICE Pair load_pair_system(const Pair* p, u32 tag) { return load_system(p, tag); }
DEVICE void publish(Pair* p, Pair v) { store_pair(p, v); }
DEVICE void publish_system(Pair* p, Pair v) { store_pair_system(p, v); }
DEVICE bool claim(u32* p) {
  u32 zero = 0;
  return __hip_atomic_compare_exchange_strong((GLOBAL u32*)p, &zero, 1u, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                              __HIP_MEMORY_SCOPE_AGENT);
}

// The store counter is per wave and neither a barrier nor a workgroup fence waits for it. The signal fences keep the
// compiler from moving stores across: to it, s_waitcnt touches no memory.
DEVICE void drain() {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}
// A release fence is "write back L2, then vmcnt(0)", but clang 22 drops that wait when it believes that nothing is
// outstanding, as after drain(): it does not count the write-back. The flag would overtake it. So wait again.
DEVICE void release_device() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  drain();
}
DEVICE void release_system() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  drain();
}
DEVICE void acquire_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
DEVICE void acquire_system() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }

DEVICE int lowest_bit(u64 v) { return __builtin_ctzll(v); }
DEVICE int count_bits(u32 v) { return __builtin_popcount(v); }

#if defined(__gfx950__)
#define NATIVE_PACK_BF16
DEVICE u32 native_pack_bf16(float low, float high) {  // v_cvt_pk_bf16_f32, nearest even
  typedef __bf16 Bf16x2 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, Bf16x2{(__bf16)low, (__bf16)high});
}
#endif

// Tiles: a lane holds 16 bytes of one row.
#if defined(__gfx950__)
#define FP8_FNUZ 0
#else
#define FP8_FNUZ 1  // of the matrix and conversion instructions; checkpoints are OCP
#endif
constexpr int PIECES = 1, ACC = 4;
struct Frag {
  u32 w[1][4];
};
struct Acc {
  float v[4];
};
DEVICE int frag_row(int) { return lane_id() % 16; }
DEVICE int frag_chunk() { return lane_id() / 16; }
DEVICE int acc_row(int i) { return lane_id() / 16 * 4 + i; }
DEVICE int acc_col(int) { return lane_id() % 16; }

typedef float Float4 __attribute__((ext_vector_type(4)));
template <bool A_IS_BF16 = false> DEVICE void mma_f32(const Frag& a, const Frag& b, Acc& acc,
                                                      bool = true) {  // instruction i takes element i of every chunk
  Float4 c = __builtin_bit_cast(Float4, acc), x = __builtin_bit_cast(Float4, a), y = __builtin_bit_cast(Float4, b);
  UNROLL for (int i = 0; i < 4; ++i) c = __builtin_amdgcn_mfma_f32_16x16x4f32(x[i], y[i], c, 0, 0, 0);
  acc = __builtin_bit_cast(Acc, c);
}
DEVICE void mma_bf16(const Frag& a, const Frag& b, Acc& acc, bool = true) {
  Float4 c = __builtin_bit_cast(Float4, acc);
#if defined(__gfx950__)
  typedef __bf16 Bf16x8 __attribute__((ext_vector_type(8)));
  c = __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Bf16x8, a), __builtin_bit_cast(Bf16x8, b), c, 0, 0, 0);
#else  // two instructions of half the depth: instruction i takes elements 4i ... 4i + 3 of every chunk
  typedef short Short4 __attribute__((ext_vector_type(4)));
  struct Parts {
    Short4 h[2];
  } x = __builtin_bit_cast(Parts, a), y = __builtin_bit_cast(Parts, b);
  UNROLL for (int i = 0; i < 2; ++i) c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.h[i], y.h[i], c, 0, 0, 0);
#endif
  acc = __builtin_bit_cast(Acc, c);
}
DEVICE void mma_fp8(const Frag& a, const Frag& b, Acc& acc,
                    bool = true) {  // instruction i takes bytes 8i ... 8i + 7 of every chunk
  Float4 c = __builtin_bit_cast(Float4, acc);
  struct Parts {
    long h[2];
  } x = __builtin_bit_cast(Parts, a), y = __builtin_bit_cast(Parts, b);
  UNROLL for (int i = 0; i < 2; ++i) c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(x.h[i], y.h[i], c, 0, 0, 0);
  acc = __builtin_bit_cast(Acc, c);
}

// 16 bytes of OCP e4m3 as bf16, exactly.
typedef __bf16 Bf16x2 __attribute__((ext_vector_type(2)));
DEVICE void fp8_to_bf16(const u32 (&from)[4], u32 (&to)[8]) {
#if defined(__gfx950__)
  UNROLL for (int i = 0; i < 4; ++i) {
    to[2 * i] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(from[i], 1.f, false));
    to[2 * i + 1] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(from[i], 1.f, true));
  }
#else  // its converter is FNUZ. Exponent and mantissa to their places in bf16, then times 2^120, subnormals too
  typedef short Short2 __attribute__((ext_vector_type(2)));
  typedef float Float2 __attribute__((ext_vector_type(2)));
  u32 nan = 0;  // bit 7 of a byte: somewhere there is one
  UNROLL for (int i = 0; i < 8; ++i) {
    u32 spread = __builtin_amdgcn_perm(0, from[i / 2], i % 2 ? 0x030c020c : 0x010c000c);  // each byte above a zero
    u32 placed = __builtin_bit_cast(u32, __builtin_bit_cast(Short2, spread) >> (Short2)4) & 0x87f087f0;
    Float2 two = __builtin_bit_cast(Float2, (u64)(placed & 0xffff0000) << 32 | placed << 16) * 0x1p120f;
    struct Words {
      u32 low, high;
    } words = __builtin_bit_cast(Words, two);
    to[i] = __builtin_amdgcn_perm(words.high, words.low, 0x07060302);
    if (i % 2) nan |= (from[i / 2] & 0x7f7f7f7f) + 0x01010101;
  }
  if (nan & 0x80808080) UNROLL for (int i = 0; i < 8; ++i) {
      u32 spread = __builtin_amdgcn_perm(0, from[i / 2], i % 2 ? 0x0c030c02 : 0x0c010c00);
      u32 is_nan = ((spread & 0x007f007f) + 0x00010001) & 0x00800080;
      to[i] |= (is_nan << 8) - (is_nan >> 1);  // 0x7fc0
    }
#endif
}

#if !defined(__gfx950__)
// 16 bytes of FNUZ e4m3 as bf16, exactly: what its own converter is for. 0x80 becomes NaN; packers leave none.
#define NATIVE_FNUZ
DEVICE void fnuz_to_bf16(const u32 (&from)[4], u32 (&to)[8]) {
  UNROLL for (int i = 0; i < 8; ++i) {
    auto two = i % 2 ? __builtin_amdgcn_cvt_pk_f32_fp8(from[i / 2], true)
                     : __builtin_amdgcn_cvt_pk_f32_fp8(from[i / 2], false);
    float low = two[0],
          high = two[1];  // a bit cast of a vector's element casts its first, whichever was meant (clang 22)
    to[i] = __builtin_amdgcn_perm(__builtin_bit_cast(u32, high), __builtin_bit_cast(u32, low), 0x07060302);
  }
}
#endif
#if defined(__gfx950__)
// Scaled products, 128 deep: E2M1 weights, of which lane group g (frag_chunk) holds k = 32g and the next 31 in 16 bytes, and
// e4m3 activations, of which it holds the 16 from 16g on in x[0] and the 16 from 64 + 16g on in x[1]. Scales: in both cases
// the group's is for k = 32g and the next 31, so of x not for the numbers beside it.
#define NATIVE_MX
#define NATIVE_E2M1
DEVICE void mma_mxfp4(const Frag& weights, u32 weight_scale, const Frag (&x)[2], u32 x_scale, Acc& acc) {
  typedef int Word8 __attribute__((ext_vector_type(8)));
  constexpr int E4M3 = 0, E2M1 = 4;
  Word8 a = {}, b;
  UNROLL for (int i = 0; i < 4; ++i) { a[i] = weights.w[0][i], b[i] = x[0].w[0][i], b[i + 4] = x[1].w[0][i]; }
  Float4 c = __builtin_bit_cast(Float4, acc);
  c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, E2M1, E4M3, 0, weight_scale, 0, x_scale);
  acc = __builtin_bit_cast(Acc, c);
}
DEVICE void native_e2m1_to_bf16(u32 eight, float scale, u32 (&out)[4]) {
  out[0] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(eight, scale, 0));
  out[1] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(eight, scale, 1));
  out[2] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(eight, scale, 2));
  out[3] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(eight, scale, 3));
}
#endif
