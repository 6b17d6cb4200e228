// DeepSeek-V4 and V4.1, one decode step: token in to token out, for 1 to 16 rows (requests), in one persistent launch.
//
// Every block runs this program from top to bottom. A stage waits for exactly the data it reads, so blocks are in different
// stages, and layers, at the same time; hip/handoff/step.h says how tasks are dealt out and how hand-offs work.
//
// Versions and slots. h(2l) are the streams that enter layer l, h(2l + 1) those that attention has been spread over, h(2l + 2)
// leave the layer; x(v) is what the sublayer that takes h(v) sees. The tag of everything that this sublayer makes is
// epoch + v + 1, and epochs grow from launch to launch, so no tag ever comes twice.
// Each region keeps two versions: streams, x and the sites' weights by the parity of v, the others by that of the layer.
// Why two are enough: a task publishes only after it has read all its inputs, and every value of sublayer v is needed, through
// however many tasks, for every value of h(v + 1). x(v + 1) derives from all of h(v + 1), be it by the products with the mixing
// weights or because each of its values was made together with one of h(v + 1). So whoever writes for sublayer v + 2 has
// h(v + 2) whole, each value of which derives from all of x(v + 1); hence every task of sublayer v has published and is done with
// its inputs. Regions of bulk data have one slot for the same reason. Selection, candidates and the flags of entries live longer,
// until the next layer that makes them, which is the same argument.
// It needs every task to be one that somebody waits for. Attention over the window's last part waits for the compressors and for
// the candidates, whoever needs them (Held); the indexer's later stages run only if a row needs them (scores()), and x comes in f32
// only where it is read so (read_wide()); route.h deals with blocks that turn out to have no task.
// Ranks: heads, groups, experts' widths and the vocabulary are divided among RANKS. Then OUTPUT and DOWN_SUM give shares of y, and
// REDUCE sums them up (hip/handoff/reduce.h); and what Engram adds, whose parts every rank gets of all. Everything else is the same
// computation on every rank, to the bit.
#include "deepseek/matrices.h"
#include "stages/candidates.h"
#include "stages/choose.h"
#include "stages/embed.h"
#include "stages/engram.h"
#include "stages/experts.h"
#include "stages/index_scores.h"
#include "stages/sink_attend.h"
#include "stages/window_entry.h"

struct Decode : Context {
  using Context::Context;

  DEVICE bool run() {
    best = Best();
    u32 end = 2 * a->layer_end;
    version = 2 * a->layer_begin;
    wide_now = read_wide(version);
    if (version == 0 && !(look_up() && embed_tokens())) return false;
    for (; version < end; ++version) {
      begin_sublayer();
      u32 last = version % 2 ? DOWN_SUM : OUTPUT;
      for (u32 stage = ENGRAM_DOTS; stage <= last; ++stage) {
        if (version % 2 && stage == DOWN) stage = ROUTER;
        if (!run(stage)) return false;
      }
      if constexpr (RANKS > 1)
        if (!reduce()) return false;
    }
    return a->layer_end < a->layers || (collapse_end() && run(HEAD) && next_token());
  }

 private:
  DEVICE void begin_sublayer() {
    a = fresh(a);
    scored = scores(w());
    wide_now = read_wide(version), wide_next = read_wide(version + 1);
    constexpr int ROW = Slices::COUNT * EXPERTS;
    route = Router{of_layer(a->router_scores, ROW), x_squares(version), NORM_EPS, w()->router_bias, ROUTED_SCALE,
                   w()->experts_of_token,           a->tokens_in};
  }
  DEVICE bool run(u32 stage) {
    a = fresh(a);
    u32 t = next_tag();
    switch (stage) {
      case ENGRAM_DOTS:
      case ENGRAM_ADD:
        return engram_stage(stage);
      case MIX:
        return Sites::mix(s, MIX, t, streams(), site_weights()->mix, slot(a->products, version, Sites::SLICED));
      case COLLAPSE:
        return DELAYED || collapse(sites());
      case SITE:
        return sites().site(s, SITE, t, SINKHORN_ROUNDS, products(Sites::SLICED), slot(a->site, version, Sites::OUT));
      case DOWN_WIDE:
      case ROUTER:
        return linear<Exact, true>(s, stage, t, OneOf<Context, Exact, DownWide, RouterLogits>{*this, stage});
      case WINDOW_ENTRY:
        return window_entry();
      case COMPRESS:
        return !makes_entries() || compress();
      case KEY_PRODUCTS:
        if constexpr (KEYS_FROM_LATENT) return !makes_keys() || linear<Exact, false>(s, stage, t, KeyProducts{*this});
        return true;
      case COMPRESS_KEYS:
        return !makes_keys() || compress_keys();
      case INDEX_SCORES:
        return !scored || index_scores();
      case CANDIDATES:
        return !chooses_candidates() || candidates().run(s, CANDIDATES, t);
      case SELECT:
        return !scored || select();
      case ATTEND:
        return attention().attend(s, ATTEND, t);
      case MERGE:
        return attention().template merge<Act>(s, MERGE, t, w()->sinks, rope(),
                                               slot(a->attention_out, layer(), words(HEADS * D)));
      case GATE_UP:
        return linear<Expert, false>(s, stage, t, GateUp{*this});
      case DOWN_SUM:
        return expert_down();
      case HEAD:
        return linear<Head, HEAD_WEIGHTED>(s, stage, t, Logits{*this});
      default:
        return linear<Linear, false>(
            s, stage, t,
            OneOf<Context, Linear, Down, Query, OutputGroups, AttentionOutput, SharedGateUp, SharedDown>{*this, stage});
    }
  }

