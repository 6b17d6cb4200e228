// One fault each, chosen by `fault`: what the host target has to report, and how.
#include "platform/numeric.h"

enum Stage : u32 { FIRST, SECOND };

struct Args {  // mirrored in test_faults.py
  u32 fault;
  Pair* flags;
  u32* data;
  const u32* lost;
};

SHARED(u32, words, 256);
SHARED(u32, count, 4);

DEVICE u32 deep(u32 n, const volatile u32* seed) {
  volatile u32 room[1024];
  for (int i = 0; i < 1024; ++i) room[i] = *seed + i;
  return n ? deep(n - 1, room + n) + room[5] : room[7];
}

DEVICE u32 wait_for(const Pair* flag, u32 tag) {
  Pair got = load_pair(flag, tag);
  for (; got.tag != tag; got = load_pair(flag, tag)) pause();
  return got.payload;
}

// Block 0 has read the word before block 1 changes it, and reads again without acquire.
DEVICE void stale(const Args& p) {
  if (block_id() == 0) {
    u32 old = load_plain(p.data, ANY_EPOCH);
    block_barrier();
    if (thread_id() == 0) publish(&p.flags[0], {old, 1});
    wait_for(&p.flags[1], 1);
    if (p.fault == 8) acquire_device();
    store_device(p.data + 1 + thread_id(), load_plain(p.data, ANY_EPOCH), 1u);
  } else if (thread_id() < 64) {
    wait_for(&p.flags[0], 1);
    if (thread_id() == 0) store_device(p.data, 7u, 1);
    drain();
    if (thread_id() == 0) publish(&p.flags[1], {0, 1});
  }
}

KERNEL void faults(const Args* args) {
  const Args p = *args;
  u32 t = thread_id();
  mark(FIRST, 0, 1);
  if (p.fault == 1) words[t + (t == 200) * 100] = t;
  if (p.fault == 2 && t < 64) t < 32 ? (void)wave_any(true) : (void)wave_sum(1.f);
  if (p.fault == 3)
    while (load_pair(p.flags, 1).tag != 1) continue;
  if (p.fault == 4) words[t] = load_constant(p.lost);
  if (p.fault == 5 && t != 77) block_barrier();
  if (p.fault == 6 && t == 0) words[0] = deep(30, &p.fault);
  if (p.fault == 7 || p.fault == 8) stale(p);
  if (p.fault == 9) store_device(p.data, t, 1);
  if (p.fault == 10 || p.fault == 11) {
    if (t == 0) count[0] = 0;
    block_barrier();
    mark(SECOND, 3, 1);
    lds_add(count, 0, 1);
    if (p.fault == 11) block_barrier();
    if (t == 5) words[0] = count[0];
  }
  if (p.fault == 12 && t < 64) {
    Frag a = {};
    Acc acc = {};
    t < 32 ? mma_f32(a, a, acc) : mma_bf16(a, a, acc);
    words[t] = acc.v[0] != 0;
  }
  if (p.fault >=
      19) {  // 19: a lane of the wave without its barrier, 20: with it, 21: with it, but a thread of another wave
    if (t == 3) words[0] = 5u;
    if (p.fault >= 20) wave_barrier();
    if (t == (p.fault == 21 ? 200 : 7)) words[1] = words[0];
  }
  if (p.fault == 13) store_plain((u32*)((char*)p.data + 2), 1u, 1);
  if (p.fault == 14) words[t] = load_device(p.lost, ANY_EPOCH);
  if (p.fault == 15) words[t] = load_device(p.data + 1020 + t, ANY_EPOCH);
  if (p.fault == 16 && t == 0) {
    mark(SECOND, 5, 2);
    wait_for(&p.flags[3], 9);
  }
  if (p.fault == 17 && t == 0)  // not by pairs: nobody will ever set it
    while (load_device(p.data + 9, ANY_EPOCH) != 1) pause();
  if (p.fault == 18) {  // a lane reads its accumulator where others do not
    Frag a = {};
    a.w[0][0] = 0x3f803f80;
    Acc acc = {}, other = {};
    for (int i = 0; i < 20; ++i) {
      mma_bf16(a, a, i % 3 ? acc : other);
      if (lane_id() % 5 == i % 5) words[t] = (u32)acc.v[0];
    }
    Acc copy = other;
    if (lane_id() < 16) store_device(p.data + t, (u32)(acc.v[0] + 1000 * copy.v[0]), 1);
  }
}
