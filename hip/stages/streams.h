// Residual streams (mHC): STREAMS copies of the residual that every sublayer mixes, by weights that they give themselves.
//
// A site is the place of one sublayer. With m = M h / rms(h), M [OUT][STREAMS * HIDDEN], OUT = (2 + STREAMS) * STREAMS:
//   collapse[s] = sigmoid(m[s] * scale[0] + base[s]) + EPS                       x = sum over s of collapse[s] * h[s]
//   spread[t]   = 2 * sigmoid(m[STREAMS + t] * scale[1] + base[STREAMS + t])
//   mix[s][t]   = Sinkhorn of the rest;  h'[t] = spread[t] * y + sum over s of mix[s][t] * h[s],  y the sublayer of x
// The Sinkhorn rounds are a chain of some hundred dependent operations. Only `expand` needs them, at the sublayer's end, so
// they are a task of their own (`site`) beside the sublayer; `collapse` makes its four weights from the products itself.
#pragma once
#include "handoff/step.h"
#include "stages/input.h"

template <int STREAMS, int HIDDEN> struct Streams {
  static constexpr int OUT = (2 + STREAMS) * STREAMS, WIDTH_ALL = STREAMS * HIDDEN;
  static constexpr int PIECE = 2 * THREADS;  // channels that a block takes at once
  // Parts of k that the products come in: many, for there are few outputs to share the work by.
  static constexpr int SLICES = WIDTH_ALL % PIECE || WIDTH_ALL / PIECE > 40 ? 1 : WIDTH_ALL / PIECE;
  static constexpr int SLICE = WIDTH_ALL / SLICES, SLICED = SLICES * (OUT + 1);
  static constexpr int PIECES = (HIDDEN + PIECE - 1) / PIECE;
  static constexpr int LANES = 8;  // that sum up a product's parts: one would have to keep 40 on their way
  static_assert((OUT + 1) * LANES <= THREADS && HIDDEN % 2 == 0 && SLICE % 2 == 0, "");

  const f32 *scale, *base;  // [3], [OUT]
  f32 norm_eps, eps;        // of the streams' norm; of weights and divisors

  // A task is a slice of k, for all rows. N outputs: OUT, or STREAMS at the stack's end, where there is no sublayer.
  //   in   h [row][STREAMS * HIDDEN] as tagged pairs;  weights f32 [N][STREAMS * HIDDEN], row-major
  //   out  [row][slice][N + 1] as tagged pairs: products, then the slice's sum of squares
  // On the vector unit: 24 outputs would fill one and a half tiles of the matrix unit, and padding 24 rows to 32 costs a third
  // more bytes. A thread's columns of M stay in registers for all rows, and are asked for before the streams are there.
  template <int N = OUT>
  DEVICE static bool mix(Step& s, u32 stage, u32 tag, const PairRows& h, const f32* weights, Pair* out) {
    for (int slice = s.first_task(); slice < SLICES; slice += n_blocks()) {
      s.begin(stage, slice, tag);
      constexpr bool HELD = SLICE <= PIECE;
      f32 m[N][2] = {};
      if (HELD && 2 * thread_id() < SLICE) columns(weights + slice * SLICE + 2 * thread_id(), m);
      for (int row = 0; row < (int)s.rows; ++row) {
        f32 sum[N + 1] = {};
        bool ok = true;
        for (int from = 2 * thread_id(); from < SLICE && ok; from += PIECE) {
          int k = slice * SLICE + from;
          Pair got[2];
          if (!HELD) columns(weights + k, m);
          ok = h.take(s, row, [k](int i) { return k + i; }, got);
          UNROLL for (int j = 0; j < 2; ++j) {
            f32 v = value_of(got[j]);
            UNROLL for (int n = 0; n < N; ++n) sum[n] = __builtin_fmaf(m[n][j], v, sum[n]);
            sum[N] = __builtin_fmaf(v, v, sum[N]);
          }
        }
        if (!s.all_ok(ok)) return false;
        if (row == 0) s.input_is_there();
        UNROLL for (int n = 0; n <= N; ++n) {
          f32 of_wave = wave_sum(sum[n]);
          if (lane_id() == 0) set_lds_value(wave_id() * (N + 1) + n, of_wave);
        }
        block_barrier();
        for (int n = thread_id(); n <= N; n += THREADS) {
          f32 all = 0;
          UNROLL for (int w = 0; w < WAVES; ++w) all += lds_value(w * (N + 1) + n);
          put(out + row * (SLICES * (N + 1)) + slice * (N + 1) + n, all, tag);
        }
        block_barrier();  // before the sums of the next row
      }
      s.end();
    }
    s.finish(SLICES);
    return true;
  }

  // A task is a row.  in products of `mix`;  out [row][OUT] as tagged pairs: collapse, spread, mix.
  DEVICE bool site(Step& s, u32 stage, u32 tag, int rounds, const PairRows& products, Pair* out) const {
    for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
      s.begin(stage, row, tag);
      if (!gather<OUT>(s, products, row, OUT)) return false;
      s.input_is_there();
      f32 rms = inverse_rms<OUT>();
      for (int n = thread_id(); n < 2 * STREAMS; n += THREADS)
        put(out + row * OUT + n, n < STREAMS ? collapse_weight(n, rms) : 2 * gate(n, 1, rms), tag);
      if (thread_id() == THREADS - 1) sinkhorn(rounds, rms, out + row * OUT + 2 * STREAMS, tag);
      s.end();
      block_barrier();  // before the products of the next row
    }
    s.finish(s.rows);
    return true;
  }

  // A task is PIECE channels of a row.
  //   in   products of `mix<N>`, h
  //   out  sink(row, channel, x, there): x of `channel` and the next; eight threads in a row have 16 channels, and all threads
  //        are there
  template <int N = OUT, class Sink>
  DEVICE bool collapse(Step& s, u32 stage, u32 tag, const PairRows& products, const PairRows& h, Sink sink) const {
    int tasks = s.rows * PIECES;
    for (int task = s.first_task(); task < tasks; task += n_blocks()) {
      s.begin(stage, task, tag);
      int row = task / PIECES, channel = task % PIECES * PIECE + 2 * thread_id();
      bool mine = channel < HIDDEN;
      f32 of_kind = load_constant(scale), bases[STREAMS];  // all that the products are not needed for goes first
      UNROLL for (int from = 0; from < STREAMS; ++from) bases[from] = load_constant(base + from);
      Pair old[2 * STREAMS];
      bool ok = h.take(s, row, [&](int i) { return i / 2 * HIDDEN + (mine ? channel : 0) + i % 2; }, old);
      if (!gather<N>(s, products, row, STREAMS, ok)) return false;
      s.input_is_there();
      f32 rms = inverse_rms<N>(), x[2] = {};
      UNROLL for (int from = 0; from < STREAMS; ++from) {
        f32 weight = sigmoid(lds_value(from) * rms * of_kind + bases[from]) + eps;
        UNROLL for (int j = 0; j < 2; ++j) x[j] += weight * value_of(old[2 * from + j]);
      }
      sink(row, channel, x, mine);
      s.end();
      block_barrier();  // before the products of the next task
    }
    s.finish(tasks);
    return true;
  }

  // What a sublayer's last stage does with two of its outputs y: h'[t], and, for models that collapse with the weights of the
  // site before, x of the next site. One thread's work. All but y can be taken before y is there.
  //   in   h; `weights` [row][OUT], of `site`;  out `streams`, and x
  struct Before {
    f32 old[2 * STREAMS], site[OUT];
  };
  DEVICE static bool before(Step& s, const PairRows& h, const PairRows& weights, int row, int channel, Before& of) {
    Pair old[2 * STREAMS], site[OUT];
    bool ok = h.take(s, row, [channel](int i) { return i / 2 * HIDDEN + channel + i % 2; }, old);
    ok = weights.take(s, row, [](int i) { return i; }, site) && ok;
    UNROLL for (int i = 0; i < 2 * STREAMS; ++i) of.old[i] = value_of(old[i]);
    UNROLL for (int i = 0; i < OUT; ++i) of.site[i] = value_of(site[i]);
    return ok;
  }
  DEVICE static void expand(const Before& of, int row, int channel, const f32 (&y)[2], Pair* streams, f32 (&x)[2],
                            u32 tag) {
    x[0] = x[1] = 0;
    UNROLL for (int to = 0; to < STREAMS; ++to) {
      f32 v[2];
      UNROLL for (int j = 0; j < 2; ++j) {
        v[j] = of.site[STREAMS + to] * y[j];
        UNROLL for (int from = 0; from < STREAMS; ++from) v[j] +=
            of.site[(2 + from) * STREAMS + to] * of.old[2 * from + j];
        put(streams + row * WIDTH_ALL + to * HIDDEN + channel + j, v[j], tag);
        x[j] += of.site[to] * v[j];
      }
    }
  }

 private:
  // Two neighbouring columns of M, of all outputs.
  template <int N> DEVICE static void columns(const f32* weights, f32 (&m)[N][2]) {
    UNROLL for (int n = 0; n < N; ++n) {
      u64 two = load_constant((const u64*)(weights + (u64)n * WIDTH_ALL));
      m[n][0] = bits<f32>((u32)two), m[n][1] = bits<f32>((u32)(two >> 32));
    }
  }
  // Sums over slices, in an order that is always the same, of the first `count` of N products and of the squares, to LDS. Ends
  // with a barrier. ok: of waits before.
  template <int N> DEVICE static bool gather(Step& s, const PairRows& products, int row, int count, bool ok = true) {
    int which = thread_id() / LANES, part = thread_id() % LANES, n = which < count ? which : N;
    f32 sum = 0;
    if (which <= count) {
      constexpr int EACH = (SLICES + LANES - 1) / LANES;
      auto slice = [part](int i) { return part + i * LANES; };
      Pair got[EACH];
      ok = products.take(s, row, [&](int i) { return (slice(i) < SLICES ? slice(i) : 0) * (N + 1) + n; }, got) && ok;
      UNROLL for (int i = 0; i < EACH; ++i) sum += slice(i) < SLICES ? value_of(got[i]) : 0;
    }
    UNROLL for (int o = 1; o < LANES; o *= 2) sum += bits<f32>(wave_read(bits<u32>(sum), lane_id() ^ o));
    if (which <= count && part == 0) set_lds_value(n, sum);
    return s.all_ok(ok);
  }
  template <int N> DEVICE f32 inverse_rms() const {
    return 1.f / __builtin_sqrtf(lds_value(N) / (f32)WIDTH_ALL + norm_eps);
  }
  DEVICE f32 logit(int n, int kind, f32 rms) const {
    return lds_value(n) * rms * load_constant(scale + kind) + load_constant(base + n);
  }
  DEVICE f32 gate(int n, int kind, f32 rms) const { return sigmoid(logit(n, kind, rms)); }
  DEVICE f32 collapse_weight(int n, f32 rms) const { return gate(n, 0, rms) + eps; }

  // One thread has the square in registers: a round is 2 * STREAMS reciprocals, and shuffles would cost more than they spare.
  DEVICE void sinkhorn(int rounds, f32 rms, Pair* out, u32 tag) const {
    f32 square[STREAMS][STREAMS];
    UNROLL for (int from = 0; from < STREAMS; ++from) {
      f32 most = -__builtin_inff(), sum = 0;
      UNROLL for (int to = 0; to < STREAMS; ++to) {
        square[from][to] = logit((2 + from) * STREAMS + to, 2, rms);
        most = square[from][to] > most ? square[from][to] : most;
      }
      UNROLL for (int to = 0; to < STREAMS; ++to) sum += square[from][to] = exp_exact(square[from][to] - most);
      UNROLL for (int to = 0; to < STREAMS; ++to) square[from][to] = square[from][to] / sum + eps;
    }
    normalize_columns(square);
    for (int round = 1; round < rounds; ++round) {
      UNROLL for (int from = 0; from < STREAMS; ++from) {
        f32 sum = eps;
        UNROLL for (int to = 0; to < STREAMS; ++to) sum += square[from][to];
        f32 inverse = 1.f / sum;
        UNROLL for (int to = 0; to < STREAMS; ++to) square[from][to] *= inverse;
      }
      normalize_columns(square);
    }
    UNROLL for (int from = 0; from < STREAMS; ++from) UNROLL for (int to = 0; to < STREAMS; ++to)
        put(out + from * STREAMS + to, square[from][to], tag);
  }
  DEVICE void normalize_columns(f32 (&square)[STREAMS][STREAMS]) const {
    UNROLL for (int to = 0; to < STREAMS; ++to) {
      f32 sum = eps;
      UNROLL for (int from = 0; from < STREAMS; ++from) sum += square[from][to];
      f32 inverse = 1.f / sum;
      UNROLL for (int from = 0; from < STREAMS; ++from) square[from][to] *= inverse;
    }
  }
};
