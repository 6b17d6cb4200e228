// GLM-5 and GLM-5.2, one decode step: token in to token out, for 1 to 16 rows (requests), in one persistent launch.
//
// Every block runs this program from top to bottom. A stage waits for exactly the data it reads, so blocks are in different
// stages, and layers, at the same time; hip/handoff/step.h says how tasks are dealt out and how hand-offs work.
//
// Versions and slots. x(2l) enters layer l, x(2l + 1) is what attention has added to, x(2l + 2) leaves the layer. The tag of
// everything written for x(v + 1) is epoch + v + 1, and epochs grow from launch to launch, so no tag ever comes twice.
// Each region keeps two versions: x by the parity of v, the others by that of the layer.
// Why two are enough: a task publishes only after it has read all its inputs, and every value of layer l is needed, through
// however many tasks, for every value of x(2l + 2): each projection of x reads all of it. So whoever writes for layer l + 1
// has x(2l + 2) whole, hence every task of layer l has published and is done with its inputs, those of slot l - 1 first of
// all. For x itself: a writer of x(v + 2) has seen all of x(v + 1), each value of which was made by a task that was done with
// x(v). Regions of bulk data have one slot for the same reason: whoever writes them in layer l + 1 knows that every reader in
// layer l has published. The selection lives longer, until the next layer with an indexer, which is the same argument.
// The argument needs every task to be one that somebody waits for. That is why the indexer's later stages run only if a row
// needs them (any_long), and route.h deals with blocks that turn out to have no task.
// Launches: a launch begins when the one before has ended on all blocks. Tokens: a launch may run several, each on what the one
// before chose. A token is known when every block has published its best logits, which it does when it is done with all that
// came before; so whoever works on the next token, for which he needs this one, finds every region read, of whatever slot. The
// chosen token itself is read by every block before it publishes its best of the next.
// Ranks: heads, MLPs' widths and the vocabulary are divided among RANKS. Then OUTPUT and DOWN_SUM give shares of what is added to
// x, and REDUCE sums them up (hip/handoff/reduce.h); everything else is the same computation on every rank, to the bit.
#include "model_config.h"  // the model's dimensions and formats, generated from its config.json

#include "glm/descriptor.h"
#include "glm/stages.h"
#include "handoff/reduce.h"
#include "stages/attend.h"
#include "stages/cache_entry.h"
#include "stages/choose.h"
#include "stages/embed.h"
#include "stages/experts.h"
#include "stages/index_scores.h"
#include "stages/linear.h"
#include "stages/route.h"
#include "stages/sample.h"
#include "stages/select.h"

using Act = ActivationsOf<Linear>;  // what activations are rounded to for big matrices, and the format of the caches
constexpr int Q_HEAD = NOPE + ROPE, ENTRY = KV_LORA + ROPE, INDEX_OUT = INDEX_DIM + INDEX_HEADS;
constexpr int MIDDLE = DENSE_WIDTH > (TOP_K + 1) * EXPERT_WIDTH ? DENSE_WIDTH : (TOP_K + 1) * EXPERT_WIDTH;
using Attention = Attend<Act, HEADS, NOPE, ROPE, KV_LORA, INDEX_TOPK>;
using Slices = RouterSlices<HIDDEN>;

struct Decode {
  Const<DecodeArgs> a;
  Step s;
  const Pages pages;
  const u32 token;          // of this launch: 0 ... tokens - 1, 0 in kernels of one token
  u32 selection_layer = 0;  // the layer whose selection is in force

  DEVICE Decode(Const<DecodeArgs> a, u32 token)
      : a(a),
        s(a->rows, a->rank, a->poll_limit, a->error, a->alarms),
        pages{a->block_table, a->max_pages},
        token(token) {
#if TIMELINE
    s.timeline = {a->timeline, a->timeline_count, a->timeline_capacity};
#endif
  }

  // Whether some row's context is longer than the selection. If none is, nobody would wait for what the indexers make of the
  // queries, and a task that nobody waits for must not run: its inputs could be overwritten under it.
  DEVICE bool any_long() const {
    bool any = false;
    for (u32 row = 0; row < s.rows; ++row) any |= load_constant(positions() + row) + 1 > INDEX_TOPK;
    return any;
  }

