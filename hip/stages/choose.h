// The choice of a token where it is not simply the largest logit: bias and penalties, temperature, min-p, top-k, top-p and a
// draw. rocmega/sampling/choose.py says what is computed, in the same order; the results are the same bits.
//   in   logits [row][vocab] of all blocks, plain, behind one flag a block; one task a row
//   out  tokens [row]
// What is float32 is one operation at a time: division by the temperature, differences to the largest, products with log2(e).
// Weights, their sums and random numbers are integers, so it does not matter which thread adds them when.
// One block passes over a row's logits twice for a plain draw, five times more for top-k, and five for top-p: 0.6 MB a pass at
// a vocabulary of 150 K, which its L2 holds.
// Choice and Adjustment are the descriptor's.
#pragma once
#include "stages/sample.h"
#include "stages/select.h"

DEVICE f32 from_order_key(u32 key) { return bits<f32>(key >> 31 ? key ^ 0x80000000u : ~key); }

SHARED(u32, most_of_wave, 2 * WAVES);
DEVICE u64 block_max(u64 mine) {
  u64 most = wave_max(mine);
  block_barrier();
  if (lane_id() == 0) most_of_wave[2 * wave_id()] = (u32)most, most_of_wave[2 * wave_id() + 1] = (u32)(most >> 32);
  block_barrier();
  for (int w = 0; w < WAVES; ++w) {
    u64 other = (u64)most_of_wave[2 * w + 1] << 32 | most_of_wave[2 * w];
    most = other > most ? other : most;
  }
  return most;
}

DEVICE u64 wave_read64(u64 v, int lane) { return (u64)wave_read((u32)(v >> 32), lane) << 32 | wave_read((u32)v, lane); }
// Inclusive sum over the lanes of a wave.
DEVICE u64 wave_prefix64(u64 sum) {
  int lane = thread_id() % WIDTH;
  for (int o = 1; o < WIDTH; o *= 2) {
    u64 below = wave_read64(sum, lane >= o ? lane - o : lane);
    if (lane >= o) sum += below;
  }
  return sum;
}
// Exclusive sum over the block's threads, and that of all.
SHARED(u32, sums_of_wave, 2 * WAVES);
DEVICE u64 block_prefix64(u64 mine, u64& total) {
  u64 sum = wave_prefix64(mine), before = sum - mine;
  block_barrier();
  if (thread_id() % WIDTH == WIDTH - 1)
    sums_of_wave[2 * wave_id()] = (u32)sum, sums_of_wave[2 * wave_id() + 1] = (u32)(sum >> 32);
  block_barrier();
  total = 0;
  for (int w = 0; w < WAVES; ++w) {
    if (w == wave_id()) before += total;
    total += (u64)sums_of_wave[2 * w + 1] << 32 | sums_of_wave[2 * w];
  }
  return before;
}

// The high 64 bits of a product, and a * b >> 32 where that fits in 64 bits.
DEVICE u64 high_product(u64 a, u64 b) {
  u64 al = (u32)a, ah = a >> 32, bl = (u32)b, bh = b >> 32;
  u64 low = ah * bl + (al * bl >> 32), mid = al * bh + (u32)low;
  return ah * bh + (low >> 32) + (mid >> 32);
}
DEVICE u64 product_shifted_32(u64 a, u32 b) { return (a >> 32) * b + ((u64)(u32)a * b >> 32); }

// Philox4x32-10, the first two words: the random bits of a request's token `number`.
DEVICE u64 philox(u32 key_low, u32 key_high, u32 number) {
  u32 a = number, b = 0, c = 0, d = 0;
  for (int round = 0; round < 10; ++round) {
    u64 one = (u64)0xd2511f53u * a, two = (u64)0xcd9e8d57u * c;
    a = (u32)(two >> 32) ^ b ^ key_low, b = (u32)two;
    c = (u32)(one >> 32) ^ d ^ key_high, d = (u32)one;
    key_low += 0x9e3779b9u, key_high += 0xbb67ae85u;
  }
  return (u64)b << 32 | a;
}

