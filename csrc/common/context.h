// What a context owns on a CPU: how many threads it computes with, and the memory that its calls work in. Memory grows
// to what was needed most, and no call reads what another left there.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "common/internal.h"
#include "plan/plan.h"

namespace pagedec {

// 64-byte aligned, and touched first by who uses it.
class Workspace {
 public:
  bool reserve(int64_t bytes) {
    if (bytes <= size_) return true;
    data_.reset();  // first: what it held is read by nobody any more
    data_.reset((char *)std::aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64));
    size_ = data_ ? bytes : 0;
    return data_ != nullptr;
  }
  char *get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(char *p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

// Which tokens were met and how often, without clearing a vocabulary: an entry counts only if it bears the current
// stamp.
class Met {
 public:
  void begin(int64_t vocab) {
    if ((int64_t)entries_.size() < vocab) entries_.resize(vocab, Entry{0, 0});
    if (++stamp_) return;
    std::fill(entries_.begin(), entries_.end(), Entry{0, 0});  // after 2^32 - 1 rows
    stamp_ = 1;
  }
  int32_t count(int32_t token) {  // how often it was met, this time included
    Entry &e = entries_[token];
    if (e.stamp != stamp_) e = {stamp_, 0};
    return ++e.times;
  }
  int32_t take(int32_t token) {  // how often it was met; 0 from then on
    const int32_t times = entries_[token].times;
    entries_[token].times = 0;
    return times;
  }

 private:
  struct Entry {
    uint32_t stamp;
    int32_t times;
  };
  std::vector<Entry> entries_;
  uint32_t stamp_ = 0;
};

// A continuation that is ranked: the bits of its key and of its logit, so that what comes first is lower; then its row
// and its token.
struct BestEntry {
  uint64_t rank, where;
  bool operator<(const BestEntry &other) const {
    return rank != other.rank ? rank < other.rank : where < other.where;
  }
};
struct BestRun {  // entries first .. stop - 1 of a thread's list, which are of one group
  int32_t group;
  size_t first, stop;
};

// Of one thread, for kernels that go through logits.
struct alignas(64) ThreadScratch {
  std::vector<float> maxima, values, draft_maxima;
  std::vector<BestEntry> found, merged;
  std::vector<BestRun> runs;
  std::vector<uint64_t> keys, draft_keys;
  std::vector<int32_t> history, path, border;
  Met met;
};

}  // namespace pagedec

struct pd_context {
  explicit pd_context(int32_t threads) : num_threads(threads), vnni(pagedec::has_vnni()) {}

  const int32_t num_threads;  // 0: OpenMP's own choice
  bool vnni;                  // linear layers use the instruction that multiplies bytes
  std::atomic<bool> busy{false};
  // Of a program's kernels, one after the other. Two, so that a core finds its own lines where it left them: in one,
  // what a linear layer gives a thread would be what attention gave another.
  pagedec::Workspace linear, attention;
  std::vector<pagedec::ThreadScratch> scratch;  // by thread
  pagedec::PlanDraft draft;
};

namespace pagedec {

// The right to work in a context's memory, for as long as this object lives: one thread has it at a time.
class Turn {
 public:
  explicit Turn(pd_context &context)
      : context_(context), taken_(!context.busy.exchange(true, std::memory_order_acquire)) {}
  ~Turn() {
    if (taken_) context_.busy.store(false, std::memory_order_release);
  }
  Turn(const Turn &) = delete;
  explicit operator bool() const { return taken_; }

 private:
  pd_context &context_;
  const bool taken_;
};

}  // namespace pagedec
