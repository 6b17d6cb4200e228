// sm_90. Scopes as on AMD: plain accesses may hit the SM's L1, relaxed.gpu ones go to L2, which is coherent.
#pragma once

#define DEVICE __device__ __forceinline__
#define STAGE DEVICE
#define COLD DEVICE
#define KERNEL extern "C" __global__ __launch_bounds__(WAVES* WIDTH, 1)
#define SHARED(T, name, N) static __shared__ __align__(16) T name[N]
#define SHARED_LARGE(T, name, N) extern __shared__ __align__(16) T name[]  // its size comes with the launch

constexpr int WIDTH = 32, WAVES = 8;

DEVICE int thread_id() {  // opaque, as on AMD: what depends on it is worked out where it is used, not kept in registers
  int id = threadIdx.x;
  asm volatile("" : "+r"(id));
  return id;
}
DEVICE int block_id() { return blockIdx.x; }
DEVICE int n_blocks() { return gridDim.x; }
DEVICE int wave_id() { return (u32)thread_id() / WIDTH; }
DEVICE int lane_id() { return (u32)thread_id() % WIDTH; }
DEVICE int xcc_id() { return 0; }
DEVICE u64 clock_ticks() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
DEVICE void pause() {}
DEVICE int lowest_bit(u64 v) { return __ffsll((long long)v) - 1; }
DEVICE int count_bits(u32 v) { return __popc(v); }
DEVICE u32 uniform(u32 v) { return v; }
DEVICE void mark(u32, u32, u32) {}

// LDS
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void wave_barrier() { __syncwarp(); }
DEVICE u32 lds_add(u32* array, int i, u32 v) { return atomicAdd_block(array + i, v); }
DEVICE u32 lds_or(u32* array, int i, u32 v) { return atomicOr_block(array + i, v); }
template <class T> DEVICE Vec4 lds_load4(const T* array, int i) { return *(const Vec4*)(array + i); }

// Wave
DEVICE u32 wave_read(u32 v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE float wave_sum(float v) {
  for (int o = WIDTH / 2; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEVICE u32 wave_max(u32 v) { return __reduce_max_sync(~0u, v); }
DEVICE u64 wave_max(u64 v) {
  for (int o = WIDTH / 2; o; o /= 2) {
    u64 other = __shfl_xor_sync(~0u, v, o);
    v = other > v ? other : v;
  }
  return v;
}
DEVICE u64 wave_ballot(bool b) { return __ballot_sync(~0u, b); }
DEVICE bool wave_any(bool b) { return __any_sync(~0u, b); }

// Memory. PTX wants the width and the scope in the name of the instruction.
template <int Bytes> struct RawOf;
template <> struct RawOf<4> {
  using Type = u32;
};
template <> struct RawOf<8> {
  using Type = u64;
};
template <> struct RawOf<16> {
  using Type = Vec4;
};
template <class T> using Raw = typename RawOf<sizeof(T)>::Type;
template <class To, class From> DEVICE To raw_bits(From from) {
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

#define SCOPED(suffix, scope)                                                                                          \
  DEVICE void raw_store##suffix(u32* p, u32 v) {                                                                       \
    asm volatile("st.relaxed." scope ".global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");   \
  }                                                                                                                    \
  DEVICE void raw_store##suffix(u64* p, u64 v) {                                                                       \
    asm volatile("st.relaxed." scope ".global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");   \
  }                                                                                                                    \
  DEVICE void raw_store##suffix(Vec4* p, Vec4 v) {                                                                     \
    asm volatile("st.relaxed." scope ".global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(p)),         \
                 "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])                                                    \
                 : "memory");                                                                                          \
  }                                                                                                                    \
  DEVICE u32 raw_load##suffix(const u32* p) {                                                                          \
    u32 v;                                                                                                             \
    asm volatile("ld.relaxed." scope ".global.b32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory"); \
    return v;                                                                                                          \
  }                                                                                                                    \
  DEVICE u64 raw_load##suffix(const u64* p) {                                                                          \
    u64 v;                                                                                                             \
    asm volatile("ld.relaxed." scope ".global.b64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory"); \
    return v;                                                                                                          \
  }                                                                                                                    \
  DEVICE Vec4 raw_load##suffix(const Vec4* p) {                                                                        \
    Vec4 v;                                                                                                            \
    asm volatile("ld.relaxed." scope ".global.v4.b32 {%0,%1,%2,%3}, [%4];"                                             \
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])                                              \
                 : "l"(__cvta_generic_to_global(p))                                                                    \
                 : "memory");                                                                                          \
    return v;                                                                                                          \
  }                                                                                                                    \
  template <class T> DEVICE void store##suffix(T* p, T v, u32) { raw_store##suffix((Raw<T>*)p, raw_bits<Raw<T>>(v)); } \
  template <class T> DEVICE T load##suffix(const T* p, u32) { return raw_bits<T>(raw_load##suffix((const Raw<T>*)p)); }