  DEVICE bool run() {
    if ((a->layer_begin == 0 || a->border) && !enter()) return false;
    for (u32 layer = 0; layer < a->layer_begin; ++layer)  // a selection may be an earlier launch's
      if (as_const(a->weights)[layer].full_index) selection_layer = layer;
    for (u32 layer = a->layer_begin; layer < a->layer_end; ++layer)
      if (!run_layer(layer)) return false;
    return a->layer_end < a->layers || next_token();
  }

  DEVICE bool enter() {
    u32 version = 2 * a->layer_begin;
    Pair* to = slot(a->x, version, HIDDEN);
    if (a->border) return embed<F32, HIDDEN>(s, EMBED, tag(version), a->border, OwnRows{}, to);
    return embed<Island, HIDDEN>(s, EMBED, tag(version), a->embedding, tokens_in(), to);
  }

  DEVICE bool run_layer(u32 layer) {
    if constexpr (RANKS == 1) return attention(layer) && mlp(layer);
    for (u32 half = 0; half < 2;
         ++half)  // one piece of code for the sum over ranks: 520 scalar spills with two, 325 so
      if (!(half ? mlp(layer) : attention(layer)) || !reduce(2 * layer + 1 + half)) return false;
    return true;
  }
  DEVICE bool attention(u32 layer) {
    Const<LayerWeights> w = as_const(a->weights) + layer;
    if (w->full_index) selection_layer = layer;
    bool scored = w->full_index && any_long();
    return down(layer, w, scored) && cache_entry(layer, w) && query(layer, w, scored) &&
           (!scored || (index_scores(layer, w) && select(layer))) && latent_query(layer, w) && attend(layer, w) &&
           merge_parts(layer) && value_up(layer, w) && output(layer, w);
  }
  DEVICE bool mlp(u32 layer) {
    Const<LayerWeights> w = as_const(a->weights) + layer;
    constexpr int ROW = Slices::COUNT * Slices::WIDTH_OUT;
    Route route({slot(a->router_scores, layer, ROW), ROW, tag(2 * layer + 2)}, Slices::COUNT, HIDDEN, NORM_EPS,
                w->router_bias, ROUTED_SCALE);
    if (!w->dense && !router(layer, w)) return false;
    // One piece of code where the formats are the same.
    bool ok = SAME<Linear, Expert> || w->dense ? gate_up<Linear>(layer, w, route) : gate_up<Expert>(layer, w, route);
    return ok && (w->dense ? dense_down(layer, w) : expert_down(layer, w, route));
  }

#if MANY_TOKENS
  // Whether a row, or the launch, ends with the token just chosen. False if it never came.
  DEVICE bool any_stops(bool& any) {
    u32 row = thread_id();
    bool ok = true, mine = false;
    if (row < s.rows) {
      Pair got[1];
      ok = s.collect(tag(2 * a->layers + 1), [&](int) { return a->next_tokens + row; }, got);
      u32 token = got[0].payload & ~LAST;
      mine = token != got[0].payload;
      for (u32 i = 0; i < STOPS; ++i) mine |= load_constant(a->stops + row * STOPS + i) == token;
    }
    if (!s.all_ok(ok)) return false;
    any = block_any(mine);
    block_barrier();  // before block_any's words are written again
    return true;
  }
#endif

 private:
  // The first token's inputs are the host's, the others' what was chosen.
  DEVICE TokensIn tokens_in() const { return {a->tokens_in, a->next_tokens, MANY_TOKENS && token ? tag(0) - 1 : 0}; }
  DEVICE TokensOut tokens_out() const {
    return {a->tokens_out + at_token(), a->next_tokens, a->ring + at_token(), a->cancel};
  }
  DEVICE u32 tag(u32 version) const { return a->epoch + (MANY_TOKENS ? token * (2 * a->layers + 2) : 0) + version; }
  // Where this token's entries of [tokens][ROWS] begin.
  DEVICE u32 at_token() const { return MANY_TOKENS ? token * ROWS : 0; }
  DEVICE const u32* positions() const { return a->positions + at_token(); }
  DEVICE u32 attention_tag(u32 layer) const { return tag(2 * layer + 1); }
  DEVICE u32 mlp_tag(u32 layer) const { return tag(2 * layer + 2); }
  // The slot of a region for this layer, [ROWS][width].
  DEVICE static Pair* slot(Pair* region, u32 layer, int width) { return region + (u64)(layer & 1) * ROWS * width; }

