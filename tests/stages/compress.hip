// One compressor in one launch: its products from plain memory, then the stage.
#include "sizes.h"

#include "stages/compress.h"
#include "tile/tile.h"

struct Args {  // mirrored in test_compress.py
  u32 rows, epoch, poll_limit, max_pages;
  f32 eps;
  const f32 *given, *ape, *norm, *rope;  // given [rows][VALUES]
  const u32 *positions, *slots, *table;
  Pair* products;
  f32* pending;
  void* entries;
  Pair *latent, *flags;
  u32* error;
};
enum Stage : u32 { LOAD, COMPRESS };
using Of = Compress<TESTED_FORMAT, D, ROPE, RATIO, TESTED_POOLING>;

KERNEL void compress(const Args* args) {
  Args a = copy_of(as_const(args));
  Step s(a.rows, 0, a.poll_limit, a.error, nullptr);
  for (int row = s.first_task(); row < (int)s.rows; row += n_blocks())
    for (int k = thread_id(); k < Of::VALUES; k += THREADS)
      put(a.products + row * Of::VALUES + k, load_constant(a.given + row * Of::VALUES + k), a.epoch);
  s.finish(s.rows);
  Of stage{{a.products, Of::VALUES, a.epoch},
           a.ape,
           a.norm,
           a.eps,
           a.rope,
           a.positions,
           a.slots,
           {a.table, a.max_pages},
           a.pending,
           a.entries,
           a.latent,
           a.flags};
  if (!stage.run(s, COMPRESS, a.epoch)) s.report();
}
