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
#include "glm/matrices.h"
#include "stages/cache_entry.h"
#include "stages/choose.h"
#include "stages/embed.h"
#include "stages/experts.h"
#include "stages/index_scores.h"
#include "stages/select.h"

struct Decode : Context {
  using Context::Context;

  // Stage after stage, in the order of stages.h. One loop and one place for each kind of stage, so that stages of one kind
  // share their code: what a kernel runs through once a layer should fit into the instruction cache (an H200, 20 layers of
  // GLM-5.2 as rank 0 of 8: 320 KB a layer took 4 to 8 us more for the first task of a stage than for the second).
  DEVICE bool run() {
    best = Best();
    for (layer = 0; layer < a->layer_begin; ++layer)  // a selection may be an earlier launch's
      if ((as_const(a->weights) + layer)->full_index) selection_layer = layer;
    bring_layer(layer);
    brought_near();
    if ((layer == 0 || a->border) && !enter()) return false;
    for (; layer < a->layer_end; ++layer) {
      begin_layer();
      for (u32 stage = DOWN, version = 2 * layer; stage <= DOWN_SUM; ++stage) {
        if (!run(stage)) return false;
        if constexpr (RANKS > 1)
          if ((stage == OUTPUT || stage == DOWN_SUM) && !reduce(++version)) return false;
      }
    }
    return layer < a->layers || (run(HEAD) && next_token());
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
  DEVICE void begin_layer() {
    a = nearby_again(near_args, 0, a);
    brought_near();
    bring_layer(layer + 1);
    if (w()->full_index) selection_layer = layer;
    scored = w()->full_index && any_long();
  }
  // Whether some row's context is longer than the selection. If none is, nobody would wait for what the indexers make of the
  // queries, and a task that nobody waits for must not run: its inputs could be overwritten under it.
  DEVICE bool any_long() const {
    bool any = false;
    for (u32 row = 0; row < s.rows; ++row) any |= load_constant(positions() + row) + 1 > INDEX_TOPK;
    return any;
  }

  DEVICE bool run(u32 stage) {
    a = nearby_again(near_args, 0, a);
    bool dense = stage != HEAD && w()->dense,
         indexer = stage == INDEX_WEIGHTS || stage == INDEX_SCORES || stage == SELECT;
    if ((indexer && !scored) || (stage == ROUTER && dense)) return true;
    u32 t = stage == HEAD ? tag(2 * a->layers + 1) : stage <= OUTPUT ? attention_tag() : mlp_tag();
    switch (stage) {
      case DOWN:
      case QUERY:
      case OUTPUT:
      case GATE_UP:
      case DOWN_SUM:
        if (stage == DOWN_SUM && !dense) return expert_down(t);
        if constexpr (!SAME<Linear, Expert>)
          if (stage == GATE_UP && !dense)
            return linear<Expert, false>(s, stage, t, OneOf<Context, Expert, GateUp<Expert>>{*this, stage});
        return linear<Linear, false>(
            s, stage, t, OneOf<Context, Linear, Down, Query, AttentionOutput, GateUp<Linear>, DenseDown>{*this, stage});
      case LATENT_QUERY:
      case VALUE_UP:
      case HEAD:
        if constexpr (SAME<Head, Absorbed>)
          return linear<Absorbed, false>(s, stage, t,
                                         OneOf<Context, Absorbed, LatentQuery, ValueUp, Logits>{*this, stage});
        if (stage == HEAD) return linear<Head, HEAD_WEIGHTED>(s, stage, t, OneOf<Context, Head, Logits>{*this, stage});
        return linear<Absorbed, false>(s, stage, t, OneOf<Context, Absorbed, LatentQuery, ValueUp>{*this, stage});
      case INDEX_WEIGHTS:
      case ROUTER:
        return linear<Exact, true>(s, stage, t, OneOf<Context, Exact, IndexWeights, RouterLogits>{*this, stage});
      case CACHE_ENTRY:
        return cache_entry(t);
      case INDEX_SCORES:
        return index_scores(t);
      case SELECT:
        return select(t);
      case ATTEND:
        return attend(t);
      default:
        return merge_parts(t);
    }
  }

  // The first token's inputs are the host's, the others' what was chosen.
  DEVICE TokensIn tokens_in() const { return {a->tokens_in, a->next_tokens, MANY_TOKENS && token ? tag(0) - 1 : 0}; }
  DEVICE TokensOut tokens_out() const {
    return {a->tokens_out + at_token(), a->next_tokens, a->ring + at_token(), a->cancel};
  }
  // x of the first layer: from the tokens, or as another node has left it.
  DEVICE bool enter() {
    u32 version = 2 * layer;
    auto publish = [&](int row, int channel, const f32(&v)[2], bool there) {
      f32 norm[2];
      load_channels(norm_of(version), there ? channel : 0, norm);
      publish_x(version, row, channel, v, norm, there);
    };
    if (a->border) return embed<F32, HIDDEN>(s, EMBED, tag(version), a->border, OwnRows{}, publish);
    return embed<Island, HIDDEN>(s, EMBED, tag(version), a->embedding, tokens_in(), publish);
  }

  // in the shares of x(version) - x(version - 1);  out x(version).
  DEVICE bool reduce(u32 version) {
    a = nearby_again(near_args, 0, a);
    return reduce_ranks<HIDDEN>(s, REDUCE, tag(version), version, a->parts, slot(a->x, version - 1, HIDDEN),
                                [&](int row, int channel, const f32(&v)[2], bool there) {
                                  f32 norm[2];
                                  load_channels(norm_of(version), channel, norm);
                                  publish_x(version, row, channel, v, norm, there);
                                });
  }

  DEVICE bool cache_entry(u32 t) {
    CacheEntry entry{w()->kv_a_norm, w()->index_k_norm, LATENT_NORM_EPS, INDEX_NORM_EPS, a->rope, positions(),
                     pages,          w()->latent_cache, w()->index_cache};
    return write_cache<Act, KV_LORA, ROPE, INDEX_DIM>(s, CACHE_ENTRY, t, attention_rows(a->down_kv, ENTRY),
                                                      attention_rows(a->down_index, INDEX_OUT), entry, a->cache_flags);
  }

  DEVICE bool index_scores(u32 t) {
    PairRows weights = attention_rows(a->down_index, INDEX_OUT);
    weights.base += INDEX_DIM;
    IndexScores<Act, INDEX_HEADS, INDEX_DIM> scores{attention_rows(a->index_query, words(INDEX_Q)),
                                                    weights,
                                                    w()->index_cache,
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

  DEVICE bool select(u32 t) {
    Select<INDEX_TOPK> best{a->index_scores, score_stride(), positions(),       a->score_flags,
                            a->max_pages,    a->selection,   a->selection_flags};
    return best.run(s, SELECT, t);
  }

  DEVICE Written written() const { return {a->first_written + at_token(), positions(), a->cache_flags}; }
  DEVICE Selected selected() const { return {positions(), a->selection, INDEX_TOPK}; }
  DEVICE Partials partials() const { return {a->partial_out, a->partial_stat, a->partial_flags}; }

  DEVICE bool attend(u32 t) {
    Attention attention{attention_rows(a->latent_query, words(HEADS * KV_LORA)),
                        attention_rows(a->query, words(HEADS * Q_HEAD)),
                        w()->latent_cache,
                        pages,
                        selected(),
                        written(),
                        a->selection_flags,
                        tag(2 * selection_layer + 1),
                        partials()};
    return attention.run(s, ATTEND, t);
  }
  DEVICE bool merge_parts(u32 t) {
    return merge<Act, HEADS, KV_LORA, Attention::MAX_SPLITS>(s, MERGE, t, selected(), partials(),
                                                             slot(a->latent_out, layer, words(HEADS * KV_LORA)));
  }

  DEVICE bool expert_down(u32 t) {
    ExpertsDown<Expert, EXPERT_WIDTH, HIDDEN> experts{mlp_rows(a->middle, words(MIDDLE)), copy_of(&w()->down)};
    return experts.run(s, DOWN_SUM, t, DenseDown{*this});
  }

  DEVICE bool next_token() {
    a = nearby_again(near_args, 0, a);
    u32 t = tag(2 * a->layers + 1);
    if (a->choices) {
      static_assert(VOCAB <= 32 * LDS_WORDS && VOCAB < 1 << 21, "bits, and sums of 11 bits, of every token");
      s.announce(a->logit_flags + block_id(), t, Stored::PLAIN);
      ChooseTokens choose{a->logits,   VOCAB, a->logit_flags, a->choices, a->adjustments, a->adjustment_stride,
                          a->adjusted, token, tokens_out()};
      return choose.run(s, SAMPLE, t);
    }
    publish_best(s, t, best, a->best);
    return choose_token<VOCAB>(s, SAMPLE, t, a->best, a->candidates, tokens_out());
  }
};

KERNEL void glm_decode(const DecodeArgs* args) {
  bring_near(near_args, 0, args);
  brought_near();
  Const<DecodeArgs> a = nearby(near_args, 0, args);
  if (a->version != DESCRIPTOR_VERSION) return;
  Decode step(a);
#if MANY_TOKENS
  for (;; ++step.token) {
    bool stop = step.token + 1 == a->tokens;
    if (!step.run() || (!stop && !step.any_stops(stop))) {
      step.s.report();
      return;
    }
    if (uniform(stop)) return;
    step.s.tell_uniform();
  }
#else
  if (!step.run()) step.s.report();
  step.s.timeline.close(a->epoch);
#endif
}
