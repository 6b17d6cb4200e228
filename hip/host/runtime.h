// What host.h needs of the runtime: fibers grouped into waves and blocks, shared memory with or without the memory
// model, LDS with a race check, tile products. Only libc is used, so that any C++ compiler will do, without its library.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HOST_COLD __attribute__((noinline, cold))

#pragma GCC visibility push(hidden)  // called directly, not by way of a table
namespace host {

constexpr int LANES = 64;

constexpr uint32_t ANY = 0xffffffffu;  // ANY_EPOCH

struct Place {
  uint32_t stage, task, epoch;
};

enum Scope : uint8_t { PLAIN, DEVICE_SCOPE, SYSTEM_SCOPE };

struct LdsShadow {  // who touched a word since the last barrier; see lds.cpp
  uint32_t era, wave_era;
  uint16_t writer, reader, atomic, stage;
  uint32_t task;
  uint16_t before[3];  // who wrote, read, changed it before the wave's last barrier: still news to other waves
  bool filled;         // in this launch
  uint8_t on_its_way;  // asynchronous copies that may land in it
};

struct Block {
  int index, rank, id, xcd, arrived;  // index: of all ranks' blocks; id: of its rank's; arrived: threads at the barrier
  uint32_t era;                       // barriers passed
  uint32_t* lds;
  LdsShadow* shadow;
};

struct Wave;
struct MmaCounts;
struct StoreQueue;
struct LdsCopies;
using Collective = void (*)(Wave&);

struct Wave {
  Block* block;
  int index;
  uint32_t era;                                           // wave barriers passed
  uint64_t ready, spinning, meeting, at_barrier, at_mma;  // lanes by state; in none of them: finished
  uint64_t looked_at;                                     // `changes` when the spinning lanes were last looked at
  Collective collective;
  uint64_t slots[LANES];  // what lanes bring to a collective, and take from it
  MmaCounts* products;
  StoreQueue* stores;  // on their way; only with the memory model
  LdsCopies* copies;   // into LDS, on their way
};

struct Fiber {
  void* sp;
  Wave* wave;
  uint32_t* lds;
  int lane, thread;
  Place place;
  const void* polled;  // the first pair since the last pause that had not come; what was wanted and seen
  uint32_t wanted, seen[2];
  uint64_t paused_at;  // `changes` then
};

extern Fiber* self;
extern int n_blocks, launch_blocks;  // of all ranks that run here, and of one: what its kernel sees
extern bool checking;                // the memory model and the LDS check are on
extern uint64_t turns, changes;      // changes: of anything a spinning thread could notice

void pause();
void maybe_yield();
void reschedule();
void block_barrier();
void meet(Collective);  // of the wave; the last to come does it for all
uint64_t random(uint64_t below);

void report(const char* format, ...) __attribute__((format(printf, 1, 2)));  // the first is kept, all are counted
[[noreturn]] void give_up();                                                 // ends the launch, whatever the others do

template <class T> inline void set_slot(T v) { memcpy(&self->wave->slots[self->lane], &v, sizeof v); }
template <> inline void set_slot<bool>(bool) = delete;
template <class T> inline T get_slot() {
  T v;
  memcpy(&v, &self->wave->slots[self->lane], sizeof v);
  return v;
}

// Shared memory (shared.cpp). Kernels know it under addresses in a window that nobody may touch, so that an access past
// the accessors faults; the data are at the same offsets of another range.
extern char *window, *data;
extern uint64_t window_bytes;

// How much of the window is copied from and to without a word: all of it, or nothing while `checking`. So one comparison asks
// whether an address can be right and whether there is more to do, and checks that are off cost nothing.
extern uint64_t unchecked_bytes;
inline bool unchecked(const void* p) {
  return __builtin_expect((uint64_t)((const char*)p - window) < unchecked_bytes, 1);
}
inline void* data_of(const void* p) { return data + ((const char*)p - window); }

// Which words spinning threads look at, by a hash of the address; a store elsewhere wakes nobody.
constexpr int WATCH = 4096;
extern uint16_t watched[WATCH];
extern uint32_t watch_all;  // spinning threads that do not poll a pair
inline uint16_t& watch_of(const void* p) { return watched[(uintptr_t)p / 8 % WATCH]; }
inline void notice(const void* p) {
  if (watch_of(p) | watch_all) ++changes;
}

// With the checks on, or of an address that cannot be right: which they report, and do not come back.
void checked_store(void* p, const void* v, int words, Scope, uint32_t epoch, bool tagged = false);
void checked_load(const void* p, void* v, int words, Scope, uint32_t epoch);

template <Scope scope, class T> inline void store(T* p, const T& v, uint32_t epoch) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 16, "shared data are accessed by 4, 8 or 16 bytes");
  if (!unchecked(p)) {
    T copy = v;  // v itself then has no address, and can be in a register
    return checked_store(p, &copy, sizeof v / 4, scope, epoch);
  }
  memcpy(data_of(p), &v, sizeof v);
  notice(p);
  if (sizeof(T) == 16) notice((char*)p + 8);
}
// A value and its tag, 8 bytes at once.
template <Scope scope, class P> inline void store_tagged(P* p, const P& pair, uint32_t tag) {
  if (!unchecked(p)) {
    P copy = pair;
    return checked_store(p, &copy, 2, scope, tag, true);
  }
  store<scope>(p, pair, tag);
}
template <Scope scope, class T> inline T load(const T* p, uint32_t epoch) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 16, "shared data are accessed by 4, 8 or 16 bytes");
  if (!unchecked(p)) {
    T v;
    checked_load(p, &v, sizeof v / 4, scope, epoch);
    return v;
  }
  T v;
  memcpy(&v, data_of(p), sizeof v);
  return v;
}

