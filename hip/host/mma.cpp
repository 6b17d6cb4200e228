// Tile products, exactly: sums in double, rounded to float once per instruction. Products are noted lane by lane in a
// ring per wave and done when all lanes have noted them and somebody needs a result or room.
#include "internal.h"

#if defined(__x86_64__)
#define X86 1
#endif

namespace host {

constexpr uint32_t RING = 8;

struct Product {
  MmaKind kind;
  uint32_t lanes;  // that have noted it
  AccValues* acc[LANES];
  uint32_t a[LANES][5], b[LANES][9];  // of MXFP4 x MXFP8 all, the scale last; else 4 words of each
};
struct MmaQueue : MmaCounts {
  Product ring[RING];
};

namespace {

constexpr int MAX_K = 128;
struct Operands {
  alignas(64) double x[16][MAX_K];  // rows of A
  alignas(64) double y[MAX_K][16];  // columns of B
  alignas(64) float c[16][16];
};

// c += x y for `step` k at a time, with one rounding each. Products of two floats are exact in double, so fused or not is
// the same. Columns lie side by side for the compiler to make vectors of; only `columns` of them are done.
template <int COLUMNS, bool FUSED>
__attribute__((always_inline)) inline void multiply(Operands& o, int k_all, int step) {
  constexpr int ROWS = COLUMNS == 16 ? 2 : 4;
  for (int row = 0; row < 16; row += ROWS)
    for (int from = 0; from < k_all; from += step) {
      double sum[ROWS][COLUMNS];
      for (int r = 0; r < ROWS; ++r)
        for (int col = 0; col < COLUMNS; ++col) sum[r][col] = o.c[row + r][col];
      for (int k = from; k < from + step; ++k)
        for (int r = 0; r < ROWS; ++r)
          for (int col = 0; col < COLUMNS; ++col) {
            double x = o.x[row + r][k], y = o.y[k][col];
            sum[r][col] = FUSED ? __builtin_fma(x, y, sum[r][col]) : sum[r][col] + x * y;
          }
      for (int r = 0; r < ROWS; ++r)
        for (int col = 0; col < COLUMNS; ++col) o.c[row + r][col] = (float)sum[r][col];
    }
}
template <bool FUSED>
__attribute__((always_inline)) inline void multiply(Operands& o, int k_all, int step, int columns) {
  if (columns <= 4)
    multiply<4, FUSED>(o, k_all, step);
  else if (columns <= 8)
    multiply<8, FUSED>(o, k_all, step);
  else
    multiply<16, FUSED>(o, k_all, step);
}

#ifdef X86
__attribute__((target("avx512f,avx512vl,avx2,fma"))) void multiply_avx512(Operands& o, int k_all, int step,
                                                                          int columns) {
  multiply<true>(o, k_all, step, columns);
}
__attribute__((target("avx2,fma"))) void multiply_avx2(Operands& o, int k_all, int step, int columns) {
  multiply<true>(o, k_all, step, columns);
}
#endif
void multiply_any(Operands& o, int k_all, int step, int columns) {
#if defined(__aarch64__)
  multiply<true>(o, k_all, step, columns);
#else
  multiply<false>(o, k_all, step, columns);
#endif
}

using Multiply = void (*)(Operands&, int, int, int);
#ifdef X86
void cpuid(uint32_t leaf, uint32_t sub, uint32_t (&r)[4]) {
  asm("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(sub));
}
Multiply best_multiply() {
  uint32_t r[4], low, high;
  cpuid(0, 0, r);
  uint32_t leaves = r[0];
  cpuid(1, 0, r);
  bool fma = r[2] >> 12 & 1, saves = r[2] >> 27 & 1;
  if (!saves || !fma || leaves < 7) return multiply_any;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  cpuid(7, 0, r);
  if ((low & 0xe6) == 0xe6 && r[1] >> 16 & 1 && r[1] >> 31) return multiply_avx512;
  return (low & 6) == 6 && r[1] >> 5 & 1 ? multiply_avx2 : multiply_any;
}
#else
Multiply best_multiply() { return multiply_any; }
#endif

// How instructions take what a lane holds.
struct Format {
  int elements;  // of a lane
  int a, b;      // of A and of B: neighbours in k, before the next lane group's
  int step;      // k of one instruction
};
Format format_of(MmaKind kind) {
  switch (kind) {
    case MMA_F32:
      return {4, 1, 1, 4};
    case MMA_BF16_K16:
      return {8, 4, 4, 16};
    case MMA_BF16_K32:
      return {8, 8, 8, 32};
    case MMA_MXFP4:
      return {32, 32, 16, 128};
    default:
      return {16, 8, 8, 32};
  }
}
int k_of(int element, int chunk, int together) {
  return element / together * 4 * together + chunk * together + element % together;
}

float float_of(uint32_t u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}

float fp8_table[2][256];  // OCP, FNUZ
void make_fp8_tables() {
  for (int fnuz = 0; fnuz < 2; ++fnuz)
    for (int b = 0; b < 256; ++b) {
      int e = b >> 3 & 15, m = b & 7;
      float v = e ? 8 + m : m;  // times 2^(max(e, 1) - 10 or 11)
      for (int i = e ? e : 1; i < 10 + fnuz; ++i) v /= 2;
      for (int i = e; i > 10 + fnuz; --i) v *= 2;
      bool nan = fnuz ? b == 0x80 : (b & 0x7f) == 0x7f;
      fp8_table[fnuz][b] = nan ? __builtin_nanf("") : b & 0x80 ? -v : v;
    }
}

double e8m0(uint32_t byte) {  // 2^(byte - 127)
  uint64_t bits = (uint64_t)(byte + 1023 - 127) << 52;
  double v;
  memcpy(&v, &bits, 8);
  return byte == 255 ? __builtin_nan("") : v;
}
void unpack_e2m1(const uint32_t* w, double (&v)[32]) {
  static const double numbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  double scale = e8m0(w[4]);
  for (int i = 0; i < 32; ++i) {
    uint32_t code = w[i / 8] >> i % 8 * 4 & 15;
    v[i] = (code & 8 ? -scale : scale) * numbers[code & 7];
  }
}
void unpack(MmaKind kind, const uint32_t* w, double (&v)[32]) {
  if (kind == MMA_F32) {
    for (int i = 0; i < 4; ++i) v[i] = float_of(w[i]);
  } else if (kind == MMA_BF16_K16 || kind == MMA_BF16_K32) {
    for (int i = 0; i < 4; ++i) v[2 * i] = float_of(w[i] << 16), v[2 * i + 1] = float_of(w[i] & 0xffff0000);
  } else {
    const float* table = fp8_table[kind == MMA_FP8_FNUZ];
    for (int i = 0; i < (kind == MMA_MXFP4 ? 32 : 16); ++i) v[i] = table[w[i / 4] >> i % 4 * 8 & 255];
  }
}

}  // namespace

struct Tiles {  // may look into accumulators
  static void gather(const Product& p, Operands& o) {
    for (int l = 0; l < LANES; ++l)
      for (int i = 0; i < 4; ++i) o.c[l / 16 * 4 + i][l % 16] = p.acc[l]->v[i];
  }
  static void scatter(const Product& p, const Operands& o) {
    for (int l = 0; l < LANES; ++l)
      for (int i = 0; i < 4; ++i) p.acc[l]->v[i] = o.c[l / 16 * 4 + i][l % 16];
  }

