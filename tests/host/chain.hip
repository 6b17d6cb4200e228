// A persistent kernel without meaning: `steps` tokens of `layers` layers in one launch, any number of blocks, 1 to 16 rows,
// with the three kinds of hand-off that a mega-task has, and 13 deliberate bugs that the host target has to catch.
//   embed    -> x           written through, every wave drains, block barrier, one tagged flag
//   squeeze  x -> small     norm and matrix; each value travels with its tag, the consumer polls the data itself
//   widen    small -> wide  matrix; plain stores, drain, barrier, release, one tagged flag; the consumer acquires
//   narrow   wide, x -> x'  matrix and residual; as embed
// Versions of x count up through the launch and are the epochs of everything derived from them.
#include "platform/numeric.h"

constexpr int ROWS = 16, H = 128, R = 64, I = 256, VOCAB = 64, PAD = 8;
enum Stage : u32 { EMBED, SQUEEZE, WIDEN, NARROW };
constexpr int X_TASKS = H / 16, SMALL_TASKS = R / 16, WIDE_TASKS = I / 16;

struct Params {  // mirrored in chain.py
  u32 rows, layers, steps, limit, mutant, first_version;
  const u16 *embedding, *squeeze, *widen, *narrow;  // bf16 [VOCAB][H], then per layer [R][H], [I][R], [H][I]
  f32* x;                                           // [2][ROWS][H]
  Pair* small;                                      // [2][ROWS][R]
  u32* wide;                                        // [2][ROWS][I / 2], two bf16 a word
  Pair *x_flags, *wide_flags;
  u32* error;   // claimed, block, stage, task, expected, seen
  u32* tokens;  // [steps][ROWS]
  f32* out;     // [steps][ROWS][H]
};

SHARED_LARGE(u32, act, ROWS*(I + PAD) / 2);  // the input of the stage, bf16, K values and PAD a row
SHARED(f32, part, WAVES * 16 * 16);          // each wave's share of a tile

// Two slots of everything. A writer of x(v + 1) has seen all flags of wide(v), whose tasks have seen all of small(v), whose
// tasks have seen all flags of x(v), each set by a narrow task that was done with x(v - 1): nobody reads that slot any more.
// small(v + 2) and wide(v + 2) follow x(v + 2), hence every reader of small(v) and wide(v).
struct Chain {
  Const<Params> p;
  u32 version, base = 0;

  DEVICE bool mutant(u32 n) const { return p->mutant == n; }
  DEVICE int slot(u32 v) const { return mutant(10) ? 0 : v & 1; }
  DEVICE u32 tag_of(u32 v) const { return mutant(7) ? 1 + v % 2 : v; }
  DEVICE f32* x_of(u32 v, int row) const { return p->x + (slot(v) * ROWS + row) * H; }
  DEVICE Pair* small_of(u32 v, int row) const { return p->small + (slot(v) * ROWS + row) * R; }
  DEVICE u32* wide_of(u32 v, int row) const { return p->wide + (slot(v) * ROWS + row) * I / 2; }

  DEVICE int first_task() const {  // stages are staggered: idle blocks take the next stage's first tasks
    u32 n = n_blocks();
    return (block_id() + n - base % n) % n;
  }

  // A flag may have moved on to a later tag; data of a later tag would be wrong data.
  enum Kind { FLAG, DATA };
  template <Kind kind> DEVICE bool wait(const Pair* word, u32 tag, Pair& got, Stage stage, int task) const {
    for (u32 polls = 0; polls < p->limit; ++polls) {
      got = kind == FLAG ? load_flag(word, tag) : load_pair(word, tag);
      if (kind == FLAG ? (i32)(got.tag - tag) >= 0 : got.tag == tag) return true;
      if (polls % 64 == 63 && load_device(p->error, 0)) return false;
      pause();
    }
    if (claim(p->error)) {
      const u32 what[] = {(u32)block_id(), stage, (u32)task, tag, got.tag};
      for (int i = 0; i < 5; ++i) store_device(p->error + 1 + i, what[i], 0);
    }
    return false;
  }
  DEVICE bool wait_flags(const Pair* flags, int count, Stage stage) const {
    bool ok = true;
    Pair got{};
    if (thread_id() < count) ok = wait<FLAG>(flags + thread_id(), tag_of(version), got, stage, thread_id());
    return !block_any(!ok);
  }