// exp(z - top) in units of 2^-31; 0 below 2^-31.
DEVICE u32 weight(f32 top, f32 z) {
  constexpr u32 POWER[] = {2147483645, 1488521950, 515877875, 119166091, 20573019, 2739580, 234908};
  f32 exponent = (top - z) * 1.44269502f;
  if (!(exponent < 31.f)) return 0;
  u32 fixed = (u32)(exponent * 67108864.f);
  u64 fraction = (u64)(fixed & 0x3ffffffu) << 5, power = POWER[6];
  UNROLL for (int i = 5; i >= 0; --i) power = POWER[i] - (power * fraction >> 31);
  return (u32)power >> (fixed >> 26);
}

// A row's logits, divided by its temperature, and what the filters have left of them so far.
struct Candidates {
  static constexpr int BINS = 256, PER_LANE = BINS / WIDTH,
                       PIECE = 11;  // weights are summed in three pieces of 11 bits
  const f32* logits;
  const u32 vocab, tag;
  const f32 temperature, gap;  // gap: how far below the largest min-p lets one be
  f32 top = 0;
  u32 threshold = 0;  // smallest order key

  DEVICE f32 z(u32 token) const { return load_plain(logits + token, tag) / temperature; }
  DEVICE u32 mass(f32 z) const { return order_key(z) >= threshold && top - z <= gap ? weight(top, z) : 0; }

  // The largest, of equals the lowest token.
  DEVICE u32 largest() {
    u64 most = 0;
    for (u32 token = thread_id(); token < vocab; token += THREADS) {
      u64 mine = (u64)order_key(z(token)) << 32 | ~token;
      most = mine > most ? mine : most;
    }
    most = block_max(most);
    top = from_order_key((u32)(most >> 32));
    return ~(u32)most;
  }
  DEVICE u64 total() const {
    u64 mine = 0, all;
    for (u32 token = thread_id(); token < vocab; token += THREADS) mine += mass(z(token));
    block_prefix64(mine, all);
    return all;
  }

  // Leaves those from the largest key on whose number, or mass, reaches `wanted`: a radix descent by 8 bits a pass.
  DEVICE void keep(u64 wanted, bool by_mass) {
    u32 found = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      block_barrier();
      for (int i = thread_id(); i < 3 * BINS; i += THREADS) lds[i] = 0u;
      block_barrier();
      for (u32 token = thread_id(); token < vocab; token += THREADS) {
        f32 value = z(token);
        u32 key = order_key(value), bin = 255 - (key >> shift & 255), much = 0;
        if ((key & known) == found) much = by_mass ? mass(value) : 1u;
        for (int piece = 0; much; ++piece, much >>= PIECE)
          if (u32 part = much & ((1u << PIECE) - 1)) lds_add(lds, piece * BINS + bin, part);
      }
      block_barrier();
      found |= digit(wanted) << shift;
      known |= 0xffu << shift;
    }
    threshold = found > threshold ? found : threshold;
  }

  // The token at which the sum of masses, in the order of tokens, passes `place`; to one thread only, ~0 to all others.
  DEVICE u32 at(u64 random) const {
    u32 stretch = (vocab + THREADS - 1) / THREADS, begin = thread_id() * stretch, end = begin + stretch;
    if (begin > vocab) begin = vocab;
    if (end > vocab) end = vocab;
    u64 mine = 0, all;
    for (u32 token = begin; token < end; ++token) mine += mass(z(token));
    u64 sum = block_prefix64(mine, all), place = high_product(random, all);
    if (place < sum || place >= sum + mine) return ~0u;
    u32 token = begin;
    for (;; ++token)
      if ((sum += mass(z(token))) > place) return token;
  }

 private:
  DEVICE static u64 in_bin(int bin) {
    u64 high = lds[2 * BINS + bin], middle = lds[BINS + bin];
    return (high << 2 * PIECE) + (middle << PIECE) + lds[bin];
  }
  // The digit in whose bin the sum from above reaches `wanted`, which becomes what is wanted of that bin. By every wave.
  DEVICE static u32 digit(u64& wanted) {
    int lane = thread_id() % WIDTH, first = lane * PER_LANE, found = 0;
    u64 mine = 0;
    UNROLL for (int i = 0; i < PER_LANE; ++i) mine += in_bin(first + i);
    u64 sum = wave_prefix64(mine), above = sum - mine, rest = 0;
    bool here = above < wanted && wanted <= sum;
    if (here)
      for (int bin = first;; ++bin) {
        u64 in = in_bin(bin);
        if (wanted - above <= in) {
          found = BINS - 1 - bin, rest = wanted - above;
          break;
        }
        above += in;
      }
    int holder = lowest_bit(wave_ballot(here));
    wanted = wave_read64(rest, holder);
    return wave_read(found, holder);
  }
};

