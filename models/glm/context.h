// What all stages of a decode step share: the descriptor, tags and slots of the hand-off regions, and how the residual stream
// is published.
#pragma once
#include "model_config.h"  // the model's dimensions and formats, generated from its config.json

#include "glm/descriptor.h"
#include "glm/stages.h"
#include "handoff/reduce.h"
#include "stages/attend.h"
#include "stages/linear.h"
#include "stages/route.h"
#include "stages/sample.h"

using Act = ActivationsOf<Linear>;  // what activations are rounded to for big matrices, and the format of the caches
using Exact = Wide<Island>;         // for what decides something discrete: activations in f32
static_assert(Linear::ACT_BYTES == Act::ACT_BYTES && Expert::ACT_BYTES == Act::ACT_BYTES &&
                  Absorbed::ACT_BYTES == Act::ACT_BYTES,
              "what is published for one matrix is read by several");
constexpr bool HEAD_WEIGHTED = Head::ACT_BYTES != Act::ACT_BYTES;  // the head reads x in f32
constexpr int Q_HEAD = NOPE + ROPE, ENTRY = KV_LORA + ROPE, INDEX_OUT = INDEX_DIM + INDEX_HEADS;
constexpr int INDEX_Q = INDEX_HEADS * INDEX_DIM;
constexpr int MIDDLE = DENSE_WIDTH > (TOP_K + 1) * EXPERT_WIDTH ? DENSE_WIDTH : (TOP_K + 1) * EXPERT_WIDTH;
constexpr int PARTS = HIDDEN / TILE_ROWS, Q_PARTS = Q_LORA / TILE_ROWS;  // sums of squares of a row
using Router = Route<HIDDEN>;
using Slices = RouterSlices<HIDDEN>;
using Attention = Attend<Act, HEADS, NOPE, ROPE, KV_LORA, INDEX_TOPK>;

DEVICE constexpr int words(int activations) { return activations * Act::ACT_BYTES / 4; }

NEAR(DecodeArgs, near_args, 1);
NEAR(LayerWeights, near_layers, 2);  // by the parity of the layer: the one at hand and the next

struct Context {
  Const<DecodeArgs> a;
  Step s;
  const Pages pages;
  u32 token = 0;  // of this launch: 0 ... tokens - 1, 0 in kernels of one token
  u32 layer = 0;
  u32 selection_layer = 0;  // the layer whose selection is in force
  bool scored = false;      // whether this layer's indexer runs
  Best best;                // this block's, of the row whose logits the thread sums

  DEVICE explicit Context(Const<DecodeArgs> a)
      : a(a), s(a->rows, a->rank, a->poll_limit, a->error, a->alarms), pages{a->block_table, a->max_pages} {
    clear_zeros();
#if TIMELINE
    s.timeline = {a->timeline, a->timeline_count, a->timeline_capacity};
#endif
  }

  DEVICE Const<LayerWeights> weights(u32 of_layer) const {
    return nearby(near_layers, of_layer & 1, a->weights + of_layer);
  }
  DEVICE Const<LayerWeights> w() const { return weights(layer); }
  DEVICE void bring_layer(u32 which) const {
    if (which < a->layers) bring_near(near_layers, which & 1, a->weights + which);
  }
  DEVICE Router router() const {
    return {mlp_rows(a->router_scores, Slices::COUNT * EXPERTS), x_squares(2 * layer + 1), NORM_EPS, w()->router_bias,
            ROUTED_SCALE};
  }
  DEVICE u32 tag(u32 version) const { return a->epoch + (MANY_TOKENS ? token * (2 * a->layers + 2) : 0) + version; }
  // Where this token's entries of [tokens][ROWS] begin.
  DEVICE u32 at_token() const { return MANY_TOKENS ? token * ROWS : 0; }
  DEVICE const u32* positions() const { return a->positions + at_token(); }
  DEVICE u32 attention_tag() const { return tag(2 * layer + 1); }
  DEVICE u32 mlp_tag() const { return tag(2 * layer + 2); }
  // The slot of a region, [ROWS][width], for a layer or version.
  DEVICE static Pair* slot(Pair* region, u32 by, int width) { return region + (by & 1) * ROWS * (u32)width; }
  DEVICE PairRows attention_rows(Pair* region, int width) const {
    return {slot(region, layer, width), (u32)width, attention_tag()};
  }
  DEVICE PairRows mlp_rows(Pair* region, int width) const {
    return {slot(region, layer, width), (u32)width, mlp_tag()};
  }

