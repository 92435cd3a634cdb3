// A CUDA device on one CPU thread, for kernels' own sources: each thread of a block is a fiber, and who runs next is
// drawn at random, so that orders nobody thought of are tried. Blocks run one after another, in an order that is drawn,
// too. What a kernel does wrong ends its launch with a message: threads that wait for ever, an index outside shared
// memory, a shared value that two threads use, one of them writing, with no barrier in between, lanes that meet in
// different instructions, values that do not lie at a multiple of their size, and what else C++ leaves undefined
// (undefined.cpp).
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

namespace pagedec::emulate {

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;
constexpr int64_t MAX_SHARED_BYTES = 227 << 10;  // of a block on sm_90
constexpr int64_t DECLARED_BYTES = 48 << 10;     // of those, what a kernel has without asking for more

struct Place {  // of the thread that runs
  int thread, block, num_threads, num_blocks;
};
const Place &place();

class Before;  // memory.h

// Carry out a kernel of `num_blocks` blocks, each with so many bytes of shared memory besides what it declares.
// `before`: what a block finds in memory until all of its threads wait for the kernels in front, or for one another.
// Empty, or what went wrong.
std::string run(int num_blocks, int num_threads, int64_t shared_bytes, const std::function<void()> &body,
                Before *before = nullptr);

// Who runs next, from now on, of this process. 0: threads run in their order, each until it waits.
void set_seed(uint64_t seed);

// A kernel that may begin before those in front of it are through must wait for them, in every thread: one that has
// ended without having waited is a fault.
void await_kernels();
void check_awaited();

// Whether this thread carries out a kernel.
bool is_running();

// The launch is over, with this message.
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

void sync_block();
void sync_warp();
void sync_group();  // of 128 threads, that is, four warps
// Who did something, and how many meetings that order memory he had had.
struct Moment {
  int32_t thread = -1;
  uint32_t block_round = 0, group_round = 0, order_round = 0;
};
Moment moment();
bool is_known(const Moment &);  // to this thread
// Instructions that lanes carry out together, which orders no memory between them.
enum class Meeting { begin_products, multiply_group, end_products, await_products };
void meet_in(Meeting);
// Until somebody has changed a barrier (warpgroup.h).
void wait_at_barrier();
void wake_those_at_barriers();

// 16 bytes are about to be loaded at once.
inline void load_at(const void *p) {
  if ((uintptr_t)p % 16) fault("a load of 16 bytes that is not aligned");
}

// Lanes of a warp give something of at most 64 bytes each; all of it is there until `release`.
const void *exchange(const void *mine, size_t size);
template <class T>
const T *gather(const T &mine) {
  static_assert(sizeof(T) <= 64 && std::is_trivially_copyable_v<T>);
  return (const T *)exchange(&mine, sizeof(T));
}
void release();

// Shared memory of the block that runs: of one declaration, whose address is `tag`; it begins as NaN.
char *shared(const void *tag, int64_t bytes);
// All of it that is declared so far.
const char *shared_begin();
int64_t shared_size();
// A thread is about to read or write so many bytes of it.
void touch(const char *where, int64_t bytes, bool is_write);
void touch_atomically(const char *where, int64_t bytes);  // others may, too

// 16 or 4 bytes to shared memory, zeros where `from` is not to be read. They come when the thread waits for the group
// that it ends the copies since the last one with, but for the `num_left` youngest; until then nobody may look there.
void begin_copy(char *to, const char *from, int bytes, bool is_read);
void end_copy_group();
void await_copies(int num_left);
struct Copy {
  char *to;
  const char *from;  // NULL: zeros
  int bytes, group;
  bool is_brought = false;
};
void bring(Copy &);

template <class T>
class SharedValue {  // one of an array: what a thread does with it is watched
 public:
  explicit SharedValue(T *p) : p_(p) {}
  operator T() const { return touch((const char *)p_, sizeof(T), false), *p_; }
  T operator=(T value) const { return touch((const char *)p_, sizeof(T), true), *p_ = value; }
  T operator=(const SharedValue &other) const { return *this = (T)other; }
  T operator+=(T value) const { return *this = (T) * this + value; }

 private:
  T *p_;
};

template <class T>
class SharedArray {
 public:
  SharedArray(const void *tag, int64_t size) : p_((T *)shared(tag, size * sizeof(T))), size_(size) {}
  SharedArray(char *p, int64_t size) : p_((T *)p), size_(size) {}
  SharedValue<T> operator[](int64_t i) const { return SharedValue<T>(at(i)); }
  T *at(int64_t i) const {
    if (i < 0 || i >= size_) fault("index %lld of a shared array of %lld", (long long)i, (long long)size_);
    return p_ + i;
  }

 private:
  T *p_;
  int64_t size_;
};

// What a launch has given each block besides, from the front on.
class SharedMemory {
 public:
  SharedMemory();
  template <class T>
  SharedArray<T> part(int64_t offset, int64_t size) const {
    if (offset < 0 || offset + size * (int64_t)sizeof(T) > bytes_)
      fault("bytes %lld to %lld of %lld that were launched with", (long long)offset,
            (long long)(offset + size * (int64_t)sizeof(T)), (long long)bytes_);
    return SharedArray<T>(p_ + offset, size);
  }

 private:
  char *p_;
  int64_t bytes_;
};

// `change` of one value, which no other thread sees half done. What it was before.
template <class T, class Change>
T change_atomically(const SharedArray<T> &array, int64_t i, Change change) {
  T *p = array.at(i);
  touch_atomically((const char *)p, sizeof(T));
  const T before = *p;
  *p = change(before);
  return before;
}

}  // namespace pagedec::emulate