  // Streams.

  DEVICE Const<SiteWeights> site_weights() const { return version % 2 ? &w()->mlp : &w()->attention; }
  DEVICE Sites sites() const {
    Const<SiteWeights> of = site_weights();
    return {of->scale, of->base, NORM_EPS, HC_EPS};
  }
  DEVICE PairRows products(int stride) const {
    return {slot(a->products, version, Sites::SLICED), (u32)stride, next_tag()};
  }
  template <int N = Sites::OUT> DEVICE bool collapse(const Sites& by) {
    return by.template collapse<N>(
        s, COLLAPSE, next_tag(), products(Sites::SLICES * (N + 1)), streams(),
        [&](int row, int channel, const f32(&v)[2], bool there) { publish_x(version, row, channel, v, there); });
  }
  DEVICE bool collapse_end() {
    a = fresh(a);
    wide_now = read_wide(version);
    if (DELAYED) return true;
    return Sites::template mix<STREAMS>(s, MIX, next_tag(), streams(), a->end_mix,
                                        slot(a->products, version, Sites::SLICED)) &&
           collapse<STREAMS>({a->end_scale, a->end_base, NORM_EPS, HC_EPS});
  }
  DEVICE bool embed_tokens() {
    a = fresh(a);
    TokensIn tokens{a->tokens_in, nullptr, 0};
    return embed<Island, HIDDEN>(s, EMBED, tag(0), a->embedding, tokens,
                                 [&](int row, int channel, const f32(&v)[2], bool there) {
                                   f32 all[STREAMS][2];
                                   UNROLL for (int i = 0; i < 2 * STREAMS; ++i) all[i / 2][i % 2] = v[i % 2];
                                   if (there) put_streams(slot(a->h, 0, Sites::WIDTH_ALL), row, channel, all);
                                   if (collapsed_before(0)) publish_x(0, row, channel, v, there);
                                 });
  }
  DEVICE void put_streams(Pair* streams, int row, int channel, const f32 (&v)[STREAMS][2]) const {
    UNROLL for (int i = 0; i < 2 * STREAMS; ++i)
        put(streams + row * Sites::WIDTH_ALL + i / 2 * HIDDEN + channel + i % 2, v[i / 2][i % 2], tag(version));
  }

  // in shares of y of all ranks;  out h(version + 1).
  DEVICE bool reduce() {
    a = fresh(a);
    return reduce_ranks<HIDDEN>(
        s, REDUCE, next_tag(), version + 1, a->parts, nullptr,
        [&](int row, int channel, bool there) { return before_spread(row, channel, there); },
        [&](int row, int channel, const f32(&v)[2], bool there, const Ahead& of) {
          spread(row, channel, v, there, of);
        });
  }

  // Engram. Its rows depend on the tokens alone, so all of them are looked up, and mapped, before anything else.

