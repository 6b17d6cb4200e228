// The matrix stages of a layer, each with what it reads, where its weights are and what becomes of its outputs
// (hip/stages/linear.h says how they are run). A stage is made of the context for the sublayer at hand.
#pragma once
#include "deepseek/context.h"
#include "stages/matrix_stage.h"
#include "stages/one_of.h"
#include "stages/rope.h"

struct MatrixStage : MatrixStageOf<Context, Act> {
  DEVICE Source input() const { return {c.x_normed(c.version), nullptr, c.x_squares(c.version), NORM_EPS}; }
  // The same in f32.
  DEVICE Source wide_input(u32 version) const {
    return {c.x(version), c.norm_of(version), c.x_squares(version), NORM_EPS};
  }
};

// in rows of Engram's tables;  out a key for each stream, then the value.
struct EngramMap : MatrixStage {
  static constexpr u32 STAGE_ID = ENGRAM_MAP;
  // Copies: a rank that is measured alone, without the others, has its part in everybody's place.
  static constexpr int WIDTH_R = HIDDEN / (RANKS * ENGRAM_COPIES), TILES = WIDTH_R / TILE_ROWS;
  static constexpr int K = ENGRAM_COLUMNS * ENGRAM_DIM;
  static constexpr int OF_ENGRAM = (STREAMS + 1) * TILES, ALL = (STREAMS + 1) * HIDDEN;

  DEVICE int tasks() const { return c.a->engram_count * OF_ENGRAM; }
  DEVICE static constexpr int most() { return OF_ENGRAM % 2 ? 1 : 2; }  // runs of one Engram
  DEVICE static constexpr int k() { return K; }
  DEVICE static constexpr bool separate() { return true; }
  DEVICE Source source(int task) const {
    return {{c.a->looked_up + (u64)(task / OF_ENGRAM) * ROWS * words(K), (u32)words(K), c.tag(0)}, nullptr, {}};
  }
  DEVICE RowsOf rows_of(int task, int) const {
    Const<EngramWeights> w = as_const(c.a->engrams) + task / OF_ENGRAM;
    return rows<Linear, K>(&w->kv, WIDTH_R, task % TILES, task % OF_ENGRAM / TILES);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    int at = task % OF_ENGRAM / TILES * HIDDEN + c.s.rank * WIDTH_R + task % TILES * TILE_ROWS;
    u64 engram = (u64)(task / OF_ENGRAM) * ROWS * ALL;
    if constexpr (RANKS > 1) {
      u64 place = engram + to.row * ALL + at + to.n;
      if (to.there) push(c.s.rank, c.a->mapped_parts, place, {bits<u32>(v[0][0]), bits<u32>(v[0][1])}, c.tag(0));
    } else {
      UNROLL for (int copy = 0; copy < ENGRAM_COPIES; ++copy)
          put_f32({c.a->mapped + engram, ALL, c.tag(0)}, at + copy * WIDTH_R, to, v[0]);
    }
  }
};

// in x, normalized;  out low-rank query, times its norm's weight; key and value of the window.
struct Down : MatrixStage {
  static constexpr u32 STAGE_ID = DOWN;
  static constexpr int QS = Q_LORA / TILE_ROWS, KVS = D / TILE_ROWS;

  DEVICE static constexpr int tasks() { return QS + KVS; }
  DEVICE static constexpr int most() { return 1; }  // the first round is the query's, for which others wait
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE Source source(int) const { return input(); }
  DEVICE RowsOf rows_of(int task, int) const {
    return task < QS ? rows<Linear, HIDDEN>(&c.w()->q_a, Q_LORA, task) : rows<Linear, HIDDEN>(&c.w()->kv, D, task - QS);
  }
  DEVICE void ahead(int task, Output to, Kept& kept) const {
    if (task < QS) c.load_channels(c.w()->q_a_norm, task * TILE_ROWS + to.n, kept.weight);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    f32 scale = inverse_rms(c.s, to.row), out[2] = {v[0][0] * scale, v[0][1] * scale};
    if (task < QS)
      c.publish_normed<Q_LORA>(c.slot(c.a->q_normed, c.layer(), words(Q_LORA)),
                               c.slot(c.a->q_squares, c.layer(), Q_PARTS), to.row, task * TILE_ROWS + to.n, out,
                               kept.weight, to.there, c.next_tag());
    else
      put_f32(c.of_layer(c.a->down_kv, D), (task - QS) * TILE_ROWS, to, out);
  }
};

