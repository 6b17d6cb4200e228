// Names that every target shares. No standard header: kernels are compiled without one on AMD.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using i32 = int;
using f32 = float;
using u64 = unsigned long long;

#if defined(__clang__) || defined(__CUDACC__)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#else
#define UNROLL _Pragma("GCC unroll 64")
#define ROLLED _Pragma("GCC unroll 1")
#endif

// A 32-bit payload and the epoch it belongs to, written and read as one 8-byte access.
struct alignas(8) Pair {
  u32 payload, tag;
};

struct alignas(16) Vec4 {
  u32 w[4];
};

constexpr u32 ANY_EPOCH = 0xffffffffu;
