#include "cuda/emulate/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/emulate/devices.h"
#include "cuda/emulate/stream.h"

namespace pagedec::emulate {
namespace {

constexpr int64_t PAGE = 4096, ALIGNMENT = 64;
thread_local int own_device = 0;

struct Piece {
  const char *end;   // of what was asked for
  char *pages;       // NULL: it is the host's
  int device;
  int64_t num_bytes; // of the pages, without the one behind them
};

class Device {
 public:
  void *allocate(int64_t num_bytes) {
    const int64_t used = (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const int64_t size = (used + PAGE - 1) / PAGE * PAGE + (used == 0 ? PAGE : 0);
    void *pages = mmap(nullptr, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    const std::lock_guard lock(mutex_);
    char *begin = (char *)pages + size - (used == 0 ? ALIGNMENT : used);
    const Piece &piece = pieces_[begin] = {begin + num_bytes, (char *)pages, own_device, size};
    if (num_open_) protect(piece, true);
    return begin;
  }
  bool release(void *begin) {
    const std::lock_guard lock(mutex_);
    const auto found = pieces_.find((char *)begin);
    if (found == pieces_.end() || !found->second.pages) return false;
    munmap(found->second.pages, found->second.num_bytes + PAGE);
    pieces_.erase(found);
    return true;
  }
  bool map(const char *from, int64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    return pieces_.insert({from, {from + num_bytes, nullptr, 0, 0}}).second;
  }
  bool unmap(const char *from) {
    const std::lock_guard lock(mutex_);
    const auto found = pieces_.find(from);
    if (found == pieces_.end() || found->second.pages) return false;
    pieces_.erase(found);
    return true;
  }
  bool holds(const char *p) {
    const std::lock_guard lock(mutex_);
    const auto next = pieces_.upper_bound(p);
    if (next == pieces_.begin()) return false;
    const Piece &piece = std::prev(next)->second;
    return p <= piece.end && (!piece.pages || piece.device == own_device);
  }
  bool holds_all(const char *p, int64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    const auto next = pieces_.upper_bound(p);
    return num_bytes == 0 || (next != pieces_.begin() && p + num_bytes <= std::prev(next)->second.end);
  }
  void open() {
    const std::lock_guard lock(mutex_);
    if (num_open_++ == 0)
      for (const auto &[_, piece] : pieces_) protect(piece, true);
  }
  void close() {
    const std::lock_guard lock(mutex_);
    if (--num_open_ == 0)
      for (const auto &[_, piece] : pieces_) protect(piece, false);
  }
  std::vector<std::pair<char *, int64_t>> pieces() {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<char *, int64_t>> all;
    for (const auto &[_, piece] : pieces_)
      if (piece.pages) all.emplace_back(piece.pages, piece.num_bytes);
    return all;
  }

 private:
  static void protect(const Piece &piece, bool is_open) {
    if (piece.pages) mprotect(piece.pages, piece.num_bytes, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  std::mutex mutex_;
  std::map<const char *, Piece> pieces_;
  int num_open_ = 0;
};

// Never destroyed: Python frees tensors until the process is gone.
Device &device() {
  static Device &one = *new Device;
  return one;
}
thread_local bool is_alone_now = false;

std::atomic<bool> is_early_now{false};
struct Chain {  // of kernels of which each may begin before the one in front of it is through
  const void *stream = nullptr;
  std::unique_ptr<Before> before{};  // NULL: there is none
};
Chain &chain() {
  static Chain &one = *new Chain;
  return one;
}

}  // namespace

Before::Before() : pieces_(device().pieces()), then_(all()) {}
std::vector<char> Before::all() const {
  std::vector<char> bytes;
  for (const auto &[begin, size] : pieces_) bytes.insert(bytes.end(), begin, begin + size);
  return bytes;
}
void Before::put(const std::vector<char> &bytes) {
  const char *from = bytes.data();
  for (const auto &[begin, size] : pieces_) memcpy(begin, from, size), from += size;
}
void Before::show() { now_ = all(), put(then_); }
bool Before::hide() {
  const bool is_right = all() == then_;
  return put(now_), now_.clear(), is_right;
}
void begin_early(bool begins) { is_early_now = begins, forget_before(); }
void forget_before() { chain().before = nullptr; }
Before *before_kernel(const void *stream, bool is_early) {
  if (is_early && chain().before && chain().stream == stream) return chain().before.get();
  if (is_early_now) chain() = {stream, std::make_unique<Before>()};
  return nullptr;
}

void *allocate(int64_t num_bytes) { return device().allocate(num_bytes); }
bool release(void *begin) {
  if (!begin) return true;
  await_all();
  return device().release(begin);
}
bool map(const void *from, int64_t num_bytes) { return device().map((const char *)from, num_bytes); }
bool unmap(const void *from) { return device().unmap((const char *)from); }
bool holds(const void *p, int64_t num_bytes) { return device().holds_all((const char *)p, num_bytes); }
Opened::Opened() { device().open(); }
Opened::~Opened() { device().close(); }
Access::Access(bool is_alone) { is_alone_now = is_alone; }
Access::~Access() { is_alone_now = false; }
int device_now() { return own_device; }
void set_device(int device) { own_device = device; }
bool may_reach(const void *p) { return !is_alone_now || device().holds((const char *)p); }

}  // namespace pagedec::emulate