// in x, normalized, in f32;  out compressors' values and gates, and the weights of the indexer's heads at the end.
struct DownWide : MatrixStage {
  static constexpr u32 STAGE_ID = DOWN_WIDE;

  DEVICE int made() const { return (c.entry_values() + c.key_values()) / TILE_ROWS; }
  DEVICE int tasks() const { return made() + (c.scored ? INDEX_HEADS / TILE_ROWS : 0); }
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE Source source(int) const { return wide_input(c.version); }
  DEVICE RowsOf rows_of(int task, int) const {
    if (task >= made()) return rows<Exact, HIDDEN>(&c.w()->index_weights, INDEX_HEADS, task - made());
    int entries = c.entry_values() / TILE_ROWS;
    return task < entries ? half(&c.w()->entry, entries, task)
                          : half(&c.w()->key, c.key_values() / TILE_ROWS, task - entries);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    f32 scale = inverse_rms(c.s, to.row);
    bool index = task >= made();
    put_f32(c.of_layer(c.a->down_wide, DOWN_WIDTH),
            index ? DOWN_WIDTH - INDEX_HEADS + (task - made()) * TILE_ROWS : task * TILE_ROWS, to, v[0],
            index ? scale * INDEX_WEIGHT_SCALE : scale);
  }

 private:
  // Tile `task` of a compressor's values, or of the gates behind them.
  DEVICE static RowsOf half(Const<Compressor> of, int tiles, int task) {
    bool gated = of->gate.tiles;
    int each = gated ? tiles / 2 : tiles;
    return rows<Exact, HIDDEN>(task < each ? &of->kv : &of->gate, each * TILE_ROWS, task % each);
  }
};

// in entries before their rotation;  out index keys before their norm.
struct KeyProducts : MatrixStage {
  static constexpr u32 STAGE_ID = KEY_PRODUCTS;

  DEVICE static constexpr int tasks() { return INDEX_DIM / TILE_ROWS; }
  DEVICE static constexpr int k() { return D; }
  DEVICE Source source(int) const { return {c.of_layer(c.a->latent, D), nullptr, {}}; }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Exact, D>(&c.w()->key_of_entry, INDEX_DIM, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_f32(c.of_layer(c.a->key_values, INDEX_DIM), task * TILE_ROWS, to, v[0]);
  }
};

// in low-rank query, normalized;  out rotated queries of attention, in f32 with their sums of squares, and of the indexer.
struct Query : MatrixStage {
  static constexpr u32 STAGE_ID = QUERY;
  static constexpr int QS = HEADS * D / TILE_ROWS, INDEXES = INDEX_Q / TILE_ROWS;

  DEVICE int tasks() const { return QS + (c.scored ? INDEXES : 0); }
  DEVICE static constexpr int k() { return Q_LORA; }
  DEVICE Source source(int) const {
    return {c.of_layer(c.a->q_normed, words(Q_LORA)), nullptr, c.of_layer(c.a->q_squares, Q_PARTS), NORM_EPS};
  }
  DEVICE RowsOf rows_of(int task, int) const {
    return task < QS ? rows<Linear, Q_LORA>(&c.w()->q_b, HEADS * D, task)
                     : rows<Linear, Q_LORA>(&c.w()->index_q, INDEX_Q, task - QS);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    f32 scale = inverse_rms(c.s, to.row), q[2] = {v[0][0] * scale, v[0][1] * scale};
    bool index = task >= QS;
    int tile = (index ? task - QS : task) * TILE_ROWS, width = index ? INDEX_DIM : D;
    f32 squares = HEAD_NORM && !index ? sum_of_tile(to.there ? __builtin_fmaf(q[1], q[1], q[0] * q[0]) : 0.f) : 0.f;
    int rotated = (tile + to.n) % width - (width - ROPE);
    if (to.there && rotated >= 0) rotate<ROPE>(c.rope(), load_constant(c.a->positions + to.row), rotated, q);
    if (index) return put_activations_of(c.of_layer(c.a->index_query, words(INDEX_Q)), tile, to, q);
    put_f32(c.of_layer(c.a->query, HEADS * D), tile, to, q);
    PairRows sums = c.of_layer(c.a->query_squares, HEADS * HEAD_PARTS);
    if (HEAD_NORM && to.there && to.n == 0) ::put((Pair*)sums.at(to.row, task), squares, sums.tag);
  }
};

