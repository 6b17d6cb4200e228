// The matrix stages of a layer, each with what it reads, where its weights are and what becomes of its outputs
// (hip/stages/linear.h says how they are run). A stage is made of the context for the layer at hand.
#pragma once
#include "glm/context.h"
#include "stages/matrix_stage.h"
#include "stages/one_of.h"
#include "stages/rope.h"

using MatrixStage = MatrixStageOf<Context, Act>;

// in x(2l), normalized;  out low-rank query, times its norm's weight; latent and shared key; index key.
struct Down : MatrixStage {
  static constexpr u32 STAGE_ID = DOWN;
  static constexpr int QS = Q_LORA / TILE_ROWS, KVS = ENTRY / TILE_ROWS, INDEXES = INDEX_DIM / TILE_ROWS;

  DEVICE int tasks() const { return QS + KVS + (c.w()->full_index ? INDEXES : 0); }
  DEVICE static constexpr int most() { return 1; }  // the first round is the query's, for which others wait
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE Source source(int) const { return {c.x_normed(2 * c.layer), nullptr, c.x_squares(2 * c.layer), NORM_EPS}; }
  DEVICE RowsOf rows_of(int task, int) const {
    if (task < QS) return rows<Linear, HIDDEN>(&c.w()->q_a, Q_LORA, task);
    if (task < QS + KVS) return rows<Linear, HIDDEN>(&c.w()->kv_a, ENTRY, task - QS);
    return rows<Linear, HIDDEN>(&c.w()->index_k, INDEX_DIM, task - QS - KVS);
  }
  DEVICE void ahead(int task, Output to, Kept& kept) const {
    if (task < QS) c.load_channels(c.w()->q_a_norm, task * TILE_ROWS + to.n, kept.weight);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    f32 scale = inverse_rms(c.s, to.row), out[2] = {v[0][0] * scale, v[0][1] * scale};
    if (task < QS)
      c.publish_normed<Q_LORA>(c.slot(c.a->q_normed, c.layer, words(Q_LORA)), c.slot(c.a->q_squares, c.layer, Q_PARTS),
                               to.row, task * TILE_ROWS + to.n, out, kept.weight, to.there, c.attention_tag());
    else if (task < QS + KVS)
      put_f32(c.attention_rows(c.a->down_kv, ENTRY), (task - QS) * TILE_ROWS, to, out);
    else
      put_f32(c.attention_rows(c.a->down_index, INDEX_OUT), (task - QS - KVS) * TILE_ROWS, to, out);
  }
};

// in x(2l), normalized, in f32;  out the weights of the indexer's heads.
struct IndexWeights : MatrixStage {
  static constexpr u32 STAGE_ID = INDEX_WEIGHTS;

  DEVICE static constexpr int tasks() { return INDEX_HEADS / TILE_ROWS; }
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE Source source(int) const {
    return {c.x(2 * c.layer), c.w()->attention_norm, c.x_squares(2 * c.layer), NORM_EPS};
  }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Exact, HIDDEN>(&c.w()->index_weights, INDEX_HEADS, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_f32(c.attention_rows(c.a->down_index, INDEX_OUT), INDEX_DIM + task * TILE_ROWS, to, v[0],
            inverse_rms(c.s, to.row) * INDEX_WEIGHT_SCALE);
  }
};

// in low-rank query, normalized;  out rotated queries of attention and of the indexer.
struct Query : MatrixStage {
  static constexpr u32 STAGE_ID = QUERY;
  static constexpr int QS = HEADS * Q_HEAD / TILE_ROWS, INDEXES = INDEX_Q / TILE_ROWS;

  DEVICE int tasks() const { return QS + (c.scored ? INDEXES : 0); }
  DEVICE bool light() const { return true; }
  DEVICE static constexpr int k() { return Q_LORA; }
  DEVICE Source source(int) const {
    return {c.attention_rows(c.a->q_normed, words(Q_LORA)), nullptr, c.attention_rows(c.a->q_squares, Q_PARTS),
            LATENT_NORM_EPS};
  }
  DEVICE RowsOf rows_of(int task, int) const {
    return task < QS ? rows<Linear, Q_LORA>(&c.w()->q_b, HEADS * Q_HEAD, task)
                     : rows<Linear, Q_LORA>(&c.w()->index_q, INDEX_Q, task - QS);
  }
  // Of an index head the first channels are rotated, of a head the last.
  DEVICE static int rotated(int task, Output to) {
    return task < QS ? (task * TILE_ROWS + to.n) % Q_HEAD - NOPE : ((task - QS) * TILE_ROWS + to.n) % INDEX_DIM;
  }
  DEVICE void ahead(int task, Output to, Kept& kept) const {
    int channel = rotated(task, to);
    kept.weight[0] = 1, kept.weight[1] = 0;
    if (to.there && channel >= 0 && channel < ROPE)
      load_angle<ROPE>(c.a->rope, load_constant(c.positions() + to.row), channel, kept.weight);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    f32 scale = inverse_rms(c.s, to.row), q[2] = {v[0][0] * scale, v[0][1] * scale};
    bool index = task >= QS;
    int tile = (index ? task - QS : task) * TILE_ROWS, channel = rotated(task, to);
    if (channel >= 0 && channel < ROPE) rotate_by(kept.weight, q);
    put_activations_of(index ? c.attention_rows(c.a->index_query, words(INDEX_Q))
                             : c.attention_rows(c.a->query, words(HEADS * Q_HEAD)),
                       tile, to, q);
  }
};

