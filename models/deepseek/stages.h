// The stages of a decode step, in the order of the program. Their names appear in error reports; Python reads this file.
#pragma once
#include "platform/types.h"

enum Stage : u32 {
  LOOK_UP,         // Engram: the rows of its tables that the tokens look up
  ENGRAM_MAP,      // Engram: keys and value, from these rows
  EMBED,           // the tokens' rows of the embedding, in every stream
  ENGRAM_GATHER,   // Engram: where ranks share the map, everybody's parts
  ENGRAM_DOTS,     // Engram: products of streams and keys
  ENGRAM_ADD,      // Engram: the streams with the gated value
  MIX,             // products of the streams with a site's mixing weights
  COLLAPSE,        // a sublayer's input, where the sublayer before has not made it
  SITE,            // how the sublayer's output is spread and the streams are mixed
  DOWN,            // low-rank query, the window's entry
  DOWN_WIDE,       // compressors' values and gates, weights of the indexer's heads
  WINDOW_ENTRY,    // this step's entry of the window
  COMPRESS,        // entries of tokens that end here
  KEY_PRODUCTS,    // index keys from entries, where they are made so
  COMPRESS_KEYS,   // index keys of the entries
  QUERY,           // queries of attention and indexer from the low rank
  INDEX_SCORES,    // of every entry, where there are more than a selection
  CANDIDATES,      // blocks of entries that later selections are bound to
  SELECT,          // the best entries
  ATTEND,          // softmax and sum over a part of window and entries
  MERGE,           // of the parts, with the sinks
  OUTPUT_GROUPS,   // output projection of each group of heads
  OUTPUT,          // of all groups, back to the streams
  ROUTER,          // expert scores
  SHARED_GATE_UP,  // silu(gate) * up of the shared expert, which needs no route
  SHARED_DOWN,     // its output
  GATE_UP,         // of every chosen expert
  DOWN_SUM,        // of all experts, back to the streams
  HEAD,            // logits, each block's best
  SAMPLE,          // the best of the blocks, and of the ranks
  REDUCE,  // where ranks share the model, after OUTPUT and DOWN_SUM: the sum of their shares, back to the streams
};