// in attention of a group's heads;  out the group's low rank.
struct OutputGroups : MatrixStage {
  static constexpr u32 STAGE_ID = OUTPUT_GROUPS;
  static constexpr int TILES = O_LORA / TILE_ROWS;

  DEVICE static constexpr int tasks() { return GROUPS * TILES; }
  DEVICE static constexpr int most() { return TILES % 2 ? 1 : 2; }  // runs of one group
  DEVICE static constexpr int k() { return GROUP_IN; }
  DEVICE static constexpr bool separate() { return true; }
  DEVICE Source source(int task) const {
    PairRows from = c.of_layer(c.a->attention_out, words(HEADS * D));
    from.base += task / TILES * words(GROUP_IN);
    return {from, nullptr, {}};
  }
  DEVICE RowsOf rows_of(int task, int) const {
    return rows<Linear, GROUP_IN>(&c.w()->o_a, O_LORA, task % TILES, task / TILES);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_activations_of(c.of_layer(c.a->grouped, words(GROUPS * O_LORA)), task * TILE_ROWS, to, v[0]);
  }
};

// in all groups' low rank;  out what attention adds, spread over the streams.
struct AttentionOutput : MatrixStage {
  static constexpr u32 STAGE_ID = OUTPUT;
  DEVICE static constexpr int tasks() { return HIDDEN / TILE_ROWS; }
  DEVICE static constexpr int k() { return GROUPS * O_LORA; }
  DEVICE Source source(int) const { return {c.of_layer(c.a->grouped, words(GROUPS * O_LORA)), nullptr, {}}; }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Linear, GROUPS * O_LORA>(&c.w()->o_b, HIDDEN, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    c.add_share(to.row, task * TILE_ROWS + to.n, v[0], to.there);
  }
};

// in x, weighted, in f32;  out the experts' products in slices of k.
struct RouterLogits : MatrixStage {
  static constexpr u32 STAGE_ID = ROUTER;
  static constexpr int TILES = EXPERTS / TILE_ROWS, K = Slices::K, ROW = Slices::COUNT * EXPERTS;

  DEVICE static constexpr int tasks() { return TILES * Slices::COUNT; }
  DEVICE static constexpr int most() { return 1; }
  DEVICE static constexpr int k() { return K; }
  DEVICE static constexpr bool separate() { return true; }
  DEVICE Source source(int task) const {
    PairRows from = c.x(c.version);
    from.base += task / TILES * K;
    return {from, c.w()->mlp.norm + task / TILES * K, {}};
  }
  DEVICE RowsOf rows_of(int task, int) const {
    return rows<Exact, HIDDEN>(&c.w()->router, EXPERTS, task % TILES).from_k<Exact>(task / TILES * K);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_f32(c.of_layer(c.a->router_scores, ROW), task / TILES * EXPERTS + task % TILES * TILE_ROWS, to, v[0]);
  }
};

// in x, normalized;  out silu(gate) * up, clamped.
struct AnyGateUp : MatrixStage {
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE static constexpr int matrices() { return 2; }
  DEVICE Source source(int) const { return input(); }
  DEVICE void put_middle(const PairRows& out, int at, Output to, const f32 (&v)[2][2], f32 weight) const {
    f32 rms = inverse_rms(c.s, to.row), m[2];
    for (int j = 0; j < 2; ++j) m[j] = weight * clamped_swiglu(v[0][j] * rms, v[1][j] * rms, SWIGLU_LIMIT);
    put_activations_of(out, at, to, m);
  }
};
// Of the shared expert, which needs no route and so goes first.
struct SharedGateUp : AnyGateUp {
  static constexpr u32 STAGE_ID = SHARED_GATE_UP;
  DEVICE static constexpr int tasks() { return EXPERT_WIDTH / TILE_ROWS; }
  DEVICE RowsOf rows_of(int task, int m) const {
    return rows<Linear, HIDDEN>(&c.w()->shared_gate_up, EXPERT_WIDTH, task, m);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_middle(c.of_layer(c.a->shared_middle, words(EXPERT_WIDTH)), task * TILE_ROWS, to, v, 1);
  }
};
struct SharedDown : MatrixStage {
  static constexpr u32 STAGE_ID = SHARED_DOWN;
  DEVICE static constexpr int tasks() { return HIDDEN / TILE_ROWS; }
  DEVICE static constexpr int k() { return EXPERT_WIDTH; }
  DEVICE Source source(int) const { return {c.of_layer(c.a->shared_middle, words(EXPERT_WIDTH)), nullptr, {}}; }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Linear, EXPERT_WIDTH>(&c.w()->shared_down, HIDDEN, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    put_f32(c.of_layer(c.a->shared_out, HIDDEN), task * TILE_ROWS, to, v[0]);
  }
};
// Of every expert that some row chose, once for all rows, times the router's weights.
struct GateUp : AnyGateUp {
  static constexpr u32 STAGE_ID = GATE_UP;
  static constexpr int TILES = EXPERT_WIDTH / TILE_ROWS;

