// Reads memory once, as fast as a kernel of ours can: what percentages of bandwidth are percentages of.
#include "platform/platform.h"

constexpr int AHEAD = 8;  // loads in flight a lane

struct ReadArgs {
  const Vec4* data;
  u32* sums;   // [n_blocks][THREADS]: exclusive ors of what each thread read
  u64 chunks;  // of THREADS * AHEAD vectors
};

KERNEL void read_memory(const ReadArgs* args) {
  Const<ReadArgs> a = as_const(args);
  const Vec4* data = a->data;
  u32 sum = 0;
  for (u64 chunk = block_id(); chunk < a->chunks; chunk += n_blocks()) {
    Vec4 v[AHEAD];
    const Vec4* from = data + chunk * (THREADS * AHEAD) + thread_id();
    UNROLL for (int i = 0; i < AHEAD; ++i) v[i] = load_weights(from + i * THREADS);
    UNROLL for (int i = 0; i < AHEAD; ++i) sum ^= v[i].w[0] ^ v[i].w[1] ^ v[i].w[2] ^ v[i].w[3];
  }
  store_plain(a->sums + block_id() * THREADS + thread_id(), sum, 0u);
}
