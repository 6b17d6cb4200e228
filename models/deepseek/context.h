// What all stages of a decode step share: the descriptor, tags and slots of the hand-off regions, and how the streams and a
// sublayer's input are published.
#pragma once
#include "model_config.h"  // the model's dimensions and formats, generated from its config.json

#include "deepseek/descriptor.h"
#include "deepseek/stages.h"
#include "handoff/reduce.h"
#include "stages/activations.h"
#include "stages/compress.h"
#include "stages/linear.h"
#include "stages/route.h"
#include "stages/sample.h"
#include "stages/streams.h"

using Act = ActivationsOf<Linear>;  // what activations are rounded to for big matrices, and the format of the caches
using Exact = Wide<Island>;         // for what decides something discrete, or is summed up: activations in f32
static_assert(Linear::ACT_BYTES == Act::ACT_BYTES && Expert::ACT_BYTES == Act::ACT_BYTES,
              "what is published for one matrix is read by several");
static_assert(!MANY_TOKENS, "a launch runs one token");
constexpr int PARTS = HIDDEN / TILE_ROWS, Q_PARTS = Q_LORA / TILE_ROWS, HEAD_PARTS = D / TILE_ROWS;  // sums of squares
constexpr bool HEAD_WEIGHTED = Head::ACT_BYTES != Act::ACT_BYTES;  // the head reads x in f32
constexpr int INDEX_Q = INDEX_HEADS * INDEX_DIM, GROUP_IN = HEADS / GROUPS * D;
using Sites = Streams<STREAMS, HIDDEN>;
struct RouterScore {
  DEVICE static f32 of(f32 logit) { return router_score(logit); }
};
using Router = Route<HIDDEN, RouterScore>;
using Slices = RouterSlices<HIDDEN>;

DEVICE constexpr int words(int activations) { return activations * Act::ACT_BYTES / 4; }

// The kinds of compressed entries that a model's layers attend to; a model with one has it twice.
template <int RATIO_, int POOLING_, bool KEYS_> struct Kind {
  static constexpr int RATIO = RATIO_;
  static constexpr Pooling POOLING = (Pooling)POOLING_;
  static constexpr bool KEYS = KEYS_;  // they have index keys with a compressor of their own

  DEVICE static constexpr int wide(int width) { return POOLING == Pooling::OVERLAP ? 2 * width : width; }
  DEVICE static constexpr int values(int width) { return POOLING == Pooling::NONE ? width : 2 * wide(width); }
};
using KindA = Kind<RATIO_A, POOLING_A, KEYS_A>;
using KindB = Kind<RATIO_B, POOLING_B, KEYS_B>;

struct Context {
  Const<DecodeArgs> a;
  Step s;
  const Pages pages;
  u32 version = 0;      // of the streams that the sublayer at hand takes: 2 * layer, or one more for experts
  bool scored = false;  // whether this layer's indexer runs
  bool wide_now = false, wide_next = false;  // whether somebody reads x(version), x(version + 1) in f32
  Router route;                              // of this layer
  Best best;                                 // this block's, of the row whose logits the thread sums

  DEVICE explicit Context(Const<DecodeArgs> a)
      : a(a), s(a->rows, a->rank, a->poll_limit, a->error, a->alarms), pages{a->block_table, a->max_pages} {
    clear_zeros();
#if TIMELINE
    s.timeline = {a->timeline, a->timeline_count, a->timeline_capacity};
#endif
  }

  DEVICE u32 layer() const { return version / 2; }
  DEVICE Const<LayerWeights> w() const { return as_const(a->weights) + layer(); }
  DEVICE Const<EngramWeights> engram() const { return as_const(a->engrams) + (w()->engram - 1); }
  DEVICE u32 tag(u32 of) const { return a->epoch + of; }
  DEVICE u32 next_tag() const { return tag(version + 1); }  // of all that this sublayer makes
  // The slot of a region, [ROWS][width], by version or layer.
  DEVICE static Pair* slot(Pair* region, u32 by, int width) { return region + (by & 1) * ROWS * (u32)width; }
  DEVICE PairRows of_layer(Pair* region, int width) const {
    return {slot(region, layer(), width), (u32)width, next_tag()};
  }

  // The kind of entries that the layer attends to, and what of it this layer makes itself.
  DEVICE bool makes_entries() const { return w()->kind && w()->source == layer(); }
  DEVICE bool kind_a() const { return w()->kind == 1; }
  DEVICE static u32 ratio_of(Const<LayerWeights> w) { return w->kind == 1 ? KindA::RATIO : KindB::RATIO; }
  DEVICE u32 ratio() const { return ratio_of(w()); }
  // Values and gates, side by side.
  DEVICE int entry_values() const { return !makes_entries() ? 0 : kind_a() ? KindA::values(D) : KindB::values(D); }
  DEVICE int key_values() const {
    if (!makes_entries()) return 0;
    constexpr int A = KindA::KEYS ? KindA::values(INDEX_DIM) : 0, B = KindB::KEYS ? KindB::values(INDEX_DIM) : 0;
    return kind_a() ? A : B;
  }
  DEVICE const f32* rope() const { return w()->kind ? a->stretched_rope : a->rope; }

