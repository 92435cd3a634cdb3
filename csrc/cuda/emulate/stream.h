// Streams of the emulated device. What is put into one stays there until somebody waits for it: a device may be as late
// as that, so whoever frees, changes or reads something too early is found out. What other ranks wait for goes on by
// itself.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <vector>

namespace pagedec::emulate {

class Stream {
 public:
  using Work = std::function<std::string()>;  // empty, or what went wrong

  Stream();
  virtual ~Stream();
  Stream(const Stream &) = delete;
  virtual void put(Work);  // this and what else is virtual other libraries reach by the stream alone
  // What is put goes into this list instead, which is repeated later; NULL: no more.
  void record(std::vector<Work> *list) { list_ = list; }
  bool is_recorded() const { return list_; }
  // Carries out what has been put into it. Empty, or what went wrong since the last time; nothing follows that.
  std::string await();
  // The same of what had been put into it when `mark` was taken; also where another wait was told what went wrong.
  std::string await(uint64_t mark);
  uint64_t mark();
  // Whether all has been carried out, or what had been put into it when `mark` was taken: by a thread that is begun
  // when it has not, and is waited for a moment, so that whoever asks may give up.
  virtual bool is_through(uint64_t mark = UINT64_MAX);
  // From now on nobody need wait: what is put is carried out a moment later, at the latest.
  void go_on();
  int device = 0;

 private:
  friend void await_all(int);
  void carry_out(uint64_t mark);  // in one's turn
  bool next(uint64_t mark, Work &);
  uint64_t drop();  // all that waits; what has been done and dropped then
  std::mutex queue_;  // of the following, which no work under way holds
  bool ends_ = false, is_under_way_ = false;  // a work that does not wait any more
  std::deque<Work> waiting_;
  uint64_t num_done_ = 0, lost_from_ = 0, lost_to_ = 0;  // what was lost with the last problem
  std::vector<Work> *list_ = nullptr;
  std::string problem_, told_;
  std::future<void> carrier_;
  struct Goer;
  Goer *goer_ = nullptr;
};

// All streams, as a device does before it gives memory up, or those of one.
void await_all(int device = -1);

}  // namespace pagedec::emulate