// A matrix [N][K] per head: task = (head, tile), in head * STRIDE, out [row][head][N].
template <int K_, int N, int STRIDE> struct PerHead : MatrixStage {
  static constexpr int TILES = N / TILE_ROWS;
  DEVICE static constexpr int tasks() { return HEADS * TILES; }
  DEVICE static constexpr int most() { return TILES % 4 == 0 ? 4 : TILES % 2 ? 1 : 2; }  // runs of one head
  DEVICE static constexpr bool light() { return true; }
  DEVICE static constexpr int k() { return K_; }
  DEVICE static constexpr bool separate() { return true; }
  DEVICE static Source of_head(PairRows all, int task) {
    all.base += task / TILES * words(STRIDE);
    return {all, nullptr, {}};
  }
  DEVICE static RowsOf of_head(Const<Matrix> m, int task) {
    return rows<Absorbed, K_>(m, N, task % TILES, task / TILES);
  }
};
// in query;  out per head Wk[h]^T of its unrotated part.
struct LatentQuery : PerHead<NOPE, KV_LORA, Q_HEAD> {
  static constexpr u32 STAGE_ID = LATENT_QUERY;
  DEVICE Source source(int task) const { return of_head(c.attention_rows(c.a->query, words(HEADS * Q_HEAD)), task); }
  DEVICE RowsOf rows_of(int task, int) const { return of_head(&c.w()->key_up, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_activations_of(c.attention_rows(c.a->latent_query, words(HEADS * KV_LORA)), task * TILE_ROWS, to, v[0]);
  }
};
// in per head the attended latent;  out Wv[h] of it.
struct ValueUp : PerHead<KV_LORA, V_DIM, KV_LORA> {
  static constexpr u32 STAGE_ID = VALUE_UP;
  DEVICE Source source(int task) const {
    return of_head(c.attention_rows(c.a->latent_out, words(HEADS * KV_LORA)), task);
  }
  DEVICE RowsOf rows_of(int task, int) const { return of_head(&c.w()->value_up, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_activations_of(c.attention_rows(c.a->attention_out, words(HEADS * V_DIM)), task * TILE_ROWS, to, v[0]);
  }
};

// in attention of all heads, x(2l);  out x(2l + 1).
struct AttentionOutput : MatrixStage {
  static constexpr u32 STAGE_ID = OUTPUT;
  DEVICE static constexpr int tasks() { return HIDDEN / TILE_ROWS; }
  DEVICE static constexpr int k() { return HEADS * V_DIM; }
  DEVICE Source source(int) const { return {c.attention_rows(c.a->attention_out, words(HEADS * V_DIM)), nullptr, {}}; }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Linear, HEADS * V_DIM>(&c.w()->o, HIDDEN, task); }
  DEVICE void ahead(int task, Output to, Kept& kept) const { c.ask_for_x(2 * c.layer, task, to, kept); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    c.add_to_x(2 * c.layer, task, to, v[0], kept);
  }
};

// in x(2l + 1), weighted, in f32;  out the experts' products in slices of k.
struct RouterLogits : MatrixStage {
  static constexpr u32 STAGE_ID = ROUTER;
  static constexpr int TILES = EXPERTS / TILE_ROWS, K = Slices::K, ROW = Slices::COUNT * EXPERTS;