  // Returns how many columns there are up to the last in which B is not all zeros: the others add nothing. Unless A holds
  // an infinity or a NaN.
  static int load(const Product& p, const Format& f, Operands& o) {
    int columns = 0;
    bool finite = true;
    for (int l = 0; l < LANES; ++l) {
      double a[32], b[32];
      p.kind == MMA_MXFP4 ? unpack_e2m1(p.a[l], a) : unpack(p.kind, p.a[l], a);
      unpack(p.kind, p.b[l], b);
      int row = l % 16, chunk = l / 16;
      double check = 0;
      for (int i = 0; i < f.elements; ++i) {
        o.x[row][k_of(i, chunk, f.a)] = a[i], o.y[k_of(i, chunk, f.b)][row] = b[i];
        check += a[i] * 0;
      }
      finite &= check == 0;
      uint32_t any = 0;
      for (int i = 0; i < (p.kind == MMA_MXFP4 ? 8 : 4); ++i) any |= p.b[l][i];
      if (any && row >= columns) columns = row + 1;
    }
    if (p.kind == MMA_MXFP4)
      for (int k = 0; k < 128; ++k)
        for (int row = 0; row < 16; ++row) o.y[k][row] *= e8m0(p.b[k / 32 * 16 + row][8]);
    return finite ? columns : 16;
  }

