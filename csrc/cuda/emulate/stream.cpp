#include "cuda/emulate/stream.h"

#include <chrono>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/emulate/memory.h"

namespace pagedec::emulate {
namespace {

constexpr std::chrono::milliseconds MOMENT{5};

// Never destroyed: Python frees contexts until the process is gone.
std::mutex &turn() {
  static std::mutex &one = *new std::mutex;
  return one;
}
std::set<Stream *> &streams() {
  static std::set<Stream *> &all = *new std::set<Stream *>;
  return all;
}

}  // namespace

Stream::Stream() {
  const std::lock_guard lock(turn());
  streams().insert(this);
}
Stream::~Stream() {
  if (carrier_.valid()) carrier_.wait();
  const std::lock_guard lock(turn());
  streams().erase(this);
}
void Stream::put(Work work) {
  if (list_) return list_->push_back(std::move(work));
  const std::lock_guard lock(turn());
  waiting_.push_back(std::move(work));
}
std::string Stream::await() {
  const std::lock_guard lock(turn());
  carry_out();
  return std::exchange(problem_, {});
}
bool Stream::is_through() {
  if (!carrier_.valid()) {
    const std::lock_guard lock(turn());
    if (waiting_.empty()) return true;
    carrier_ = std::async(std::launch::async, [this] {
      const std::lock_guard lock(turn());
      carry_out();
    });
  }
  if (carrier_.wait_for(MOMENT) != std::future_status::ready) return false;
  carrier_.get();
  return true;
}
void Stream::carry_out() {
  if (waiting_.empty()) return;
  const Opened opened;
  const std::vector<Work> all = std::exchange(waiting_, {});
  for (const Work &work : all)
    if (problem_.empty()) problem_ = work();
}
void await_all() {
  const std::lock_guard lock(turn());
  for (Stream *stream : streams()) stream->carry_out();
}

}  // namespace pagedec::emulate