  DEVICE static constexpr int tasks() { return TILES * Slices::COUNT; }
  DEVICE static constexpr int most() { return 1; }
  DEVICE static constexpr int k() { return K; }
  DEVICE static constexpr bool separate() { return true; }
  DEVICE Source source(int task) const {
    PairRows from = c.x(2 * c.layer + 1);
    from.base += task / TILES * K;
    return {from, c.w()->mlp_norm + task / TILES * K, {}};
  }
  DEVICE RowsOf rows_of(int task, int) const {
    return rows<Exact, HIDDEN>(&c.w()->router, EXPERTS, task % TILES).from_k<Exact>(task / TILES * K);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_f32(c.mlp_rows(c.a->router_scores, ROW), task / TILES * EXPERTS + task % TILES * TILE_ROWS, to, v[0]);
  }
};

// in x(2l + 1), normalized;  out middle: silu(gate) * up.
template <class F> struct AnyGateUp : MatrixStage {
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE static constexpr int matrices() { return 2; }
  DEVICE Source source(int) const {
    return {c.x_normed(2 * c.layer + 1), nullptr, c.x_squares(2 * c.layer + 1), NORM_EPS};
  }
  DEVICE RowsOf half(int width, int half, int tile, u64 pair = 0) const {
    return rows<F, HIDDEN>(&c.w()->gate_up, width, tile, pair * 2 + half);
  }
  DEVICE void put_middle(int at, Output to, const f32 (&v)[2][2], f32 weight) const {
    f32 rms = inverse_rms(c.s, to.row), m[2];
    for (int j = 0; j < 2; ++j) m[j] = weight * (silu(v[0][j] * rms) * (v[1][j] * rms));
    put_activations_of(c.mlp_rows(c.a->middle, words(MIDDLE)), at, to, m);
  }
};
// Of the shared expert, which needs no route and so goes first, and of every expert that some row chose, once for all rows, times
// the router's weights; or of the dense layer. The shared expert's place in the middle is behind those of the chosen ones.
template <class F> struct GateUp : AnyGateUp<F> {
  static constexpr u32 STAGE_ID = GATE_UP;
  using AnyGateUp<F>::c;
  static constexpr int TILES = EXPERT_WIDTH / TILE_ROWS;

  DEVICE bool dense() const { return c.w()->dense; }
  // As many as there could be: how many there are is known only to blocks that have read the route.
  DEVICE int tasks() const {
    int rows = c.s.rows, most = rows * TOP_K < EXPERTS ? rows * TOP_K : EXPERTS;
    return dense() ? DENSE_WIDTH / TILE_ROWS : (1 + most) * TILES;
  }
  DEVICE static constexpr int most() { return TILES % 2 ? 1 : 2; }  // a run is either known or not
  DEVICE int known() const { return dense() ? tasks() : TILES; }
  DEVICE int sure() const { return dense() ? tasks() : (1 + TOP_K) * TILES; }
  DEVICE bool decide(bool ok) const { return dense() || c.router().decide(c.s, ok); }
  DEVICE bool exists(int task) const { return dense() || task < (1 + (int)(u32)route_count[0]) * TILES; }
  DEVICE static bool shared(int task) { return task < TILES; }
  DEVICE static int expert(int task) { return route_active[task / TILES - 1]; }
  DEVICE RowsOf rows_of(int task, int m) const {
    if (dense()) return this->half(DENSE_WIDTH, m, task);
    return this->half(EXPERT_WIDTH, m, task % TILES, shared(task) ? EXPERTS : expert(task));
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    if (dense()) return this->put_middle(task * TILE_ROWS, to, v, 1);
    int place = shared(task) ? TOP_K : to.there ? place_in_row(expert(task), to.row) : -1;
    if (place < 0) return;
    this->put_middle(place * EXPERT_WIDTH + task % TILES * TILE_ROWS, to, v,
                     shared(task) ? 1.f : (f32)route_weight[to.row * TOP_K + place]);
  }
};

// in middle, x(2l + 1);  out x(2l + 2), of a dense layer.
struct DenseDown : MatrixStage {
  static constexpr u32 STAGE_ID = DOWN_SUM;
  DEVICE static constexpr int tasks() { return HIDDEN / TILE_ROWS; }
  DEVICE static constexpr int k() { return DENSE_WIDTH; }
  DEVICE Source source(int) const { return {c.mlp_rows(c.a->middle, words(MIDDLE)), nullptr, {}}; }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Linear, DENSE_WIDTH>(&c.w()->down, HIDDEN, task); }
  DEVICE void ahead(int task, Output to, Kept& kept) const { c.ask_for_x(2 * c.layer + 1, task, to, kept); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    c.add_to_x(2 * c.layer + 1, task, to, v[0], kept);
  }
};

// in x after the last layer, normalized;  out logits if wanted, each block's best.
struct Logits : MatrixStage {
  static constexpr u32 STAGE_ID = HEAD;
  DEVICE static constexpr int tasks() { return VOCAB / TILE_ROWS; }
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE Source source(int) const {
    u32 last = 2 * c.a->layers;
    if (Head::ACT_BYTES == Act::ACT_BYTES) return {c.x_normed(last), nullptr, c.x_squares(last), NORM_EPS};
    return {c.x(last), c.a->final_norm, c.x_squares(last), NORM_EPS};
  }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Head, HIDDEN>(&c.a->head, VOCAB, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    if (!to.there) return;
    f32 scale = inverse_rms(c.s, to.row);
    for (int j = 0; j < 2; ++j) {
      u32 token = task * TILE_ROWS + to.n + j;
      c.best.offer(v[0][j] * scale, token);
      if (c.a->logits)
        store_plain(c.a->logits + (u64)to.row * VOCAB + token, v[0][j] * scale, c.tag(2 * c.a->layers + 1));
    }
  }
};
