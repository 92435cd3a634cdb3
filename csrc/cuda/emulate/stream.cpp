#include "cuda/emulate/stream.h"

#include <mutex>
#include <set>
#include <utility>

#include "cuda/emulate/memory.h"

namespace pagedec::emulate {
namespace {

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
  const std::lock_guard lock(turn());
  streams().erase(this);
}
void Stream::put(Work work) {
  const std::lock_guard lock(turn());
  waiting_.push_back(std::move(work));
}
std::string Stream::await() {
  const std::lock_guard lock(turn());
  carry_out();
  return std::exchange(problem_, {});
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