  DEVICE bool look_up() {
    if constexpr (ENGRAM_DIM != 0) {
      for (u32 i = 0; i < a->engram_count; ++i) {
        a = fresh(a);
        Const<EngramWeights> w = as_const(a->engrams) + i;
        Hash hash{w->multipliers, w->heights,   a->token_ids, a->padding_token,
                  a->tokens_in,   a->positions, a->slots,     a->recent};
        Pair* out = a->looked_up + (u64)i * ROWS * words(EngramMap::K);
        if (!engram_look_up<Act, Island, NGRAM, ENGRAM_HEADS, ENGRAM_DIM>(s, LOOK_UP, tag(0), hash, w->table, w->scales,
                                                                          i == 0, out))
          return false;
      }
      a = fresh(a);
      if (!linear<Linear, false>(s, ENGRAM_MAP, tag(0), EngramMap{*this})) return false;
      if constexpr (RANKS > 1) return gather_mapped();
    }
    return true;
  }
  DEVICE bool gather_mapped() {
    constexpr int ALL = EngramMap::ALL;
    for (u32 i = 0; i < a->engram_count; ++i) {
      a = fresh(a);
      u64 at = (u64)i * ROWS * ALL;
      if (!hand_on(s, ENGRAM_GATHER, tag(0), load_constant(a->mapped_parts + s.rank) + at, a->mapped + at, s.rows * ALL,
                   [](int value) { return (u32)(value % HIDDEN / EngramMap::WIDTH_R); }))
        return false;
    }
    return true;
  }
  DEVICE bool engram_stage(u32 stage) {
    if constexpr (ENGRAM_DIM != 0) {
      if (version % 2 || !w()->engram) return true;
      constexpr int MAPPED = (STREAMS + 1) * HIDDEN;
      Gate gate{h(version),
                {a->mapped + (u64)(w()->engram - 1) * ROWS * MAPPED, MAPPED, tag(0)},
                engram()->q_weight,
                engram()->k_weight,
                NORM_EPS};
      if (stage == ENGRAM_DOTS) return gate.dots(s, stage, next_tag(), slot(a->dots, layer(), Gate::DOTS));
      return gate.add(s, stage, next_tag(), of_layer(a->dots, Gate::DOTS),
                      [&](int row, int channel, const f32(&v)[STREAMS][2], bool there) {
                        if (there) put_streams((Pair*)streams().base, row, channel, v);
                        if (DELAYED) collapse_added(row, channel, v, there);
                      });
    }
    return true;
  }
  // With the weights of the site before; before the first there is one stream.
  DEVICE void collapse_added(int row, int channel, const f32 (&v)[STREAMS][2], bool there) {
    f32 x[2] = {v[0][0], v[0][1]};
    if (version && there) {
      Pair weights[STREAMS];
      site(version - 1).take(s, row, [](int i) { return i; }, weights);
      UNROLL for (int j = 0; j < 2; ++j) {
        x[j] = 0;
        UNROLL for (int i = 0; i < STREAMS; ++i) x[j] += value_of(weights[i]) * v[i][j];
      }
    }
    publish_x(version, row, channel, x, there);
  }

  // Attention.

  DEVICE bool window_entry() {
    WindowEntry<Act, D, ROPE, WINDOW> entry{
        of_layer(a->down_kv, D), w()->kv_norm, NORM_EPS, rope(), a->positions, a->slots, w()->window, a->window_flags};
    return entry.run(s, WINDOW_ENTRY, next_tag());
  }
  DEVICE bool makes_keys() const { return makes_entries() && w()->key.norm; }
  template <int WIDTH_E, class Of, Pooling POOLING>
  DEVICE bool compress_as(u32 stage, Const<Compressor> of, const PairRows& from, Pair* latent, Pair* flags) {
    Compress<Act, WIDTH_E, ROPE, Of::RATIO, POOLING> entry{
        from,        of->ape,     of->norm, NORM_EPS, a->stretched_rope, a->positions, a->slots, pages,
        of->pending, of->entries, latent,   flags};
    return entry.run(s, stage, next_tag());
  }
  DEVICE bool compress() {
    PairRows from = of_layer(a->down_wide, DOWN_WIDTH);
    Pair* latent = KEYS_FROM_LATENT && makes_keys() ? slot(a->latent, layer(), D) : nullptr;
    return kind_a() ? compress_as<D, KindA, KindA::POOLING>(COMPRESS, &w()->entry, from, latent, a->entry_flags)
                    : compress_as<D, KindB, KindB::POOLING>(COMPRESS, &w()->entry, from, latent, a->entry_flags);
  }
  DEVICE bool compress_keys() {
    constexpr bool MADE = KEYS_FROM_LATENT;
    PairRows from = MADE ? of_layer(a->key_values, INDEX_DIM) : of_layer(a->down_wide, DOWN_WIDTH);
    if (!MADE) from.base += entry_values();
    if (MADE || KindA::KEYS)
      if (kind_a())
        return compress_as<INDEX_DIM, KindA, MADE ? Pooling::NONE : KindA::POOLING>(COMPRESS_KEYS, &w()->key, from,
                                                                                    nullptr, a->key_flags);
    if constexpr (MADE || KindB::KEYS)
      return compress_as<INDEX_DIM, KindB, MADE ? Pooling::NONE : KindB::POOLING>(COMPRESS_KEYS, &w()->key, from,
                                                                                  nullptr, a->key_flags);
    return true;
  }

