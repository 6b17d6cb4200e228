// The kernel's arguments: one block in device memory, fields by name. This file is the only definition; Python reads it
// (rocmega/descriptor), and a test compares every offset with the compiler's.
#pragma once
#include "platform/types.h"

constexpr u32 DESCRIPTOR_VERSION = 1;

// A linear map of `n` output rows, packed in tiles of 16 rows and 1 KB (hip/tile/tile.h). `scales`: of FP8, f32
// [ceil(n / 128)][ceil(k / 128)]; of MXFP4, E8M0 bytes, 64 a tile; else null.
struct Matrix {
  const void* tiles;
  const void* scales;
};

// The place of a sublayer among the streams.
struct SiteWeights {
  const f32* mix;    // [(2 + S) * S][S * H]
  const f32* base;   // [(2 + S) * S]
  const f32* scale;  // [3]
  const f32* norm;   // [H] of the sublayer's input
};

// What a compressor makes entries or index keys with; all null where a layer has none.
struct Compressor {
  Matrix kv;        // ISLAND [WIDE][H], WIDE: D or INDEX_DIM, or twice that where entries overlap
  Matrix gate;      // as kv; null where entries are of one token
  const f32* ape;   // [RATIO][WIDE], or null
  const f32* norm;  // [D] or [INDEX_DIM]
  f32* pending;     // [slots][SPAN][2][WIDE] a request's last values and gates
  void* entries;    // CACHE [pages][PLACES][D or INDEX_DIM]: of the layer whose entries these are
};

// A table of rows that n-grams look up, and what makes of them what is added to the streams.
struct EngramWeights {
  const void* table;       // [rows][DIM] e4m3 codes, or ISLAND
  const u8* scales;        // [rows][DIM / 32] E8M0 of codes, else null
  const u64* multipliers;  // [NGRAM]
  const u32* heights;      // [columns]
  Matrix kv;               // LINEAR, S + 1 matrices [H / RANKS][columns * DIM]: a key for each stream, then the value
  const f32* q_weight;     // [S][H]
  const f32* k_weight;     // [S][H]
};

// One layer's weights. LINEAR is the checkpoint's format for big matrices, ISLAND that of those it never quantizes (f32 or
// bf16), EXPERT that of routed experts. H hidden, S streams, D head, E experts.
struct LayerWeights {
  SiteWeights attention, mlp;
  const f32* q_a_norm;  // [Q_LORA]
  const f32* kv_norm;   // [D]
  const f32* sinks;     // [HEADS]
  Matrix q_a;           // LINEAR [Q_LORA][H]
  Matrix kv;            // LINEAR [D][H]
  Matrix q_b;           // LINEAR [HEADS * D][Q_LORA]
  Matrix o_a;           // LINEAR, GROUPS matrices [O_LORA][HEADS / GROUPS * D]
  Matrix o_b;           // LINEAR [H][GROUPS * O_LORA]
  Compressor entry, key;
  Matrix key_of_entry;     // ISLAND [INDEX_DIM][D], where index keys are made of entries; else null
  Matrix index_q;          // LINEAR [INDEX_HEADS * INDEX_DIM][Q_LORA]; null in layers that select nothing, as the next
  Matrix index_weights;    // ISLAND [INDEX_HEADS][H]
  Matrix router;           // ISLAND [E][H]
  const f32* router_bias;  // [E]; null where a table chooses
  const u32* experts_of_token;  // [VOCAB_ALL][TOP_K]; null where scores choose
  Matrix gate_up;               // EXPERT, E times (gate [EXPERT_WIDTH][H], up)
  Matrix down;                  // EXPERT, E matrices [H][EXPERT_WIDTH]
  Matrix shared_gate_up;        // LINEAR, gate, up
  Matrix shared_down;           // LINEAR [H][EXPERT_WIDTH]
  u32 kind;                     // 1 + which of the model's kinds of entries the layer attends to; 0: the window alone
  u32 source;                   // the layer that makes them
  u32 selects;                  // 1: the layer selects entries
  u32 selector;                 // the layer whose selection it uses, its own perhaps; NOBODY: all entries
  u32 engram;                   // 1 + which of the model's Engrams comes before the layer; 0: none
  void* window;                 // CACHE [slots][WINDOW][D]
};
constexpr u32 NOBODY = 0xffffffffu;

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