  // x(version) of all rows.
  DEVICE PairRows x(u32 version) const { return {slot(a->x, version, HIDDEN), HIDDEN, tag(version)}; }
  // x(version + 1) = x(version) + v, for two channels; of several ranks, v is this one's share.
  DEVICE void add_to_x(u32 version, int row, int channel, const f32 (&v)[2]) {
    if constexpr (RANKS > 1) {
      u64 at = parts_of(version + 1, s.rank, HIDDEN) + row * HIDDEN + channel;
      return push(s.rank, a->parts, at, {bits<u32>(v[0]), bits<u32>(v[1])}, tag(version + 1));
    }
    Pair old[2];  // there since this stage's inputs are: they derive from it
    x(version).take(s, row, [&](int i) { return channel + i; }, old);
    Pair* to = slot(a->x, version + 1, HIDDEN) + row * HIDDEN + channel;
    for (int j = 0; j < 2; ++j) put(to + j, value_of(old[j]) + v[j], tag(version + 1));
  }

  // in the shares of x(version) - x(version - 1);  out x(version).
  STAGE bool reduce(u32 version) {
    a = fresh(a);
    return reduce_ranks<HIDDEN>(s, REDUCE, tag(version), version, load_constant(a->parts + s.rank),
                                slot(a->x, version - 1, HIDDEN), slot(a->x, version, HIDDEN));
  }

  // A tile of one of several matrices that share a stage, and where its outputs go.
  struct Tile {
    const Matrix matrix;
    int rows, row;  // output rows of the matrix; tile row
    Pair* out;      // [ROWS][width], at the tile's first output
    int width;
  };
  DEVICE static Tile tile(const Matrix& m, int rows, int row, Pair* region, int width) {
    return {m, rows, row, region + row * TILE_ROWS, width};
  }

  // in x(2l), normalized;  out low-rank query, latent and shared key, index key, index head weights.
  STAGE bool down(u32 layer, Const<LayerWeights> w, bool scored) {
    constexpr int QS = Q_LORA / TILE_ROWS, KVS = ENTRY / TILE_ROWS, INDEXES = INDEX_DIM / TILE_ROWS;
    a = fresh(a);
    u32 t = attention_tag(layer);
    auto of = [&](int task) {
      if (task < QS) return tile(copy_of(&w->q_a), Q_LORA, task, slot(a->down_q, layer, Q_LORA), Q_LORA);
      task -= QS;
      if (task < KVS) return tile(copy_of(&w->kv_a), ENTRY, task, slot(a->down_kv, layer, ENTRY), ENTRY);
      return tile(copy_of(&w->index_k), INDEX_DIM, task - KVS, slot(a->down_index, layer, INDEX_OUT), INDEX_OUT);
    };
    auto input = input_for<Linear, HIDDEN>(s, Normed<PairRows>{x(2 * layer), w->attention_norm});
    bool ok = linear<Linear, HIDDEN>(
        s, DOWN, t, QS + KVS + (w->full_index ? INDEXES : 0), input,
        [&](int task) { return rows_of_tile<Linear, HIDDEN>(of(task)); },
        [&](int task, int row, int n, const f32(&v)[2]) {
          put_scaled(of(task), row, n, v, inverse_rms(row, HIDDEN, NORM_EPS), t);
        });
    if (!ok || !scored) return ok;

    auto exact = input_for<Wide<Island>, HIDDEN>(s, Normed<PairRows>{x(2 * layer), w->attention_norm});
    auto weights = [&](int task) {
      return tile(copy_of(&w->index_weights), INDEX_HEADS, task, slot(a->down_index, layer, INDEX_OUT) + INDEX_DIM,
                  INDEX_OUT);
    };
    return linear<Wide<Island>, HIDDEN>(
        s, DOWN, t, INDEX_HEADS / TILE_ROWS, exact,
        [&](int task) { return rows_of_tile<Wide<Island>, HIDDEN>(weights(task)); },
        [&](int task, int row, int n, const f32(&v)[2]) {
          put_scaled(weights(task), row, n, v, inverse_rms(row, HIDDEN, NORM_EPS) * INDEX_WEIGHT_SCALE, t);
        });
  }
  template <class F, int K> DEVICE static TileRow<F> rows_of_tile(const Tile& tile) {
    return tile_row<F, K>(tile.matrix.tiles, tile.matrix.scales, tile.rows, 0, tile.row);
  }
  DEVICE static void put_scaled(const Tile& tile, int row, int n, const f32 (&v)[2], f32 scale, u32 t) {
    for (int j = 0; j < 2; ++j) put(tile.out + row * tile.width + n + j, v[j] * scale, t);
  }