SCOPED(_device, "gpu")
SCOPED(_system, "sys")
#undef SCOPED

template <class T> using Const = const T*;
template <class T> DEVICE Const<T> as_const(const T* p) { return p; }
template <class T> DEVICE Const<T> fresh(Const<T> p) {
  asm volatile("" : "+l"(p));
  return p;
}
template <class T> DEVICE T copy_of(const T* p) { return *p; }

template <class T> DEVICE T load_constant(const T* p) { return *p; }
// Weights are read once a step and are more than the L2 holds: what passes through leaves first, so that code, hand-offs and
// caches stay.
DEVICE u64 leaves_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE Vec4 load_weights(const void* p) {
  Vec4 v;
  asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0,%1,%2,%3}, [%4], %5;"
      : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
      : "l"(__cvta_generic_to_global(p)), "l"(leaves_first()));
  return v;
}
// Weights by way of LDS. In registers, what was on its way was spilled as soon as it was asked for, which waits for it (16
// waves of 128 registers, 12.9 and 13.0's ptxas, functions called or all inlined: 10 us for a tile row of 98 KB).
#define STREAM_BY_LDS
DEVICE void copy_to_lds(const u32* array, int word, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   (u32)__cvta_generic_to_shared(array + word)),
               "l"(__cvta_generic_to_global(from)), "l"(leaves_first())
               : "memory");
}
DEVICE void copy_word_to_lds(const u32* array, int word, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(array + word)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGER> DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory");
}
// What all stages ask for, in LDS: a look at memory is a trip, and each stage's first weights wait for theirs (GLM-5.2 on an
// H200: a stage took 0.6 to 1.2 us to its first load).
#define NEAR(T, name, N) SHARED(T, name, N)
template <class T> DEVICE Const<T> nearby(const T* array, int i, const T*) { return array + i; }
template <class T> DEVICE Const<T> nearby_again(const T* array, int i, Const<T>) {  // still known to be LDS
  u32 address = (u32)__cvta_generic_to_shared(array + i);
  asm volatile("" : "+r"(address));
  return (const T*)__cvta_shared_to_generic(address);
}
template <class T>
DEVICE void bring_near(T* array, int i, const T* from) {  // asynchronous, by every thread of the block
  static_assert(sizeof(T) % 4 == 0, "");
  for (u32 word = threadIdx.x; word < sizeof(T) / 4; word += WAVES * WIDTH)
    copy_word_to_lds((const u32*)(array + i), word, (const u32*)from + word);
  end_of_copies();
}
DEVICE void brought_near() {  // every thread of the block
  wait_for_copies<0>();
  block_barrier();
}
template <class T> DEVICE void store_plain(T* p, T v, u32) { *p = v; }
template <class T> DEVICE T load_plain(const T* p, u32) { return *p; }

DEVICE void store_pair(Pair* p, Pair v) { store_device(p, v, v.tag); }
DEVICE Pair load_pair(const Pair* p, u32 tag) { return load_device(p, tag); }
// Two neighbours by one instruction; PTX promises that each 8-byte element arrives whole.
DEVICE void load_pairs(const Pair* p, u32, Pair (&got)[2]) {
  u64 a, b;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  got[0] = raw_bits<Pair>(a), got[1] = raw_bits<Pair>(b);
}
DEVICE Pair load_flag(const Pair* p, u32 tag) { return load_pair(p, tag); }
DEVICE void store_pair_system(Pair* p, Pair v) { store_system(p, v, v.tag); }
DEVICE Pair load_pair_system(const Pair* p, u32 tag) { return load_system(p, tag); }
DEVICE bool claim(u32* p) { return atomicCAS(p, 0, 1) == 0; }

DEVICE void release_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void acquire_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void release_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE void acquire_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// PTX has no "my stores have arrived". Its promise is causality: the barrier orders the block's stores before the
// publisher, whose fence passes them on. So the waiting is in publish.
DEVICE void drain() { __syncwarp(); }
DEVICE void publish(Pair* p, Pair v) {
  release_device();
  store_pair(p, v);
}
DEVICE void publish_system(Pair* p, Pair v) {
  release_system();
  store_pair_system(p, v);
}

// Tiles: half the lanes of an AMD wave, so each holds a chunk of two rows.
#define FP8_FNUZ 0
constexpr int PIECES = 2, ACC = 8;
struct Frag {
  u32 w[2][4];
};
struct Acc {
  float v[8];
};
DEVICE int frag_row(int piece) { return (u32)lane_id() / 4 + 8 * piece; }
DEVICE int frag_chunk() { return (u32)lane_id() % 4; }
DEVICE int acc_row(int i) { return (u32)lane_id() / 4 + (i & 2) * 4; }
DEVICE int acc_col(int i) { return (u32)lane_id() % 4 * 2 + (i & 1) + (i & 4) * 2; }