  DEVICE void announce(Pair* flag, u32 v, bool stored_plain) const {
    if (mutant(11) ? wave_id() == 0 : !mutant(1)) drain();
    if (!mutant(12)) block_barrier();
    if (thread_id() != 0 || mutant(2)) return;
    if (stored_plain && !mutant(8)) release_device();
    publish(flag, {0, tag_of(v)});
  }
  DEVICE void announce_early(Pair* flag, u32 v, bool here) const {
    if (mutant(2) && here) publish(flag, {0, tag_of(v)});
  }

  // 16 rows of weights times the activations in LDS; the K / 32 steps go to the waves in turn.
  template <int K> DEVICE void product(const u16* weights) const {
    Acc acc = {};
    for (int s = wave_id(); s < K / 32; s += WAVES) {
      Frag a, b;
      UNROLL for (int piece = 0; piece < PIECES; ++piece) {
        int row = frag_row(piece), k = 32 * s + 8 * frag_chunk();
        Vec4 w = load_weights(weights + row * K + k), v = lds_load4(act, (row * (K + PAD) + k) / 2);
        UNROLL for (int i = 0; i < 4; ++i) a.w[piece][i] = w.w[i], b.w[piece][i] = v.w[i];
      }
      mma_bf16(a, b, acc);
    }
    UNROLL for (int i = 0; i < ACC; ++i) part[(wave_id() * 16 + acc_col(i)) * 16 + acc_row(i)] = acc.v[i];
    block_barrier();
  }

  template <int K, class Gather, class Value, class Done>
  DEVICE bool stage(Stage stage, int tasks, const u16* weights, Gather gather, Value value, Done done) {
    bool gathered = false;
    for (int task = first_task(); task < tasks; task += n_blocks()) {
      mark(stage, task, version);
      if (!gathered && !gather()) return false;
      gathered = true;
      product<K>(weights + task * 16 * K);
      for (int i = thread_id(); i < 8 * (int)p->rows; i += THREADS) {  // two neighbours in a column each
        f32 sum[2] = {};
        for (int w = 0; w < WAVES; ++w)
          for (int j = 0; j < 2; ++j) sum[j] += part[w * 256 + 2 * i + j];
        value(i / 8, task * 16 + i % 8 * 2, sum);
      }
      done(task);
    }
    base += tasks;
    return true;
  }

  DEVICE bool embed(u32 step) {
    for (int task = first_task(); task < X_TASKS; task += n_blocks()) {
      mark(EMBED, task, version);
      if (step && !wait_flags(p->x_flags, X_TASKS, EMBED)) return false;
      announce_early(&p->x_flags[task], version + 1, thread_id() == 0);
      for (int i = thread_id(); i < 16 * (int)p->rows; i += THREADS) {
        int row = i / 16, h = task * 16 + i % 16;
        u32 token = row;  // the next token hangs on the last result, so that an error cannot heal
        if (step) token = (u32)(__builtin_fabsf(load_device(x_of(version, row), version)) * 4096.f) % VOCAB;
        store_device(x_of(version + 1, row) + h, from_bf16(load_constant(p->embedding + token * H + h)), version + 1);
        if (h == 0) store_plain(&p->tokens[step * ROWS + row], token, version + 1);
      }
      announce(&p->x_flags[task], version + 1, false);
    }
    base += X_TASKS;
    ++version;
    return true;
  }