  STAGE bool cache_entry(u32 layer, Const<LayerWeights> w) {
    a = fresh(a);
    u32 t = attention_tag(layer);
    CacheEntry entry{w->kv_a_norm, w->index_k_norm, LATENT_NORM_EPS, INDEX_NORM_EPS, a->rope,
                     positions(),  pages,           w->latent_cache, w->index_cache};
    return write_cache<Act, KV_LORA, ROPE, INDEX_DIM>(s, CACHE_ENTRY, t, {slot(a->down_kv, layer, ENTRY), ENTRY, t},
                                                      {slot(a->down_index, layer, INDEX_OUT), INDEX_OUT, t}, entry,
                                                      a->cache_flags);
  }

  // in low-rank query, normalized;  out rotated queries of attention and of the indexer.
  STAGE bool query(u32 layer, Const<LayerWeights> w, bool scored) {
    constexpr int QS = HEADS * Q_HEAD / TILE_ROWS, INDEXES = INDEX_HEADS * INDEX_DIM / TILE_ROWS;
    a = fresh(a);
    u32 t = attention_tag(layer);
    auto of = [&](int task) {
      if (task < QS)
        return tile(copy_of(&w->q_b), HEADS * Q_HEAD, task, slot(a->query, layer, HEADS * Q_HEAD), HEADS * Q_HEAD);
      constexpr int INDEX_Q = INDEX_HEADS * INDEX_DIM;
      return tile(copy_of(&w->index_q), INDEX_Q, task - QS, slot(a->index_query, layer, INDEX_Q), INDEX_Q);
    };
    auto input =
        input_for<Linear, Q_LORA>(s, Normed<PairRows>{{slot(a->down_q, layer, Q_LORA), Q_LORA, t}, w->q_a_norm});
    return linear<Linear, Q_LORA>(
        s, QUERY, t, QS + (scored ? INDEXES : 0), input,
        [&](int task) { return rows_of_tile<Linear, Q_LORA>(of(task)); },
        [&](int task, int row, int n, const f32(&v)[2]) {
          f32 scale = inverse_rms(row, Q_LORA, LATENT_NORM_EPS), q[2] = {v[0] * scale, v[1] * scale};
          int channel = task * TILE_ROWS + n;  // the rotated ones: last of a head, first of an index head
          int rotated = task < QS ? channel % Q_HEAD - NOPE : (channel - HEADS * Q_HEAD) % INDEX_DIM;
          if (rotated >= 0 && rotated < ROPE) rotate<ROPE>(a->rope, load_constant(positions() + row), rotated, q);
          put_scaled(of(task), row, n, q, 1.f, t);
        });
  }

  STAGE bool index_scores(u32 layer, Const<LayerWeights> w) {
    a = fresh(a);
    u32 t = attention_tag(layer);
    IndexScores<Act, INDEX_HEADS, INDEX_DIM> scores{
        {slot(a->index_query, layer, INDEX_HEADS * INDEX_DIM), INDEX_HEADS * INDEX_DIM, t},
        {slot(a->down_index, layer, INDEX_OUT) + INDEX_DIM, INDEX_OUT, t},
        w->index_cache,
        pages,
        positions(),
        written(),
        a->index_scores,
        score_stride(),
        a->score_flags,
        INDEX_TOPK};
    return scores.run(s, INDEX_SCORES, t);
  }
  DEVICE u64 score_stride() const { return (u64)a->max_pages * PAGE; }