#define MMA_16_BIT(name, type)                                                                         \
  DEVICE void name(const Frag& a, const Frag& b, Acc& acc, bool wide = true) {                         \
    UNROLL for (int half = 0; half < 2; ++half) { /* columns 0..7, and 8..15 if anybody is there */    \
      if (half && !wide) break;                                                                        \
      float* c = acc.v + 4 * half;                                                                     \
      UNROLL for (int k = 0; k < 4; k += 2) /* words k and k + 1 of each chunk: 16 of the 32 k */      \
          asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                   \
              ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]),               \
              "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.w[0][k]), "r"(a.w[1][k]), "r"(a.w[0][k + 1]), \
              "r"(a.w[1][k + 1]), "r"(b.w[half][k]), "r"(b.w[half][k + 1]));                           \
    }                                                                                                  \
  }
MMA_16_BIT(mma_bf16, "bf16")
MMA_16_BIT(mma_f16, "f16")
#undef MMA_16_BIT

// A float as the sum of two with 11 bits of mantissa, which is what the tensor core takes: its own sums then lose
// nothing of three of the four products, and the fourth is too small to matter.
struct Split {
  u32 high, low;
};
DEVICE u32 to_tf32(float v) {
  u32 u;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(v));
  return u;
}
DEVICE Split split(u32 word) {
  float v = __uint_as_float(word);
  u32 high = to_tf32(v);
  return {high, to_tf32(v - __uint_as_float(high))};
}
DEVICE void mma_tf32(const u32 (&a)[4], const u32 (&b)[2], float* c) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <bool A_IS_BF16 = false> DEVICE void mma_f32(const Frag& a, const Frag& b, Acc& acc, bool wide = true) {
  UNROLL for (int k = 0; k < 4; k += 2) {  // words k and k + 1 of each chunk: 8 of the 16 k
    u32 x_high[4] = {a.w[0][k], a.w[1][k], a.w[0][k + 1], a.w[1][k + 1]}, x_low[4] = {};
    if (!A_IS_BF16) UNROLL for (int i = 0; i < 4; ++i) {
        Split x = split(x_high[i]);
        x_high[i] = x.high, x_low[i] = x.low;
      }
    UNROLL for (int half = 0; half < 2; ++half) {
      if (half && !wide) break;
      Split y[2] = {split(b.w[half][k]), split(b.w[half][k + 1])};
      u32 y_high[2] = {y[0].high, y[1].high}, y_low[2] = {y[0].low, y[1].low};
      if (!A_IS_BF16) mma_tf32(x_low, y_high, acc.v + 4 * half);
      mma_tf32(x_high, y_low, acc.v + 4 * half);
      mma_tf32(x_high, y_high, acc.v + 4 * half);
    }
  }
}

// OCP e4m3 as bf16, exactly: every e4m3 number is one of fp16 too.
DEVICE u32 fp8x2_to_bf16(u32 two) {
  u32 halves, low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)two));
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(halves));
  return __byte_perm(low, high, 0x7632);
}
// OCP e4m3 as fp16, one instruction for two: FP8 weights meet activations in fp16 here (tile/half.h).
#define FP8_BY_F16
DEVICE u32 fp8x2_to_f16(u32 two) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)two));
  return halves;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#define NATIVE_PACK_BF16
DEVICE u32 native_pack_bf16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// Where fp16 will not do (products of a kind that other formats share).
// Shifting the bits into place and multiplying packed bf16 by 2^120 was tried and took twice the time of a whole unit's product
// (22 against 14 us for a gate and up task of GLM-5.2 on an H200).
DEVICE void fp8_to_bf16(const u32 (&from)[4], u32 (&to)[8]) {
  UNROLL for (int i = 0; i < 8; ++i) to[i] = fp8x2_to_bf16(from[i / 2] >> i % 2 * 16);
}
DEVICE void mma_fp8(const Frag& a, const Frag& b, Acc& acc,
                    bool wide = true) {  // by way of bf16, whose sums are kept with more bits
  Frag x[2], y[2];
  UNROLL for (int piece = 0; piece < 2; ++piece) {
    u32 wide[8];
    fp8_to_bf16(a.w[piece], wide);
    UNROLL for (int i = 0; i < 8; ++i) x[i / 4].w[piece][i % 4] = wide[i];
    fp8_to_bf16(b.w[piece], wide);
    UNROLL for (int i = 0; i < 8; ++i) y[i / 4].w[piece][i % 4] = wide[i];
  }
  UNROLL for (int i = 0; i < 2; ++i) mma_bf16(x[i], y[i], acc, wide);
}
