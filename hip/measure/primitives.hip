// Each kernel uses one group of primitives. rocmega/selftest/primitives.py and tests/platform say what should come out.
constexpr int LDS_WORDS = 1024;
#include "tile/quantize.h"

struct Args {  // mirrored in rocmega/selftest/primitives.py
  const void *a, *b;
  u32 *out, *out2;
  u32 n;
};

SHARED(f32, floats, 64);

// out: [5][threads] sum, max (low and high word), ballot, any; out2: [threads] what lane (7 * lane + 3) has
KERNEL void wave_ops(const Args* args) {
  Const<Args> p = as_const(args);
  const u32* in = (const u32*)p->a;
  int t = thread_id();
  u32 v = load_constant(in + t);
  u64 most = wave_max((u64)v << 20 | t), ballot = wave_ballot(v & 1);
  store_plain(p->out + t, bits<u32>(wave_sum((f32)(v % 1000) * 0.37f)), 1);
  store_plain(p->out + THREADS + t, (u32)most, 1);
  store_plain(p->out + 2 * THREADS + t, (u32)(most >> 32), 1);
  store_plain(p->out + 3 * THREADS + t, (u32)(WIDTH == 64 && lane_id() % 2 ? ballot >> 32 : ballot), 1);
  store_plain(p->out + 4 * THREADS + t, (u32)wave_any(v == 77), 1);
  store_plain(p->out2 + t, wave_read(v, (7 * lane_id() + 3) % WIDTH), 1);
}

// out: [64] histogram of a[] % 64, [1] bits or'ed, [64] sum over lane quads read at once; out2: [2] block_any, block_sum
KERNEL void lds_ops(const Args* args) {
  Const<Args> p = as_const(args);
  int t = thread_id();
  u32 v = load_constant((const u32*)p->a + t);
  if (t < 65) lds[t] = 0;
  if (t < 64) floats[t] = t;
  block_barrier();
  lds_add(lds, v % 64, 1);
  lds_or(lds, 64, 1u << v % 32);
  block_barrier();
  if (t < 65) store_plain(p->out + t, (u32)lds[t], 1);
  if (t < 16) {
    Vec4 four = lds_load4(floats, 4 * t);
    f32 sum = 0;
    for (int i = 0; i < 4; ++i) sum += bits<f32>(four.w[i]);
    store_plain(p->out + 65 + t, bits<u32>(sum), 1);
  }
  bool any = block_any(v == 77);
  f32 sum = block_sum((f32)(v % 1000) * 0.37f);
  if (t == 0) store_plain(p->out2, (u32)any, 1), store_plain(p->out2 + 1, bits<u32>(sum), 1);
}

// Copies 4, 8 and 16 bytes a thread from out2 to out, by loads and stores of one scope: [threads] of each width
#define COPY(scope)                                                                  \
  KERNEL void copy_##scope(const Args* args) {                                       \
    Const<Args> p = as_const(args);                                                  \
    u32* to = p->out;                                                                \
    const u32* from = p->out2;                                                       \
    int t = thread_id();                                                             \
    store_##scope(to + t, load_##scope(from + t, ANY_EPOCH), 1);                     \
    to += THREADS, from += THREADS;                                                  \
    store_##scope((u64*)to + t, load_##scope((const u64*)from + t, ANY_EPOCH), 1);   \
    to += 2 * THREADS, from += 2 * THREADS;                                          \
    store_##scope((Vec4*)to + t, load_##scope((const Vec4*)from + t, ANY_EPOCH), 1); \
  }
COPY(plain)
COPY(device)
COPY(system)

// out: [4 * threads] streamed from a; out2: [threads] who claimed
KERNEL void streams(const Args* args) {
  Const<Args> p = as_const(args);
  int t = thread_id();
  store_plain((Vec4*)p->out + t, load_weights((const Vec4*)p->a + t), 1);
  store_plain(p->out2 + 1 + t, (u32)claim(p->out2), 1);
}

// Block 0 tells block 1 by a flag, through plain stores and through device stores. out: [3 * threads], out2: [2] flags
KERNEL void hand_over(const Args* args) {
  Const<Args> p = as_const(args);
  Args whole = copy_of(p);
  Pair* flags = (Pair*)whole.out2;
  int t = thread_id();
  if (block_id() == 0) {
    store_plain(whole.out + t, 3u * t, 1);
    store_device(whole.out + THREADS + t, 5u * t, 1);
    drain();
    block_barrier();
    if (t == 0) {
      release_device();
      publish(flags, {7, 1});
      release_system();
      publish(flags + 1, {8, 1});
    }
  } else if (block_id() == 1) {
    Pair got{};
    do got = load_pair(flags, 1), pause();
    while (got.tag != 1);
    acquire_device();
    u32 sum = got.payload + load_plain(whole.out + t, 1) + load_device(whole.out + THREADS + t, 1);
    acquire_system();
    store_plain(whole.out + 2 * THREADS + t, sum, 1);
  }
}