  static void run(MmaQueue& q) {
    static Operands o;
    static Multiply multiply;
    if (!multiply) make_fp8_tables(), multiply = best_multiply();
    const Product* held = nullptr;  // its accumulators are in o.c
    for (; q.done != q.complete; ++q.done) {
      Product& p = q.ring[q.done % RING];
      if (!held || memcmp(held->acc, p.acc, sizeof p.acc)) {
        if (held) scatter(*held, o);
        gather(p, o);
      }
      held = &p;
      Format f = format_of(p.kind);
      if (int columns = load(p, f, o)) multiply(o, 4 * f.elements, f.step, columns);
      p.lanes = 0;
    }
    if (held) scatter(*held, o);
  }
};

size_t mma_bytes(int n_waves) { return n_waves * sizeof(MmaQueue); }
MmaQueue* mma_allocate(int n_waves) { return (MmaQueue*)map(mma_bytes(n_waves)); }
void mma_start(Wave& w, MmaQueue* all, int index) {
  MmaQueue& q = all[index];
  w.products = &q;
  memset(q.noted, 0, sizeof q.noted);
  q.complete = q.done = 0, q.wanted = ~0u;
  for (Product& p : q.ring) p.lanes = 0;
}

static MmaQueue& queue() { return *static_cast<MmaQueue*>(self->wave->products); }

// Until the products up to `upto` are done. A lane that waits for room waits for all that it has noted, so that the
// others come with as many before anything is done.
static void finish(MmaQueue& q, uint32_t upto, uint32_t complete) {
  while (q.done < upto) {
    if (q.complete >= complete) {
      Tiles::run(q);
      return;
    }
    if (complete < q.wanted) q.wanted = complete;
    mma_wait();
  }
}

void mma_finish(const AccValues* acc) {
  MmaQueue& q = queue();
  for (uint32_t number = q.noted[self->lane]; number != q.done; --number)
    if (q.ring[(number - 1) % RING].acc[self->lane] == acc) return finish(q, number, number);
}

void mma(MmaKind kind, const uint32_t* a, const uint32_t* b, AccValues& acc) {
  MmaQueue& q = queue();
  int lane = self->lane;
  uint32_t number = q.noted[lane];
  if (number - q.done >= RING) finish(q, number - RING + 1, number);
  Product& p = q.ring[number % RING];
  if (!p.lanes) p.kind = kind;
  if (p.kind != kind) {
    report("%s wave %d stage %s task %u: lanes meet in products of different kinds",
           block_name(self->wave->block->index), self->wave->index, stage_name(self->place.stage), self->place.task);
    give_up();
  }
  p.acc[lane] = &acc, q.noted[lane] = number + 1;
  bool mx = kind == MMA_MXFP4;
  memcpy(p.a[lane], a, mx ? sizeof p.a[0] : 16), memcpy(p.b[lane], b, mx ? sizeof p.b[0] : 16);
  if (++p.lanes < LANES) return;
  q.complete = number + 1;
  if (q.complete < q.wanted) return;
  Tiles::run(q);
  q.wanted = ~0u;
  mma_wake();
}

}  // namespace host
