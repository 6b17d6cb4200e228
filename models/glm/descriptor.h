// The kernel's arguments: one block in device memory, fields by name. This file is the only definition; Python reads it
// (rocmega/descriptor), and a test compares every offset with the compiler's.
#pragma once
#include "platform/types.h"

constexpr u32 DESCRIPTOR_VERSION = 4;

// A linear map of `n` output rows, packed in tiles of 16 rows and 1 KB (hip/tile/tile.h). `scales`: of FP8, f32
// [ceil(n / 128)][ceil(k / 128)]; of MXFP4, E8M0 bytes, 64 a tile; else null.
struct Matrix {
  const void* tiles;
  const void* scales;
};

// One layer's weights. LINEAR is the checkpoint's format for big matrices (f32, bf16 or FP8), ISLAND that of those the
// checkpoint never quantizes (f32 or bf16), ABSORBED f32 when LINEAR is, else bf16, EXPERT that of routed and shared experts
// (LINEAR's, or MXFP4). H hidden, E experts.
struct LayerWeights {
  const f32* attention_norm;  // [H]
  const f32* q_a_norm;        // [Q_LORA]
  const f32* kv_a_norm;       // [KV_LORA]
  const f32* mlp_norm;        // [H]
  const f32* index_k_norm;    // [2][INDEX_DIM]: weight, bias; null in layers that share another's selection
  Matrix q_a;                 // LINEAR [Q_LORA][H]
  Matrix kv_a;                // LINEAR [KV_LORA + ROPE][H]
  Matrix q_b;                 // LINEAR [HEADS * (NOPE + ROPE)][Q_LORA]
  Matrix key_up;              // ABSORBED, HEADS matrices [KV_LORA][NOPE]: Wk[h] transposed
  Matrix value_up;            // ABSORBED, HEADS matrices [V_DIM][KV_LORA]: Wv[h]
  Matrix o;                   // LINEAR [H][HEADS * V_DIM]
  Matrix index_q;             // LINEAR [INDEX_HEADS * INDEX_DIM][Q_LORA]; null in shared layers, as the next two
  Matrix index_k;             // LINEAR [INDEX_DIM][H]
  Matrix index_weights;       // ISLAND [INDEX_HEADS][H]
  Matrix router;              // ISLAND [E][H]; null in dense layers
  const f32* router_bias;     // [E]; null in dense layers
  Matrix gate_up;             // dense layers: LINEAR, 2 matrices [DENSE_WIDTH][H], gate then up;
                              // MoE layers: EXPERT, E + 1 times (gate [EXPERT_WIDTH][H], up), the shared expert last
  Matrix down;                // dense: LINEAR [H][DENSE_WIDTH]; MoE: EXPERT, E + 1 matrices [H][EXPERT_WIDTH]
  u32 dense;                  // 1: dense layer, 0: MoE
  u32 full_index;             // 1: the layer has an indexer, 0: it shares the previous full layer's selection
  void* latent_cache;         // CACHE [pages][PAGE][KV_LORA + ROPE]
  void* index_cache;          // CACHE [pages][PAGE][INDEX_DIM]; null in shared layers
};

// How a row's token is chosen; hip/stages/choose.h does it, rocmega/sampling says what the values mean.
struct Choice {
  u32 greedy;       // 1: the largest logit, after adjustments
  f32 temperature;  // 1 if greedy
  f32 gap;          // -log(min_p), infinite without
  u32 top_k;        // 0: all
  u32 top_p;        // in units of 2^-32; 0: all
  f32 repetition, frequency, presence;
  u32 seed_low, seed_high;
  u32 number;       // of the token in the answer
  u32 adjustments;  // how many of the row's are used
};
// A token whose logit is changed: it has a bias (else 0), or was seen in prompt or answer, `times` in the answer.
struct Adjustment {
  u32 token;
  f32 bias;
  u32 times, seen;
};

constexpr u32 STOPS = 16;  // tokens at which a row may stop