  // x(version) of all rows, in f32; times the weight of the norm that reads it, as activations; its sums of squares.
  DEVICE PairRows x(u32 version) const { return {slot(a->x, version, HIDDEN), HIDDEN, tag(version)}; }
  DEVICE PairRows x_normed(u32 version) const {
    return {slot(a->x_normed, version, words(HIDDEN)), (u32)words(HIDDEN), tag(version)};
  }
  DEVICE PairRows x_squares(u32 version) const { return {slot(a->x_squares, version, PARTS), PARTS, tag(version)}; }
  // The norm that x(version) meets.
  DEVICE const f32* norm_of(u32 version) const {
    if (version == 2 * a->layers) return a->final_norm;
    Const<LayerWeights> norms = weights(version / 2);
    return version % 2 ? norms->mlp_norm : norms->attention_norm;
  }

  // What a norm reads, of two channels: eight threads in a row have the 16 of a part, and all of a wave come here.
  template <int N> DEVICE static void publish_normed(Pair* activations, Pair* sums, int row, int channel,
                                                     const f32 (&v)[2], const f32 (&norm)[2], bool there, u32 t) {
    f32 sum = sum_of_tile(there ? __builtin_fmaf(v[1], v[1], v[0] * v[0]) : 0.f);
    if (!there) return;
    put_words<Act>(activations + (u32)row * words(N), channel, {v[0] * norm[0], v[1] * norm[1]}, t);
    if (channel % TILE_ROWS == 0) put(sums + ((u32)row * (N / TILE_ROWS) + (u32)channel / TILE_ROWS), sum, t);
  }
  // With a next token in the launch, the last x in f32 only if the head reads it: a store that nobody waits for could arrive
  // after the next token's.
  DEVICE void publish_x(u32 version, int row, int channel, const f32 (&v)[2], const f32 (&norm)[2], bool there) const {
    u32 t = tag(version);
    if (there && (!MANY_TOKENS || HEAD_WEIGHTED || version < 2 * a->layers))
      for (int j = 0; j < 2; ++j) put(slot(a->x, version, HIDDEN) + ((u32)row * HIDDEN + (u32)channel + j), v[j], t);
    publish_normed<HIDDEN>(slot(a->x_normed, version, words(HIDDEN)), slot(a->x_squares, version, PARTS), row, channel,
                           v, norm, there, t);
  }
  DEVICE static void load_channels(const f32* norm, int channel, f32 (&weight)[2]) {
    UNROLL for (int j = 0; j < 2; ++j) weight[j] = load_constant(norm + (u32)(channel + j));
  }
  // x(version + 1) = x(version) + v: what it was, and the norm's weights, are asked for when the task begins. What it was is
  // there since the task's inputs are, which derive from it. Of several ranks, v is this one's share.
  DEVICE void ask_for_x(u32 version, int task, Output to, Kept& kept) const {
    if (RANKS > 1) return;
    int channel = task * TILE_ROWS + to.n;
    if (to.there) load_pairs(x(version).at(to.row, channel), tag(version), kept.old);
    load_channels(norm_of(version + 1), channel, kept.weight);
  }
  DEVICE void add_to_x(u32 version, int task, Output to, const f32 (&v)[2], Kept& kept) {
    int channel = task * TILE_ROWS + to.n;
    if constexpr (RANKS > 1) {
      u32 at = to.row * HIDDEN + channel, t = tag(version + 1);
      if (to.there) give_share<HIDDEN>(s.rank, a->parts, version + 1, at, {bits<u32>(v[0]), bits<u32>(v[1])}, t);
    } else {
      const Pair* at[1] = {x(version).at(to.row, channel)};
      Pair old[1][2] = {{kept.old[0], kept.old[1]}};
      if (to.there && (old[0][0].tag != tag(version) || old[0][1].tag != tag(version)))
        s.collect_twos(tag(version), at, old);
      publish_x(version + 1, to.row, channel, {value_of(old[0][0]) + v[0], value_of(old[0][1]) + v[1]}, kept.weight,
                to.there);
    }
  }
};