  DEVICE u64 score_stride() const { return (u64)a->max_pages * PAGE; }
  DEVICE bool index_scores() {
    PairRows weights = of_layer(a->down_wide, DOWN_WIDTH);
    weights.base += DOWN_WIDTH - INDEX_HEADS;
    u32 source_tag = tag(2 * w()->source + 1);
    IndexScores<Act, INDEX_HEADS, INDEX_DIM> scores{of_layer(a->index_query, words(INDEX_Q)),
                                                    weights,
                                                    w()->key.entries,
                                                    pages,
                                                    a->positions,
                                                    {a->positions, a->positions, a->key_flags},
                                                    a->index_scores,
                                                    score_stride(),
                                                    a->score_flags,
                                                    INDEX_TOPK,
                                                    ratio(),
                                                    source_tag};
    return scores.run(s, INDEX_SCORES, next_tag());
  }
  using Blocks = CandidateBlocks<CANDIDATE_BLOCKS, CANDIDATE_SIZE>;
  DEVICE bool chooses_candidates() const { return scored && (int)layer() == CANDIDATE_LAYER; }
  DEVICE Blocks candidates() const {
    return {a->index_scores, score_stride(), a->positions,        ratio(),
            a->score_flags,  a->max_pages,   a->candidates_taken, a->candidate_flags};
  }
  DEVICE bool select() {
    Select<INDEX_TOPK> best{a->index_scores, score_stride(), a->positions,       a->score_flags,
                            a->max_pages,    a->selection,   a->selection_flags, ratio()};
    if (CANDIDATE_LAYER >= 0 && (int)layer() > CANDIDATE_LAYER)
      return best.run(s, SELECT, next_tag(),
                      ByCandidates<CANDIDATE_BLOCKS, CANDIDATE_SIZE>{candidates(), tag(2 * CANDIDATE_LAYER + 1)});
    return best.run(s, SELECT, next_tag());
  }

  DEVICE SinkAttend<Act, HEADS, D, ROPE> attention() const {
    bool own = makes_entries(), listed = w()->selector != NOBODY;
    SinkEntries from{a->positions,
                     a->slots,
                     w()->window,
                     WINDOW,
                     w()->entry.entries,
                     pages,
                     w()->kind ? ratio() : 1,
                     listed ? a->selection : nullptr,
                     INDEX_TOPK};
    u32 t = next_tag();
    return {of_layer(a->query, HEADS * D),
            {HEAD_NORM ? slot(a->query_squares, layer(), HEADS * HEAD_PARTS) : nullptr, HEADS * HEAD_PARTS, t},
            NORM_EPS,
            from,
            a->window_flags,
            a->entry_flags,
            a->selection_flags,
            tag(2 * w()->source + 1),
            listed ? tag(2 * w()->selector + 1) : 0,
            {{own ? a->entry_flags : nullptr, t},
             {makes_keys() ? a->key_flags : nullptr, t},
             {chooses_candidates() ? a->candidate_flags : nullptr, t}},
            SOFTMAX_SCALE,
            a->partial_out,
            a->partial_stat,
            a->partial_flags,
            (int)a->max_splits};
  }

  // Experts and the end.

  DEVICE bool expert_down() {
    ExpertsDown<Expert, EXPERT_WIDTH, HIDDEN, false> experts{of_layer(a->middle, words(TOP_K * EXPERT_WIDTH)),
                                                             copy_of(&w()->down)};
    return experts.run(s, DOWN_SUM, next_tag(), ExpertsOut{*this});
  }

  DEVICE bool next_token() {
    a = fresh(a);
    u32 t = next_tag();
    TokensOut tokens{a->tokens_out, a->next_tokens};
    if (a->choices) {
      static_assert(VOCAB <= 32 * LDS_WORDS && VOCAB < 1 << 21, "bits, and sums of 11 bits, of every token");
      s.announce(a->logit_flags + block_id(), t, Stored::PLAIN);
      ChooseTokens choose{a->logits,   VOCAB, a->logit_flags, a->choices, a->adjustments, a->adjustment_stride,
                          a->adjusted, 0,     tokens};
      return choose.run(s, SAMPLE, t);
    }
    publish_best(s, t, best, a->best);
    return choose_token<VOCAB>(s, SAMPLE, t, a->best, a->candidates, tokens);
  }

  using Hash = NgramHash<NGRAM, ENGRAM_HEADS>;
  using Gate = EngramGate<STREAMS, HIDDEN>;
};

KERNEL void deepseek_decode(const DecodeArgs* args) {
  Const<DecodeArgs> a = as_const(args);
  if (a->version != DESCRIPTOR_VERSION) return;
  Decode step(a);
  if (!step.run()) step.s.report();
  step.s.timeline.close(a->epoch);
}
