#include "cuda/emulate/stream.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
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

// A fork has the object, but not the thread, and leaves both.
struct Stream::Goer {
  const pid_t process = getpid();
  std::condition_variable news;
  std::thread thread;
};

Stream::Stream() {
  const std::lock_guard lock(turn());
  streams().insert(this);
}
Stream::~Stream() {
  if (carrier_.valid()) carrier_.wait();
  if (goer_ && goer_->process == getpid()) {
    {
      const std::lock_guard lock(queue_);
      ends_ = true;
    }
    goer_->news.notify_all();
    goer_->thread.join();
    delete goer_;
  }
  const std::lock_guard lock(turn());
  streams().erase(this);
}
void Stream::put(Work work) {
  if (list_) return list_->push_back(std::move(work));
  {
    const std::lock_guard lock(queue_);
    waiting_.push_back(std::move(work));
  }
  if (goer_) goer_->news.notify_all();
}
std::string Stream::await() { return await(UINT64_MAX); }
std::string Stream::await(uint64_t mark) {
  const std::lock_guard lock(turn());
  carry_out(mark);
  const std::lock_guard own(queue_);
  if (!problem_.empty()) return told_ = std::exchange(problem_, {});
  return mark > lost_from_ && mark <= lost_to_ ? told_ : std::string();
}
bool Stream::is_through(uint64_t mark) {
  if (!carrier_.valid()) {
    {
      const std::lock_guard lock(queue_);
      if (!is_under_way_ && (waiting_.empty() || num_done_ >= mark)) return true;
    }
    carrier_ = std::async(std::launch::async, [this, mark] {
      const std::lock_guard lock(turn());
      carry_out(mark);
    });
  }
  if (carrier_.wait_for(MOMENT) != std::future_status::ready) return false;
  carrier_.get();
  return true;
}
uint64_t Stream::mark() {
  const std::lock_guard lock(queue_);
  return num_done_ + is_under_way_ + waiting_.size();
}
void Stream::go_on() {
  goer_ = new Goer;
  goer_->thread = std::thread([this, &news = goer_->news] {
    for (std::unique_lock own(queue_); !ends_;) {
      if (waiting_.empty()) {
        news.wait(own);
        continue;
      }
      news.wait_for(own, MOMENT, [this] { return ends_; });
      own.unlock();
      {
        const std::lock_guard lock(turn());
        carry_out(UINT64_MAX);
      }
      own.lock();
    }
  });
}
void Stream::carry_out(uint64_t mark) {
  {
    const std::lock_guard lock(queue_);
    if (!problem_.empty()) lost_to_ = drop();  // of before, which nobody was told yet
    if (waiting_.empty() || num_done_ >= mark) return;
  }
  const Opened opened;
  for (Work work; next(mark, work); work = nullptr) {
    std::string problem = work();
    const std::lock_guard lock(queue_);
    is_under_way_ = false, num_done_++;
    if (problem.empty()) continue;
    problem_ = std::move(problem), lost_from_ = num_done_ - 1, lost_to_ = drop();
  }
  const std::lock_guard lock(queue_);
  if (waiting_.empty()) forget_before();  // what comes now comes from a host that may know that all is through
}
bool Stream::next(uint64_t mark, Work &work) {
  const std::lock_guard lock(queue_);
  is_under_way_ = !waiting_.empty() && num_done_ < mark;
  if (!is_under_way_) return false;
  work = std::move(waiting_.front());
  waiting_.pop_front();
  return true;
}
uint64_t Stream::drop() {
  num_done_ += waiting_.size();
  waiting_.clear();
  return num_done_;
}
void await_all(int device) {
  const std::lock_guard lock(turn());
  for (Stream *stream : streams())
    if (device < 0 || stream->device == device) stream->carry_out(UINT64_MAX);
}

}  // namespace pagedec::emulate