// One rank's, where RANKS share the model: HEADS, widths and VOCAB are its part, logits too.
struct DecodeArgs {
  u32 version;  // DESCRIPTOR_VERSION
  u32 rows;     // 1 to ROWS
  u32 layer_begin,
      layer_end;         // this launch runs these layers; it embeds if it begins at 0, samples if it ends at the last
  u32 layers;            // of the whole model
  u32 epoch;             // tags of a token: epoch ... epoch + 2 * layers + 1; the next token's begin one later
  u32 tokens;            // of each row in this launch, fewer if a row stops; more than 1 in kernels for that only
  u32 poll_limit;        // polls before a wait gives up
  u32 max_pages;         // stride of block_table
  u32 rank;              // of RANKS
  const f32* border;     // [ROWS][H] the residual stream that enters layer_begin, from another node; null: it is in x
  const u32* tokens_in;  // [ROWS] the tokens to run
  const u32* stops;      // [ROWS][STOPS] tokens at which a row stops; where there are fewer, none of the vocabulary
  // [tokens][ROWS] their positions, which are also the number of cached tokens before them
  const u32* positions;
  // [tokens][ROWS] the lowest position that this step writes of the row's sequence: its own, unless the rows before it are the
  // tokens before it.
  const u32* first_written;
  const u32* block_table;       // [ROWS][max_pages] page numbers
  const f32* rope;              // [positions][ROPE / 2][2] cos, sin
  const void* embedding;        // ISLAND [VOCAB][H], row-major
  const f32* final_norm;        // [H]
  Matrix head;                  // ISLAND [VOCAB][H]
  const LayerWeights* weights;  // [layers]
  // Hand-off regions. Two slots where the shape begins with [2]; decode.hip says why that is enough. "words": activations as
  // matrices want them, two bf16 a pair; with f32 weights or activations one f32 a pair. Other pairs carry an f32.
  Pair* x;                // [2][ROWS][H] residual stream
  Pair* x_normed;         // [2][ROWS][H] words: x times the weight of the norm that reads it
  Pair* x_squares;        // [2][ROWS][H / 16] its sums of squares, without the weight
  Pair* q_normed;         // [2][ROWS][Q_LORA] words, as x_normed
  Pair* q_squares;        // [2][ROWS][Q_LORA / 16]
  Pair* down_kv;          // [2][ROWS][KV_LORA + ROPE]
  Pair* down_index;       // [2][ROWS][INDEX_DIM + INDEX_HEADS] index key, index head weights
  Pair* query;            // [2][ROWS][HEADS][NOPE + ROPE] words
  Pair* index_query;      // [2][ROWS][INDEX_HEADS][INDEX_DIM] words
  Pair* latent_query;     // [2][ROWS][HEADS][KV_LORA] words
  f32* index_scores;      // [ROWS][max_pages * PAGE] bulk, written through
  u32* selection;         // [ROWS][INDEX_TOPK] bulk, written through: selected positions, ascending
  f32* partial_out;       // [ROWS][SPLITS][HEADS][KV_LORA] bulk, plain + release
  f32* partial_stat;      // [ROWS][SPLITS][HEADS][2] maximum and sum, as partial_out
  Pair* latent_out;       // [2][ROWS][HEADS][KV_LORA] words
  Pair* attention_out;    // [2][ROWS][HEADS][V_DIM] words
  Pair* router_scores;    // [2][ROWS][slices][E] products
  Pair* middle;           // [2][ROWS][MIDDLE] words: activations between gate/up and down
  Pair* best;             // [n_blocks][ROWS][2] each block's best logit: value, token
  Pair* logit_flags;      // [n_blocks] flag: this block's logits are stored, plain + release; where there are choices
  f32* adjusted;          // [ROWS][VOCAB] logits of rows that have adjustments
  Pair* next_tokens;      // [ROWS] the token chosen, for the next of this launch
  Pair* cache_flags;      // [ROWS] flag: this step's cache entry of the layer is written
  Pair* score_flags;      // [ROWS][max_pages] flag: the scores of this page are written
  Pair* selection_flags;  // [ROWS] flag
  Pair* partial_flags;    // [ROWS][SPLITS] flag
  u32* error;             // [1 + n_blocks][8], see hip/handoff/step.h
  const Choice* choices;  // [ROWS], or null: the largest logit of each row
  const Adjustment* adjustments;  // [ROWS][adjustment_stride]
  u32 adjustment_stride;
  f32* logits;      // [ROWS][VOCAB], written if not null; needed where there are choices
  u32* tokens_out;  // [tokens][ROWS]
  // Memory of the host, in kernels of several tokens; else null.
  Pair* ring;           // [tokens][ROWS] the tokens as they are chosen; a place is a token's number in the launch
  const u32* cancel;    // not 0: the launch ends with the token that is being chosen
  Vec4* timeline;       // [blocks][timeline_capacity] of kernels built for it (hip/handoff/timeline.h), or null
  u32* timeline_count;  // [blocks]
  u32 timeline_capacity;
  // Of each rank, where there are several, as this rank's device sees them; hip/handoff/reduce.h. Null where there is one.
  Pair* const* parts;       // [RANKS] -> [2][RANKS][ROWS][H] shares of what is added to x
  Pair* const* candidates;  // [RANKS] -> [RANKS][ROWS][2] each rank's best logit: value, token
  u32* const* alarms;       // [RANKS] -> [1] 1 + a rank that gave up
};