// The logits of a row whose request has biases, or penalties for what it used: a copy with those changed. Not in place, as a
// word has one store a step, and the host may want the model's own logits. LDS holds a bit a token: changed or not.
DEVICE void adjust(const f32* logits, u32 vocab, Const<Choice> c, const Adjustment* entries, f32* out, u32 tag) {
  for (u32 i = thread_id(); i < (vocab + 31) / 32; i += THREADS) lds[i] = 0u;
  block_barrier();
  for (u32 i = thread_id(); i < c->adjustments; i += THREADS) {
    Adjustment e = copy_of(as_const(entries) + i);
    lds_or(lds, e.token / 32, 1u << e.token % 32);
    f32 v = load_plain(logits + e.token, tag) + e.bias;
    if (e.seen) v = v > 0 ? v / c->repetition : v * c->repetition;
    if (e.times) v = v - (f32)e.times * c->frequency, v = v - c->presence;
    store_plain(out + e.token, v, tag);
  }
  block_barrier();
  for (u32 token = thread_id(); token < vocab; token += THREADS)
    if (!(lds[token / 32] >> token % 32 & 1)) store_plain(out + token, load_plain(logits + token, tag), tag);
  drain();
  block_barrier();
}

// To one thread; ~0 to all others.
DEVICE u32 choose(Candidates& from, Const<Choice> c, u32 later) {
  u32 best = from.largest();
  if (c->greedy) return thread_id() == 0 ? best : ~0u;
  for (int by_mass = 0; by_mass < 2; ++by_mass) {  // a loop: the code of keep() stands here once
    u32 asked = by_mass ? c->top_p : c->top_k;
    if (!asked) continue;
    u64 wanted = by_mass ? product_shifted_32(from.total(), asked) : asked;
    from.keep(wanted ? wanted : 1, by_mass);
  }
  return from.at(philox(c->seed_low, c->seed_high, c->number + later));
}

struct ChooseTokens {
  const f32* logits;  // [rows][vocab]
  u32 vocab;
  const Pair* flags;              // [blocks]: this block's logits are stored
  const Choice* choices;          // [rows]
  const Adjustment* adjustments;  // [rows][stride]
  u32 stride;
  f32* adjusted;  // [rows][vocab]
  u32 later;      // tokens of this launch before this one
  TokensOut tokens;

  STAGE bool run(Step& s, u32 stage, u32 tag) const {
    for (int row = s.first_task(); row < (int)s.rows; row += n_blocks()) {
      s.begin(stage, row, tag);
      if (!s.wait_flags(n_blocks(), tag, [&](int block) { return flags + block; })) return false;
      s.input_is_there();
      acquire_device();
      Const<Choice> c = fresh(as_const(choices) + row);
      u64 first = (u64)row * vocab;
      if (c->adjustments) adjust(logits + first, vocab, c, adjustments + (u64)row * stride, adjusted + first, tag);
      Candidates from{(c->adjustments ? adjusted : logits) + first, vocab, tag, c->temperature, c->gap};
      u32 token = choose(from, c, later);
      if (token != ~0u) tokens.put(row, token, tokens.last(), tag);
      s.end();
      block_barrier();  // before LDS is written again
    }
    s.finish(s.rows);
    return true;
  }
};