void checked_poll(const void* p, void* pair, uint32_t wanted, bool is_flag);
void peek(const Fiber&, const void* p, void* pair);  // what this thread would see now
HOST_COLD void spins_without_pause();
extern uint32_t polls_in_turn;
void check_scope(const void* p, Scope);  // memory that other ranks write is for system scope

inline void poll(const void* p, void* pair, uint32_t wanted, Scope scope, bool is_flag) {
  if (!unchecked(p)) {
    uint32_t got[2];
    check_scope(p, scope), checked_poll(p, got, wanted, is_flag);
    memcpy(pair, got, 8);
  } else {
    memcpy(pair, data_of(p), 8);
  }
  if (++polls_in_turn > 1u << 24) spins_without_pause();
  // A thread that asks for several words sleeps on the first that it does not have.
  if (!self->polled && (int)(((uint32_t*)pair)[1] - wanted) < 0) {
    self->polled = p, self->wanted = wanted;
    memcpy(self->seen, pair, 8);
  }
}
bool claim(uint32_t* p);
void drain();
void release();
void acquire();

// LDS as kernels see it: an array of words whose every access is checked against the barriers of its block.
enum LdsAccess { LDS_READ, LDS_WRITE, LDS_ATOMIC };
struct LdsWord {
  const char* name;
  uint32_t word, index;  // of all LDS, of the array
};
void lds_check(const char* name, uint32_t word, uint32_t index, LdsAccess);
HOST_COLD void lds_outside(const char* name, uint32_t index, uint32_t size);
uint32_t lds_reserve(uint32_t words);
// An asynchronous copy of 16 bytes by this lane. With the checks on it lands any time until its wave waits for all but the
// newest `left` of each lane's copies, which is collective over the wave; without, at once.
void lds_copy(LdsWord to, const void* from);
void lds_wait(int left);

template <class T, uint32_t SIZE> class Lds {
  static_assert(sizeof(T) == 4, "LDS is kept in words");
  const char* name;
  uint32_t base;

  T* word(uint32_t index, LdsAccess access, uint32_t count = 1) const {
    if (__builtin_expect(index >= SIZE || count > SIZE - index, 0)) lds_outside(name, index, SIZE);
    if (__builtin_expect(checking, 0))
      for (uint32_t i = index; i < index + count; ++i) lds_check(name, base + i, i, access);
    return (T*)(self->lds + base + index);
  }
  struct Word {
    const Lds& lds;
    uint32_t index;
    operator T() const { return *lds.word(index, LDS_READ); }
    T operator=(T v) const { return *lds.word(index, LDS_WRITE) = v; }
    T operator=(const Word& other) const { return *this = T(other); }
    T operator+=(T v) const { return *this = T(*this) + v; }
    T operator-=(T v) const { return *this = T(*this) - v; }
    T operator*=(T v) const { return *this = T(*this) * v; }
    T operator|=(T v) const { return *this = T(*this) | v; }
  };

 public:
  explicit Lds(const char* name) : name(name), base(lds_reserve(SIZE)) {}
  Word operator[](uint32_t index) const { return {*this, index}; }
  // 16 bytes that arrive later; index a multiple of 4.
  void copy4(uint32_t index, const void* from) const {
    if (index % 4 || index >= SIZE || SIZE - index < 4) lds_outside(name, index, SIZE);
    lds_copy({name, base + index, index}, from);
  }
  T& atomic(uint32_t index) const { return *word(index, LDS_ATOMIC); }
  void read4(uint32_t index, uint32_t* out) const {
    if (index % 4) lds_outside(name, index, SIZE);
    memcpy(out, word(index, LDS_READ, 4), 16);
  }
};

// Tile products (mma.cpp). A product waits for the whole wave, and that costs a switch of fibers for each lane. So
// products are noted and done several at a time, at the latest when an accumulator is looked at.
enum MmaKind : uint8_t { MMA_F32, MMA_BF16_K16, MMA_BF16_K32, MMA_FP8_OCP, MMA_FP8_FNUZ, MMA_MXFP4 };

class AccValues;
struct MmaCounts {
  uint32_t noted[LANES];    // products noted by each lane
  uint32_t complete, done;  // products noted by all lanes, and done
  uint32_t wanted;          // the fewest complete ones that would help a lane that waits
};
void mma(MmaKind, const uint32_t* a, const uint32_t* b, AccValues&);
void mma_finish(const AccValues*);  // returns when the products noted for it are done

class AccValues {
  float v[4];

  void finish() const {
    const Fiber& f = *self;
    const MmaCounts& q = *f.wave->products;
    if (q.noted[f.lane] != q.done) mma_finish(this);
  }
  friend struct Tiles;

 public:
  AccValues() = default;
  AccValues(const AccValues& other) { other.finish(), memcpy(v, other.v, sizeof v); }
  AccValues& operator=(const AccValues& other) {
    other.finish(), finish();
    memcpy(v, other.v, sizeof v);
    return *this;
  }
  ~AccValues() { finish(); }  // a product that is still to be done would be written to a dead variable
  float& operator[](int i) { return finish(), v[i]; }
  float operator[](int i) const { return finish(), v[i]; }
};
struct Acc {
  AccValues v;
};

}  // namespace host
#pragma GCC visibility pop