  // Streams before a sublayer, with what Engram adds to them; its input in f32, times the weight of its norm as activations, and
  // its sums of squares.
  DEVICE PairRows h(u32 of) const { return {slot(a->h, of, Sites::WIDTH_ALL), Sites::WIDTH_ALL, tag(of)}; }
  DEVICE PairRows streams() const {
    if (!ENGRAM_DIM || version % 2 || version == 2 * a->layers || !w()->engram) return h(version);
    return {slot(a->h_engram, w()->engram, Sites::WIDTH_ALL), Sites::WIDTH_ALL, tag(version)};
  }
  DEVICE PairRows x(u32 of) const { return {slot(a->x, of, HIDDEN), HIDDEN, tag(of)}; }
  DEVICE PairRows x_normed(u32 of) const { return {slot(a->x_normed, of, words(HIDDEN)), (u32)words(HIDDEN), tag(of)}; }
  DEVICE PairRows x_squares(u32 of) const { return {slot(a->x_squares, of, PARTS), PARTS, tag(of)}; }
  DEVICE PairRows site(u32 of) const { return {slot(a->site, of, Sites::OUT), Sites::OUT, tag(of + 1)}; }
  // Whether a layer selects, and some row has more entries than a selection. If none has, nobody would wait for what the indexers
  // make of the queries, and a task that nobody waits for must not run: its inputs could be overwritten under it.
  DEVICE bool scores(Const<LayerWeights> w) const {
    if (!w->selects) return false;
    bool any = false;
    for (u32 row = 0; row < s.rows; ++row) any |= (load_constant(a->positions + row) + 1) / ratio_of(w) > INDEX_TOPK;
    return any;
  }
  // Whether somebody reads x(of) in f32. What nobody waits for must not be published either: it could arrive too late, over a
  // later version.
  DEVICE bool read_wide(u32 of) const {
    if (of == 2 * a->layers) return HEAD_WEIGHTED;
    Const<LayerWeights> w = as_const(a->weights) + of / 2;
    return of % 2 || (w->kind && w->source == of / 2) || scores(w);
  }
  // The norm that x(version) meets.
  DEVICE const f32* norm_of(u32 of) const {
    if (of == 2 * a->layers) return a->final_norm;
    Const<LayerWeights> w = as_const(a->weights) + of / 2;
    return of % 2 ? w->mlp.norm : w->attention.norm;
  }
  // Whether x(of) is made by the sublayer before, or by whoever embeds; if Engram adds to the streams, by that.
  DEVICE bool collapsed_before(u32 of) const {
    if (!DELAYED) return false;
    return !ENGRAM_DIM || of % 2 || of == 2 * a->layers || !(as_const(a->weights) + of / 2)->engram;
  }

  // What a norm reads, of two channels: eight threads in a row have the 16 of a part, and all of a wave come here.
  template <int N> DEVICE static void publish_normed(Pair* activations, Pair* sums, int row, int channel,
                                                     const f32 (&v)[2], const f32 (&norm)[2], bool there, u32 t) {
    f32 sum = sum_of_tile(there ? __builtin_fmaf(v[1], v[1], v[0] * v[0]) : 0.f);
    if (!there) return;
    put_words<Act>(activations + row * words(N), channel, {v[0] * norm[0], v[1] * norm[1]}, t);
    if (channel % TILE_ROWS == 0) put(sums + row * (N / TILE_ROWS) + channel / TILE_ROWS, sum, t);
  }
  DEVICE void publish_x(u32 of, int row, int channel, const f32 (&v)[2], bool there) const {
    f32 norm[2];
    load_channels(norm_of(of), there ? channel : 0, norm);
    publish_x(of, row, channel, v, norm, there);
  }
  DEVICE void publish_x(u32 of, int row, int channel, const f32 (&v)[2], const f32 (&norm)[2], bool there) const {
    u32 t = tag(of);
    if (there && (of == version ? wide_now : wide_next))
      for (int j = 0; j < 2; ++j) put(slot(a->x, of, HIDDEN) + row * HIDDEN + channel + j, v[j], t);
    publish_normed<HIDDEN>(slot(a->x_normed, of, words(HIDDEN)), slot(a->x_squares, of, PARTS), row, channel, v, norm,
                           there, t);
  }
  DEVICE static void load_channels(const f32* norm, int channel, f32 (&weight)[2]) {
    UNROLL for (int j = 0; j < 2; ++j) weight[j] = load_constant(norm + channel + j);
  }
  // The next version of the streams, of two channels of a sublayer's output y. All of a wave come here. A wait that is given up
  // ends the step at the next barrier.
  struct Ahead {  // what it takes besides y
    Sites::Before streams;
    f32 norm[2];
  };
  DEVICE Ahead before_spread(int row, int channel, bool there) {
    Ahead of = {};
    if (collapsed_before(version + 1)) load_channels(norm_of(version + 1), there ? channel : 0, of.norm);
    if (there) Sites::before(s, streams(), site(version), row, channel, of.streams);
    return of;
  }
  DEVICE void spread(int row, int channel, const f32 (&y)[2], bool there, const Ahead& of) {
    f32 next[2] = {};
    Pair* to = slot(a->h, version + 1, Sites::WIDTH_ALL);
    if (there) Sites::expand(of.streams, row, channel, y, to, next, next_tag());
    if (collapsed_before(version + 1)) publish_x(version + 1, row, channel, next, of.norm, there);
  }
  // The same, where of several ranks y is this one's share.
  DEVICE void add_share(int row, int channel, const f32 (&y)[2], bool there) {
    if constexpr (RANKS > 1) {
      u32 at = row * HIDDEN + channel;
      if (there) give_share<HIDDEN>(s.rank, a->parts, version + 1, at, {bits<u32>(y[0]), bits<u32>(y[1])}, next_tag());
    } else {
      spread(row, channel, y, there, before_spread(row, channel, there));
    }
  }
};
