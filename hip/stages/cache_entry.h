// The step's own entry in the paged caches: the normalized latent with the rotated shared key, and in layers with an indexer
// its key.
#pragma once
#include "handoff/step.h"
#include "stages/input.h"
#include "stages/rope.h"
#include "tile/tile.h"

// Where a row's cached positions are: PAGE of them a page, pages by the row's line of the block table.
struct Pages {
  const u32* table;  // [ROWS][max_pages]
  u32 max_pages;

  DEVICE u64 slot(int row, u32 position) const {
    return (u64)load_constant(table + row * max_pages + position / PAGE) * PAGE + position % PAGE;
  }
};

// Channels 2 * pair and the next of a cache entry.
template <class F> DEVICE void put_cache(void* cache, u64 at, const f32 (&v)[2], u32 tag) {
  if constexpr (F::ACT_BYTES == 4)
    store_device((u64*)((f32*)cache + at), (u64)bits<u32>(v[1]) << 32 | bits<u32>(v[0]), tag);
  else
    store_device((u32*)((u16*)cache + at), pack_bf16(v[0], v[1]), tag);
}

struct CacheEntry {
  const f32 *latent_norm, *index_norm;  // [LATENT]; [2][INDEX] weight and bias, or null: no indexer
  f32 latent_eps, index_eps;
  const f32* rope;
  const u32* positions;
  Pages pages;
  void *latent_cache, *index_cache;
};

// A block's worth of one row's values, two channels a thread and turn.
template <int N> struct RowValues {
  static constexpr int TURNS = (N / 2 + THREADS - 1) / THREADS;
  const int me = thread_id();
  f32 v[TURNS][2];

  DEVICE int channel(int turn) const { return 2 * (turn * THREADS + me); }
  DEVICE bool take(Step& s, const PairRows& from, int row) {
    Pair got[2 * TURNS];
    auto k = [this](int i) { return channel(i / 2) < N ? channel(i / 2) + i % 2 : 0; };
    bool ok = from.take(s, row, k, got);
    UNROLL for (int i = 0; i < 2 * TURNS; ++i) v[i / 2][i % 2] = value_of(got[i]);
    return ok;
  }
  template <class Term> DEVICE f32 sum(Term term) const {
    f32 mine = 0;
    UNROLL for (int t = 0; t < TURNS; ++t) if (channel(t) < N) mine += term(v[t][0]) + term(v[t][1]);
    block_barrier();  // since the last block_sum
    return block_sum(mine);
  }
};

// LayerNorm, then RoPE on the first channels.
template <class F, int ROPE, int INDEX>
DEVICE void write_index_key(const RowValues<INDEX>& key, const CacheEntry& e, u32 position, u64 slot, u32 tag) {
  f32 mean = key.sum([](f32 v) { return v; }) / INDEX;
  f32 variance = key.sum([&](f32 v) { return (v - mean) * (v - mean); }) / INDEX;
  f32 scale = 1.f / __builtin_sqrtf(variance + e.index_eps);
  UNROLL for (int t = 0; t < key.TURNS; ++t) {
    int c = key.channel(t);
    if (c >= INDEX) continue;
    f32 v[2];
    for (int j = 0; j < 2; ++j)
      v[j] = (key.v[t][j] - mean) * scale * load_constant(e.index_norm + c + j) +
             load_constant(e.index_norm + INDEX + c + j);
    if (c < ROPE) rotate<ROPE>(e.rope, position, c, v);
    put_cache<F>(e.index_cache, slot * INDEX + c, v, tag);
  }
}

// Tasks: one a row.
//   in   kv [row][LATENT + ROPE] and index [row][INDEX ...] as tagged pairs
//   out  the row's entries of the two caches, written through, flag [row]
//   read by  attention and index scores of this layer in this step, after the flag; by later launches without
template <class F, int LATENT, int ROPE, int INDEX> DEVICE bool write_cache(Step& s, u32 stage, u32 tag,
                                                                            const PairRows& kv, const PairRows& index,
                                                                            const CacheEntry& e, Pair* flags) {
  for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
    s.begin(stage, row, tag);
    u32 position = load_constant(e.positions + row);
    u64 slot = e.pages.slot(row, position);
    RowValues<LATENT + ROPE> entry;
    RowValues<INDEX> key;
    bool ok = entry.take(s, kv, row);
    if (e.index_norm) ok = key.take(s, index, row) && ok;
    if (!s.all_ok(ok)) return false;
    s.input_is_there();

    f32 squares_of_latent = 0;
    UNROLL for (int t = 0; t < entry.TURNS; ++t) if (entry.channel(t) < LATENT) squares_of_latent +=
        entry.v[t][0] * entry.v[t][0] + entry.v[t][1] * entry.v[t][1];
    f32 scale = 1.f / __builtin_sqrtf(block_sum(squares_of_latent) / LATENT + e.latent_eps);
    UNROLL for (int t = 0; t < entry.TURNS; ++t) {
      int c = entry.channel(t);
      f32 v[2] = {entry.v[t][0], entry.v[t][1]};
      if (c < LATENT)
        for (int j = 0; j < 2; ++j) v[j] = v[j] * scale * load_constant(e.latent_norm + c + j);
      else if (c < LATENT + ROPE)
        rotate<ROPE>(e.rope, position, c - LATENT, v);
      if (c < LATENT + ROPE) put_cache<F>(e.latent_cache, slot * (LATENT + ROPE) + c, v, tag);
    }
    if (e.index_norm) write_index_key<F, ROPE, INDEX>(key, e, position, slot, tag);
    s.announce(flags + row, tag, Stored::THROUGH);
  }
  s.finish(s.rows);
  return true;
}