  DEVICE bool normed() const {
    if (!wait_flags(p->x_flags, X_TASKS, SQUEEZE)) return false;
    for (int row = wave_id(); row < ROWS; row += WAVES) {
      auto x = [&](int h) {
        const f32* at = x_of(version, row) + h;
        return row >= (int)p->rows ? 0.f : mutant(4) ? load_plain(at, version) : load_device(at, version);
      };
      f32 squares = wave_sum64([&](int h) { return x(h) * x(h) + x(h + 64) * x(h + 64); });
      f32 scale = 1.f / __builtin_sqrtf(squares / H + 1e-6f);
      for (int i = lane_id(); i < H / 2; i += WIDTH)
        act[row * (H + PAD) / 2 + i] = pack_bf16(x(2 * i) * scale, x(2 * i + 1) * scale);
    }
    block_barrier();
    return true;
  }
  DEVICE void put_small(int row, int r, f32 v) const {
    Pair pair{bits<u32>(v), tag_of(version)}, *to = small_of(version, row) + r;
    mutant(3) ? store_plain((u64*)to, bits<u64>(pair), pair.tag) : store_pair(to, pair);
  }
  DEVICE bool squeeze(u32 layer) {
    return stage<H>(
        SQUEEZE, SMALL_TASKS, p->squeeze + layer * R * H, [&] { return normed(); },
        [&](int row, int r, const f32* sum) { put_small(row, r, sum[0]), put_small(row, r + 1, sum[1]); },
        [&](int) {
          if (!mutant(5)) block_barrier();  // before `part` is written again
        });
  }

  DEVICE bool all_small() const {
    bool ok = true;
    for (int i = thread_id(); i < ROWS * R / 2; i += THREADS) {
      int row = i / (R / 2), r = i % (R / 2) * 2;
      Pair pair[2] = {};
      for (int j = 0; j < 2; ++j)
        if (row < (int)p->rows && ok)
          ok = wait<DATA>(small_of(version, row) + r + j, tag_of(version), pair[j], WIDEN, r / 16);
      act[row * (R + PAD) / 2 + r / 2] = pack_bf16(bits<f32>(pair[0].payload), bits<f32>(pair[1].payload));
    }
    return !block_any(!ok);
  }
  DEVICE bool widen(u32 layer) {
    return stage<R>(
        WIDEN, WIDE_TASKS, p->widen + layer * I * R, [&] { return all_small(); },
        [&](int row, int i, const f32* sum) {
          announce_early(&p->wide_flags[i / 16], version, row == 0 && i % 16 == 0);
          store_plain(wide_of(version, row) + i / 2, pack_bf16(silu(sum[0]), silu(sum[1])), version);
        },
        [&](int task) {
          if (mutant(6) && task == 3 && layer == 1) return block_barrier();
          announce(&p->wide_flags[task], version, true);
        });
  }

  DEVICE bool all_wide() const {
    if (!wait_flags(p->wide_flags, WIDE_TASKS, NARROW)) return false;
    if (!mutant(9)) acquire_device();  // each wave: an invalidation is in order with its own wave's loads only
    for (int i = thread_id(); i < ROWS * I / 2; i += THREADS) {
      int row = i / (I / 2), w = i % (I / 2);
      act[row * (I + PAD) / 2 + w] = row < (int)p->rows ? load_plain(wide_of(version, row) + w, version) : 0;
    }
    block_barrier();
    return true;
  }
  DEVICE bool narrow(u32 layer, u32 step) {
    bool ok = stage<I>(
        NARROW, X_TASKS, p->narrow + layer * H * I, [&] { return all_wide(); },
        [&](int row, int h, const f32* sum) {
          announce_early(&p->x_flags[h / 16], version + 1, row == 0 && h % 16 == 0);
          for (int j = 0; j < 2; ++j) {
            f32 y = load_device(x_of(version, row) + h + j, version) + sum[j];
            if (mutant(13)) y += *(x_of(version, row) + h + j);
            store_device(x_of(version + 1, row) + h + j, y, version + 1);
            if (layer + 1 == p->layers) store_plain(&p->out[(step * ROWS + row) * H + h + j], y, version + 1);
          }
        },
        [&](int task) { announce(&p->x_flags[task], version + 1, false); });
    ++version;
    return ok;
  }
};

KERNEL void chain(const Params* params) {
  Chain c{as_const(params), params->first_version};
  for (u32 step = 0; step < c.p->steps; ++step) {
    if (!c.embed(step)) return;
    for (u32 layer = 0; layer < c.p->layers; ++layer)
      if (!c.squeeze(layer) || !c.widen(layer) || !c.narrow(layer, step)) return;
  }
}
