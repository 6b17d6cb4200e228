// What device code may use. Exactly one of amd.h, nvidia.h and host.h defines the names listed here; types.h holds what
// can be written once. Nothing else in hip/ or models/ knows its target.
//
//  Shape     WIDTH lanes a wave, WAVES waves and THREADS threads a block
//            thread_id() wave_id() lane_id() block_id() n_blocks() xcc_id()
//  LDS       SHARED(T, name, N)        array of N 4-byte words, at namespace scope
//            SHARED_LARGE(T, name, N)  the one array that may be larger than 48 KB with the others; one per kernel
//            lds_load4(name, i) -> Vec4                four words at once, i a multiple of 4
//            lds_add(name, i, v) lds_or(name, i, v)    atomic on a u32 word of LDS; return the old value
//            block_barrier()           orders LDS; does NOT wait for stores to global memory
//            wave_barrier()            the same among the lanes of a wave, for LDS that only this wave uses
//  Wave      wave_sum(f) wave_max(u32) wave_max(u64) wave_any(b) wave_ballot(b) -> u64 wave_read(u32, lane)   collective over the wave
//            uniform(u32)              a value that all lanes have, for where the compiler must know it
//  Memory    T is 4, 8 or 16 bytes. Every access to shared data names its epoch: only the host target looks at it (it
//            knows of each copy of each word in which epoch it was written), so a load that gets another epoch's word is
//            reported whatever its value. ANY_EPOCH: data of an earlier launch.
//            store_plain(p, v, epoch) load_plain(p, epoch)     cached: another XCD sees nothing before release / acquire
//            store_device(p, v, epoch) load_device(p, epoch)   past the XCD's L2
//            store_system(p, v, epoch) load_system(p, epoch)   past everything, for peers
//            load_constant(p)                      data that nobody writes during the launch
//            load_weights(p) -> Vec4               16 bytes of it, streamed: read once
//            store_pair(p, Pair) load_pair(p, tag) 8 bytes at once, device scope: a payload and the epoch tag it is of
//            load_flag(p, tag)                     the same where a later tag will do: the word may be stored again under it
//            load_pairs(p, tag, Pair(&)[2])        two neighbours, from a 16-byte address; each arrives whole, in any order
//            store_pair_system(p, Pair) load_pair_system(p, tag)   the same for memory that other ranks write
//            publish(p, Pair)                      the pair store that announces what the whole block stored and drained
//            publish_system(p, Pair)               the same, to a rank that it was stored for
//            drain()                               collective over the wave: its stores have arrived (in L2 if plain, in
//                                                  memory otherwise)
//            release_device() acquire_device() release_system() acquire_system()
//            claim(p)                              true for the one caller that turns *p from 0 to 1
//            Const<T>, as_const(p), copy_of(p)     pointer type for structs in memory nobody writes during the launch
//            fresh(p)                              the same, but what was read through it need not stay in registers
//            NEAR(T, name, N) bring_near(name, i, from) brought_near() nearby(name, i, from) -> Const<T>
//                                                  room for N such structs where that is closer than memory: brought without
//                                                  waiting, there for the block after brought_near(); else `from` itself
//            nearby_again(name, i, p)              what nearby() gave, as fresh() does
//            copy_of(Const<T>)                     the whole struct; a field is read as p->field or p[i].field
//  Other     STAGE  for the functions that a mega-task consists of, where DEVICE would inline    COLD  for what seldom runs
//            lowest_bit(u64)   count_bits(u32)   pause()  in every spin     clock_ticks()  constant rate     mark(stage, task, epoch)  for host reports
//  Tiles     A product is Acc[row][col] += sum over k of A[row][k] B[col][k], 16 rows, 16 columns. A row of A or B has 64
//            bytes, four chunks of 16. Frag: w[PIECES][4], the chunk frag_chunk() of row frag_row(piece). Acc: v[ACC], the
//            elements acc_row(i), acc_col(i). To be copied and accessed by v[i], nothing else: on the host products are
//            done late. All lanes of a wave do the same products.
//            mma_f32<A_IS_BF16>(a, b, acc, wide) 16 k, A_IS_BF16: A's numbers are those of bf16, a hint     mma_bf16 32 k     mma_fp8 64 k, of the kind FP8_FNUZ says (0: OCP e4m3)
//            wide: whether columns 8 ... 15 count; a hint, false where fewer than nine columns are in use
//            mma_mxfp4(weights, their scale, x, its scale, acc)  128 k of MXFP4 by MXFP8, where NATIVE_MX is defined: its own
//            order of k is with it
//  numeric.h has what can be written once: conversions, exp, sums in a fixed order.
#pragma once
#include "types.h"

#if defined(__HIP__)
#include "amd.h"
#elif defined(__CUDACC__)
#include "nvidia.h"
#else
#include "host.h"
#endif

constexpr int THREADS = WAVES * WIDTH;