  // As many as there could be: how many there are is known only to blocks that have read the route.
  DEVICE int tasks() const {
    int rows = c.s.rows, most = rows * TOP_K < EXPERTS ? rows * TOP_K : EXPERTS;
    return most * TILES;
  }
  DEVICE static constexpr int most() { return TILES % 2 ? 1 : 2; }  // runs of one expert
  DEVICE static constexpr int known() { return 0; }
  DEVICE static constexpr int sure() { return TOP_K * TILES; }
  DEVICE bool decide(bool ok) const { return c.route.decide(c.s, ok); }
  DEVICE static bool exists(int task) { return task < (int)(u32)route_count[0] * TILES; }
  DEVICE RowsOf rows_of(int task, int m) const {
    u64 expert = (u32)route_active[task / TILES];
    return rows<Expert, HIDDEN>(&c.w()->gate_up, EXPERT_WIDTH, task % TILES, expert * 2 + m);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    int place = to.there ? place_in_row(route_active[task / TILES], to.row) : -1;
    if (place < 0) return;
    put_middle(c.of_layer(c.a->middle, words(TOP_K * EXPERT_WIDTH)), place * EXPERT_WIDTH + task % TILES * TILE_ROWS,
               to, v, route_weight[to.row * TOP_K + place]);
  }
};
// in the experts' sum, the shared expert's output;  out their sum, spread over the streams.
struct ExpertsOut : MatrixStage {
  DEVICE void ahead(int task, Output to, Kept& kept) const {
    if (to.there) load_pairs(shared().at(to.row, task * TILE_ROWS + to.n), c.next_tag(), kept.old);
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    const Pair* at[1] = {shared().at(to.row, task * TILE_ROWS + to.n)};
    Pair old[1][2] = {{kept.old[0], kept.old[1]}};
    u32 t = c.next_tag();
    if (to.there && (old[0][0].tag != t || old[0][1].tag != t)) c.s.collect_twos(t, at, old);
    c.add_share(to.row, task * TILE_ROWS + to.n, {v[0][0] + value_of(old[0][0]), v[0][1] + value_of(old[0][1])},
                to.there);
  }

 private:
  DEVICE PairRows shared() const { return c.of_layer(c.a->shared_out, HIDDEN); }
};

// in x after the last layer, normalized;  out logits if wanted, each block's best.
struct Logits : MatrixStage {
  static constexpr u32 STAGE_ID = HEAD;
  DEVICE static constexpr int tasks() { return VOCAB / TILE_ROWS; }
  DEVICE static constexpr int k() { return HIDDEN; }
  DEVICE Source source(int) const { return HEAD_WEIGHTED ? wide_input(c.version) : input(); }
  DEVICE RowsOf rows_of(int task, int) const { return rows<Head, HIDDEN>(&c.a->head, VOCAB, task); }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept&) const {
    if (!to.there) return;
    f32 scale = inverse_rms(c.s, to.row);
    for (int j = 0; j < 2; ++j) {
      u32 token = task * TILE_ROWS + to.n + j;
      c.best.offer(v[0][j] * scale, token);
      if (c.a->logits) store_plain(c.a->logits + (u64)to.row * VOCAB + token, v[0][j] * scale, c.next_tag());
    }
  }
};