  STAGE bool select(u32 layer) {
    Select<INDEX_TOPK> best{a->index_scores, score_stride(), positions(),       a->score_flags,
                            a->max_pages,    a->selection,   a->selection_flags};
    return best.run(s, SELECT, attention_tag(layer));
  }

  // in query;  out per head Wk[h]^T of its unrotated part.
  STAGE bool latent_query(u32 layer, Const<LayerWeights> w) {
    a = fresh(a);
    u32 t = attention_tag(layer);
    PairRows from{slot(a->query, layer, HEADS * Q_HEAD), HEADS * Q_HEAD, t};
    return per_head<NOPE>(LATENT_QUERY, t, from, Q_HEAD, copy_of(&w->key_up), KV_LORA,
                          slot(a->latent_query, layer, HEADS * KV_LORA));
  }
  // A matrix [n][K] per head: task = (head, tile), in head * stride, out [row][head][n].
  template <int K>
  DEVICE bool per_head(Stage stage, u32 t, const PairRows& from, int stride, const Matrix& m, int n, Pair* out) {
    int tiles = n / TILE_ROWS;
    auto input = input_for<Absorbed, K>(s, from);
    using In = decltype(input);
    return linear_tasks<Absorbed, K, 1>(
        s, stage, t, HEADS * tiles, input, [](int) { return true; },
        [&](int task, int) { return tile_row<Absorbed, K>(m.tiles, m.scales, n, task / tiles, task % tiles); },
        [&](In& in, int task) { in.change({from.base + task / tiles * stride, from.stride, t}); },
        [&](int task, int row, int at, const f32(&v)[1][2]) {
          for (int j = 0; j < 2; ++j) put(out + row * HEADS * n + task * TILE_ROWS + at + j, v[0][j], t);
        });
  }

  DEVICE Written written() const { return {a->first_written + at_token(), positions(), a->cache_flags}; }
  DEVICE Selected selected() const { return {positions(), a->selection, INDEX_TOPK}; }
  DEVICE Partials partials() const { return {a->partial_out, a->partial_stat, a->partial_flags}; }

  STAGE bool attend(u32 layer, Const<LayerWeights> w) {
    a = fresh(a);
    u32 t = attention_tag(layer);
    Attention attention{{slot(a->latent_query, layer, HEADS * KV_LORA), HEADS * KV_LORA, t},
                        {slot(a->query, layer, HEADS * Q_HEAD), HEADS * Q_HEAD, t},
                        w->latent_cache,
                        pages,
                        selected(),
                        written(),
                        a->selection_flags,
                        attention_tag(selection_layer),
                        partials()};
    return attention.run(s, ATTEND, t);
  }
  STAGE bool merge_parts(u32 layer) {
    return merge<HEADS, KV_LORA, Attention::MAX_SPLITS>(s, MERGE, attention_tag(layer), selected(), partials(),
                                                        slot(a->latent_out, layer, HEADS * KV_LORA));
  }

  // in per head the attended latent;  out Wv[h] of it.
  STAGE bool value_up(u32 layer, Const<LayerWeights> w) {
    a = fresh(a);
    u32 t = attention_tag(layer);
    PairRows from{slot(a->latent_out, layer, HEADS * KV_LORA), HEADS * KV_LORA, t};
    return per_head<KV_LORA>(VALUE_UP, t, from, KV_LORA, copy_of(&w->value_up), V_DIM,
                             slot(a->attention_out, layer, HEADS * V_DIM));
  }

  // in attention of all heads, x(2l);  out x(2l + 1).
  STAGE bool output(u32 layer, Const<LayerWeights> w) {
    constexpr int K = HEADS * V_DIM;
    a = fresh(a);
    u32 t = attention_tag(layer);
    auto input = input_for<Linear, K>(s, PairRows{slot(a->attention_out, layer, K), K, t});
    Matrix m = copy_of(&w->o);
    return linear<Linear, K>(
        s, OUTPUT, t, HIDDEN / TILE_ROWS, input,
        [&](int task) { return tile_row<Linear, K>(m.tiles, m.scales, HIDDEN, 0, task); },
        [&](int task, int row, int n, const f32(&v)[2]) { add_to_x(2 * layer, row, task * TILE_ROWS + n, v); });
  }