// One tile product per wave 0: a, b tiles of 64 slots (chunk * 16 + row) of 16 bytes; out [16][16]; n: 0 f32, 1 bf16, 2 fp8,
// 3 fp8 by way of bf16 (b is bf16, two units per chunk: [2][64] slots), 4 bf16 by way of f32 (b is f32, likewise)
DEVICE Frag slot(const void* tile) {
  Frag f;
  UNROLL for (int piece = 0; piece < PIECES; ++piece) {
    Vec4 v = load_weights((const Vec4*)tile + frag_chunk() * 16 + frag_row(piece));
    UNROLL for (int i = 0; i < 4; ++i) f.w[piece][i] = v.w[i];
  }
  return f;
}
KERNEL void tiles(const Args* args) {
  Const<Args> p = as_const(args);
  if (wave_id() != 0) return;
  Frag a = slot(p->a), b = slot(p->b), two[2];
  Acc acc = {};
  if (p->n == 0) mma_f32(a, b, acc), mma_f32(b, a, acc);
  if (p->n == 1) mma_bf16(a, b, acc), mma_bf16(b, a, acc);
  if (p->n == 2) mma_fp8(a, b, acc), mma_fp8(b, a, acc);
  if (p->n >= 3) {
    if (p->n == 3) frag_fp8_to_bf16(a, two);
    if (p->n == 4) frag_bf16_to_f32(a, two);
    UNROLL for (int i = 0; i < 2; ++i) {
      Frag x = slot((const Vec4*)p->b + i * 64);
      if (p->n == 3) mma_bf16(two[i], x, acc);
      if (p->n == 4) mma_f32(two[i], x, acc);
    }
  }
  UNROLL for (int i = 0; i < ACC; ++i) store_plain(p->out + acc_row(i) * 16 + acc_col(i), bits<u32>(acc.v[i]), 1);
}

// out: [3][256] fp8_ocp, fp8_fnuz, e8m0 of the thread; [256] e2m1 (low nibble); out2: [256][8] e2m1_to_bf16 of
// all 16 codes with scale t
KERNEL void decode_all(const Args* args) {
  Const<Args> p = as_const(args);
  u32 t = thread_id();
  store_plain(p->out + t, bits<u32>(fp8_ocp(t)), 1);
  store_plain(p->out + 256 + t, bits<u32>(fp8_fnuz(t)), 1);
  store_plain(p->out + 512 + t, bits<u32>(e8m0(t)), 1);
  store_plain(p->out + 768 + t, bits<u32>(e2m1(t & 15)), 1);
  UNROLL for (int half = 0; half < 2; ++half) {
    u32 wide[4];
    e2m1_to_bf16(half ? 0xfedcba98u : 0x76543210u, t, wide);
    UNROLL for (int i = 0; i < 4; ++i) store_plain(p->out2 + 8 * t + 4 * half + i, wide[i], 1);
  }
}

// out: fp8_to_bf16 of the n * 16 bytes of a;  out2: fnuz_to_bf16 of them
KERNEL void widen(const Args* args) {
  Const<Args> p = as_const(args);
  for (u32 i = thread_id(); i < p->n; i += THREADS) {
    Vec4 v = load_constant((const Vec4*)p->a + i);
    u32 wide[8];
    fp8_to_bf16(v.w, wide);
    UNROLL for (int j = 0; j < 8; ++j) store_plain(p->out + 8 * i + j, wide[j], 1);
    fnuz_to_bf16(v.w, wide);
    UNROLL for (int j = 0; j < 8; ++j) store_plain(p->out2 + 8 * i + j, wide[j], 1);
  }
}

// For n floats of a: out: to_fp8_ocp | to_fp8_fnuz << 8 | to_bf16 << 16
KERNEL void encode(const Args* args) {
  Const<Args> p = as_const(args);
  for (u32 i = thread_id(); i < p->n; i += THREADS) {
    f32 f = load_constant((const f32*)p->a + i);
    store_plain(p->out + i, to_fp8_ocp(f) | to_fp8_fnuz(f) << 8 | to_bf16(f) << 16, 1);
  }
}

// n groups of 128 bf16 numbers of a, quantized in LDS as activations are. out: [n][64] words, as they are left there
template <class Quantize> DEVICE void in_groups(Const<Args> p, Quantize quantize) {
  constexpr u32 AT_ONCE = LDS_WORDS / 64;
  for (u32 from = 0; from < p->n; from += AT_ONCE) {
    u32 count = p->n - from < AT_ONCE ? p->n - from : AT_ONCE;
    for (u32 i = thread_id(); i < count * 64; i += THREADS) lds[i] = load_constant((const u32*)p->a + from * 64 + i);
    block_barrier();
    int each = ((int)count + WAVES - 1) / WAVES, mine = wave_id() * each, left = (int)count - mine;  // a wave's own
    quantize(mine, left < 0 ? 0 : left < each ? left : each);
    block_barrier();
    for (u32 i = thread_id(); i < count * 64; i += THREADS) store_plain(p->out + from * 64 + i, (u32)lds[i], 1);
    block_barrier();
  }
}
KERNEL void groups_fp8(const Args* args) {
  in_groups(as_const(args),
            [](int first, int groups) { quantize_fp8(groups, [first](int i) { return (first + i) * 16; }); });
}
KERNEL void groups_mx(const Args* args) {
  in_groups(as_const(args),
            [](int first, int groups) { quantize_mx(groups * 4, [first](int i) { return first * 16 + i * 4; }); });
}

// For n floats of a: out: exp_exact, out2: exp2_exact; then sigmoid and silu, n further on
KERNEL void functions(const Args* args) {
  Const<Args> p = as_const(args);
  for (u32 i = thread_id(); i < p->n; i += THREADS) {
    f32 f = load_constant((const f32*)p->a + i);
    store_plain(p->out + i, bits<u32>(exp_exact(f)), 1);
    store_plain(p->out2 + i, bits<u32>(exp2_exact(f)), 1);
    store_plain(p->out + p->n + i, bits<u32>(sigmoid(f)), 1);
    store_plain(p->out2 + p->n + i, bits<u32>(silu(f)), 1);
  }
}
