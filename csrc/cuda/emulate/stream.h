// Streams of the emulated device. What is put into one stays there until somebody waits for it: a device may be as late
// as that, so whoever frees, changes or reads something too early is found out.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace pagedec::emulate {

class Stream {
 public:
  using Work = std::function<std::string()>;  // empty, or what went wrong

  Stream();
  ~Stream();
  Stream(const Stream &) = delete;
  void put(Work);
  // Carries out what has been put into it. Empty, or what went wrong since the last time; nothing follows that.
  std::string await();

 private:
  friend void await_all();
  void carry_out();
  std::vector<Work> waiting_;
  std::string problem_;
};

// All streams, as a device does before it gives memory up.
void await_all();

}  // namespace pagedec::emulate