  DEVICE Normed<PairRows> mlp_input(u32 layer, Const<LayerWeights> w) const { return {x(2 * layer + 1), w->mlp_norm}; }

  // in x(2l + 1), weighted, in f32;  out the experts' products in slices of k, and the slices' sums of squares.
  STAGE bool router(u32 layer, Const<LayerWeights> w) {
    constexpr int TILES = EXPERTS / TILE_ROWS, ROW = Slices::COUNT * Slices::WIDTH_OUT;
    a = fresh(a);
    u32 t = mlp_tag(layer);
    auto slice_of = [&](int slice) {
      PairRows from = x(2 * layer + 1);
      from.base += slice * Slices::K;
      return Normed<PairRows>{from, w->mlp_norm + slice * Slices::K};
    };
    auto input = input_for<Wide<Island>, Slices::K>(s, slice_of(0));
    using In = decltype(input);
    Matrix m = copy_of(&w->router);
    Pair* out = slot(a->router_scores, layer, ROW);
    return linear_tasks<Wide<Island>, Slices::K, 1>(
        s, ROUTER, t, TILES * Slices::COUNT, input, [](int) { return true; },
        [&](int task, int) {
          return tile_row<Wide<Island>, HIDDEN>(m.tiles, m.scales, EXPERTS, 0, task % TILES)
              .from_k(task / TILES * Slices::K);
        },
        [&](In& in, int task) { in.change(slice_of(task / TILES)); },
        [&](int task, int row, int n, const f32(&v)[1][2]) {
          Pair* of_slice = out + row * ROW + task / TILES * Slices::WIDTH_OUT;
          for (int j = 0; j < 2; ++j) put(of_slice + task % TILES * TILE_ROWS + n + j, v[0][j], t);
          if (task % TILES == 0 && n == 0) put(of_slice + EXPERTS, sum_of_squares(row), t);
        });
  }

  // in x(2l + 1), normalized;  out middle: silu(gate) * up of the dense layer; or of the shared expert, which needs no route and
  // so goes first, and then, with the router's weights, of every expert that some row chose, once for all rows.
  template <class F> STAGE bool gate_up(u32 layer, Const<LayerWeights> w, Route& route) {
    bool dense = w->dense;
    int width = dense ? DENSE_WIDTH : EXPERT_WIDTH, tiles = width / TILE_ROWS;
    // As many tasks as there could be: how many there are is known only to blocks that ask for the route.
    int most = tiles * (dense ? 1 : 1 + ((int)s.rows * TOP_K < EXPERTS ? (int)s.rows * TOP_K : EXPERTS));
    bool given_up = false;
    auto exists = [&](int task) {
      if (task < tiles) return true;
      int active = route.decide(s);
      given_up = active < 0;
      return task < (active + 1) * tiles;
    };
    auto expert = [&](int task) { return task < tiles ? EXPERTS : (int)(u32)route_active[task / tiles - 1]; };
    a = fresh(a);
    u32 t = mlp_tag(layer);
    Pair* out = slot(a->middle, layer, MIDDLE);
    auto input = input_for<F, HIDDEN, 2>(s, mlp_input(layer, w));
    Matrix m = copy_of(&w->gate_up);
    bool ok = linear_tasks<F, HIDDEN, 2>(
        s, GATE_UP, t, most, input, exists,
        [&](int task, int half) {
          u64 matrix = dense ? half : (u64)expert(task) * 2 + half;
          return tile_row<F, HIDDEN>(m.tiles, m.scales, width, matrix, task % tiles);
        },
        [](auto&, int) {},
        [&](int task, int row, int n, const f32(&v)[2][2]) {
          int place = dense ? 0 : TOP_K;
          f32 weight = 1, rms = inverse_rms(row, HIDDEN, NORM_EPS);
          if (task >= tiles) {
            place = place_in_row(expert(task), row);
            if (place < 0) return;
            weight = route_weight[row * TOP_K + place];
          }
          Pair* to = out + row * MIDDLE + place * width + task % tiles * TILE_ROWS + n;
          for (int j = 0; j < 2; ++j) put(to + j, weight * (silu(v[0][j] * rms) * (v[1][j] * rms)), t);
        });
    return ok && !given_up;
  }
  STAGE bool dense_down(u32 layer, Const<LayerWeights> w) {
    a = fresh(a);
    u32 t = mlp_tag(layer);
    auto input = input_for<Linear, DENSE_WIDTH>(s, PairRows{slot(a->middle, layer, MIDDLE), MIDDLE, t});
    Matrix m = copy_of(&w->down);
    return linear<Linear, DENSE_WIDTH>(
        s, DOWN_SUM, t, HIDDEN / TILE_ROWS, input,
        [&](int task) { return tile_row<Linear, DENSE_WIDTH>(m.tiles, m.scales, HIDDEN, 0, task); },
        [&](int task, int row, int n, const f32(&v)[2]) { add_to_x(2 * layer + 1, row, task * TILE_ROWS + n, v); });
  }