// One rank's, where RANKS share the model: HEADS, GROUPS, widths and VOCAB are its part, logits too.
struct DecodeArgs {
  u32 version;  // DESCRIPTOR_VERSION
  u32 rows;     // 1 to ROWS, of different requests
  u32 layer_begin,
      layer_end;           // this launch runs these layers; it embeds if it begins at 0, samples if it ends at the last
  u32 layers;              // of the whole model
  u32 epoch;               // tags of a step: epoch ... epoch + 2 * layers + 1
  u32 poll_limit;          // polls before a wait gives up
  u32 max_pages;           // stride of block_table
  u32 max_splits;          // of a row's attention: strides of the partial regions
  u32 rank;                // of RANKS
  const u32* tokens_in;    // [ROWS] the tokens to run
  const u32* positions;    // [ROWS] their positions
  const u32* slots;        // [ROWS] the requests' slots of state
  const u32* block_table;  // [ROWS][max_pages] page numbers
  const f32* rope;         // [positions][ROPE / 2][2] cos, sin: of layers with a window alone
  const f32* stretched_rope;    // the same of the others
  const void* embedding;        // ISLAND [VOCAB][H], row-major
  const f32* final_norm;        // [H]
  const f32* end_mix;           // [S][S * H], as the next two null in delayed models
  const f32* end_base;          // [S]
  const f32* end_scale;         // [1]
  Matrix head;                  // ISLAND [VOCAB][H]
  const LayerWeights* weights;  // [layers]
  const EngramWeights* engrams;
  u32 engram_count;
  u32 padding_token;     // stands for those before the first
  const u32* token_ids;  // [VOCAB_ALL] Engram's ids of tokens
  u32* recent;           // [slots][NGRAM] a request's last tokens
  // Hand-off regions. Two slots where the shape begins with [2]; decode.hip says why that is enough. "words": activations as
  // matrices want them, two bf16 a pair; with f32 weights or activations one f32 a pair. Other pairs carry an f32.
  Pair* h;              // [2][ROWS][S][H] residual streams
  Pair* h_engram;       // [2][ROWS][S][H] those that Engram has added to
  Pair* x;              // [2][ROWS][H] a sublayer's input
  Pair* x_normed;       // [2][ROWS][H] words: x times the weight of the norm that reads it
  Pair* x_squares;      // [2][ROWS][H / 16] its sums of squares, without the weight
  Pair* products;       // [2][ROWS][slices][(2 + S) * S + 1] of streams and mixing weights
  Pair* site;           // [2][ROWS][(2 + S) * S] collapse, spread, mix
  Pair* looked_up;      // [engrams][ROWS][columns * DIM] words
  Pair* mapped;         // [engrams][ROWS][(S + 1) * H]
  Pair* dots;           // [2][ROWS][pieces][3 * S]
  Pair* q_normed;       // [2][ROWS][Q_LORA] words, as x_normed
  Pair* q_squares;      // [2][ROWS][Q_LORA / 16]
  Pair* down_kv;        // [2][ROWS][D]
  Pair* down_wide;      // [2][ROWS][DOWN_WIDTH] compressors' values and gates, index head weights
  Pair* latent;         // [2][ROWS][D] entries before their rotation, of those that index keys are made of
  Pair* key_values;     // [2][ROWS][INDEX_DIM]
  Pair* query;          // [2][ROWS][HEADS][D] rotated, not yet normalized
  Pair* query_squares;  // [2][ROWS][HEADS][D / 16]
  Pair* index_query;    // [2][ROWS][INDEX_HEADS][INDEX_DIM] words
  f32* index_scores;    // [ROWS][max_pages * PAGE] bulk, written through
  u32*
      candidates_taken;  // [ROWS][max_pages * PAGE / CANDIDATE_SIZE] bulk, written through: 1 for blocks that may be selected
  u32* selection;        // [ROWS][INDEX_TOPK] bulk, written through: selected entries, ascending
  f32* partial_out;       // [ROWS][max_splits][HEADS][D] bulk, plain + release
  f32* partial_stat;      // [ROWS][max_splits][HEADS][2] maximum and sum, as partial_out
  Pair* attention_out;    // [2][ROWS][HEADS][D] words
  Pair* grouped;          // [2][ROWS][GROUPS][O_LORA] words
  Pair* router_scores;    // [2][ROWS][slices][E] products
  Pair* shared_middle;    // [2][ROWS][EXPERT_WIDTH] words
  Pair* shared_out;       // [2][ROWS][H]
  Pair* middle;           // [2][ROWS][TOP_K][EXPERT_WIDTH] words
  Pair* best;             // [n_blocks][ROWS][2] each block's best logit: value, token
  Pair* logit_flags;      // [n_blocks] flag: this block's logits are stored, plain + release; where there are choices
  f32* adjusted;          // [ROWS][VOCAB] logits of rows that have adjustments
  Pair* next_tokens;      // [ROWS] the token chosen
  Pair* window_flags;     // [ROWS] flag: this step's entry of the window is written
  Pair* entry_flags;      // [ROWS] flag: this step's compressed entry, if there is one
  Pair* key_flags;        // [ROWS] flag: its index key
  Pair* score_flags;      // [ROWS][max_pages] flag: scores of PAGE entries
  Pair* candidate_flags;  // [ROWS] flag
  Pair* selection_flags;  // [ROWS] flag
  Pair* partial_flags;    // [ROWS][max_splits][groups of 16 heads] flag
  u32* error;             // [1 + n_blocks][8], see hip/handoff/step.h
  const Choice* choices;  // [ROWS], or null: the largest logit of each row
  const Adjustment* adjustments;  // [ROWS][adjustment_stride]
  u32 adjustment_stride;
  f32* logits;          // [ROWS][VOCAB], written if not null; needed where there are choices
  u32* tokens_out;      // [ROWS]
  Vec4* timeline;       // [blocks][timeline_capacity] of kernels built for it (hip/handoff/timeline.h), or null
  u32* timeline_count;  // [blocks]
  u32 timeline_capacity;
  // Of each rank, where there are several, as this rank's device sees them; hip/handoff/reduce.h. Null where there is one.
  Pair* const* parts;         // [RANKS] -> [2][RANKS][ROWS][H] shares of a sublayer's output
  Pair* const* candidates;    // [RANKS] -> [RANKS][ROWS][2] each rank's best logit: value, token
  u32* const* alarms;         // [RANKS] -> [1] 1 + a rank that gave up
  Pair* const* mapped_parts;  // [RANKS] -> [engrams][ROWS][(S + 1) * H] what Engram adds, of all ranks
};
