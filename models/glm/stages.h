// The stages of a decode step, in the order of the program. Their names appear in error reports; Python reads this file.
#pragma once
#include "platform/types.h"

enum Stage : u32 {
  EMBED,          // the tokens' rows of the embedding
  DOWN,           // low-rank projections of the normalized input
  INDEX_WEIGHTS,  // weights of the indexer's heads, where some context is longer than the selection
  CACHE_ENTRY,    // this step's latent, rotated key and index key
  QUERY,          // queries of attention and indexer from the low rank
  INDEX_SCORES,   // of every cached position, where the context is longer than the selection
  SELECT,         // the best of them
  LATENT_QUERY,   // queries into the latent space
  ATTEND,         // softmax and sum over a part of the selected positions
  MERGE,          // of the parts
  VALUE_UP,       // out of the latent space
  OUTPUT,         // output projection, residual
  ROUTER,         // expert scores
  GATE_UP,  // silu(gate) * up of the shared expert, which needs no route, and of every chosen one, or of the dense layer
  DOWN_SUM,  // back to the residual stream
  HEAD,      // final norm, logits, each block's best
  SAMPLE,    // the best of the blocks, and of the ranks
  REDUCE,    // where ranks share the model, after OUTPUT and DOWN_SUM: the sum of their shares, residual
};