  STAGE bool expert_down(u32 layer, Const<LayerWeights> w, Route& route) {
    a = fresh(a);
    u32 t = mlp_tag(layer);
    ExpertsDown<Expert, EXPERT_WIDTH> experts{{slot(a->middle, layer, MIDDLE), MIDDLE, t}, copy_of(&w->down), HIDDEN};
    return experts.run(s, DOWN_SUM, t, route, [&](int task, int row, int n, const f32(&v)[2]) {
      add_to_x(2 * layer + 1, row, task * TILE_ROWS + n, v);
    });
  }

  // in x after the last layer;  out logits if wanted, the token.
  STAGE bool next_token() {
    a = fresh(a);
    u32 t = tag(2 * a->layers + 1);
    auto input = input_for<Head, HIDDEN>(s, Normed<PairRows>{x(2 * a->layers), a->final_norm});
    Matrix m = copy_of(&a->head);
    f32* logits = a->logits;
    Best best;
    bool ok = linear<Head, HIDDEN>(
        s, HEAD, t, VOCAB / TILE_ROWS, input,
        [&](int task) { return tile_row<Head, HIDDEN>(m.tiles, m.scales, VOCAB, 0, task); },
        [&](int task, int row, int n, const f32(&v)[2]) {
          f32 scale = inverse_rms(row, HIDDEN, NORM_EPS);
          for (int j = 0; j < 2; ++j) {
            u32 token = task * TILE_ROWS + n + j;
            best.offer(v[j] * scale, token);
            if (logits) store_plain(logits + (u64)row * VOCAB + token, v[j] * scale, t);
          }
        });
    if (!ok) return false;
    if (a->choices) {
      static_assert(VOCAB <= 32 * LDS_WORDS && VOCAB < 1 << 21, "bits, and sums of 11 bits, of every token");
      s.announce(a->logit_flags + block_id(), t, Stored::PLAIN);
      ChooseTokens choose{logits,      VOCAB, a->logit_flags, a->choices, a->adjustments, a->adjustment_stride,
                          a->adjusted, token, tokens_out()};
      return choose.run(s, SAMPLE, t);
    }
    publish_best(s, t, best, a->best);
    return choose_token<VOCAB>(s, SAMPLE, t, a->best, a->candidates, tokens_out());
  }
};

KERNEL void glm_decode(const DecodeArgs* args) {
  Const<DecodeArgs> a = as_const(args);
  if (a->version != DESCRIPTOR_VERSION) return;
#if MANY_TOKENS
  // What goes from token to token is told to be the same in all lanes: the compiler cannot know, as a lane that gives up leaves.
  for (u32 token = 0, base = 0, turn = 0;; ++token) {
    Decode step(a, token);
    step.s.base = base, step.s.turn = turn;
    bool stop = token + 1 == a->tokens;
    if (!step.run() || (!stop && !step.any_stops(stop))) {
      step.s.report();
      return;
    }
    if (uniform(stop)) return;
    base = uniform(step.s.base), turn = uniform(step.s.turn);
  }
#else
  Decode step(a, 0);
  if (!step.run()) step.s.report();
  step.s.timeline.close(a->epoch);
#endif
}
