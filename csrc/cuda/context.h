// What a context is, and what it does besides launches (launch.h).
#pragma once
#include <atomic>
#include <vector>

#include "cuda/launch.h"
#include "plan/plan.h"

namespace pagedec {

// Memory of a device, which grows to half more than was needed most; nothing that was there is kept.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory &) = delete;
  ~DeviceMemory();
  int reserve(int64_t bytes);  // 0, or fail(...)
  void clear();
  void *get() const { return data_; }
  int64_t num_grown() const { return num_grown_; }  // how often it has, wherever it lies now

 private:
  void *data_ = nullptr;
  int64_t size_ = 0, num_grown_ = 0;
};

}  // namespace pagedec

namespace pagedec {
struct Ranks;  // that a context has joined: nccl.cu
}

struct pd_context : pagedec::Target {
  // Host memory that the device copies from, a ring: what of it copies under way use, in bytes since the first of all.
  // It grows with what is under way at a time: a context that lives shortly would wait for the system to give it.
  char *staging = nullptr;
  int64_t staging_bytes = 0, staged_begin = 0, staged_end = 0;
  bool is_alone = false;  // an emulated device's records lead to its memory; before any was asked for, anywhere
  std::atomic<bool> busy{false};
  pagedec::Ranks *ranks = nullptr;
  std::vector<pd_recording *> recordings;  // that hold launches in this context
  // Numbers of four bytes as the host has last written them: a hint of how many rows a step has, since kernels and
  // other copies may have changed them. Of steps' counters there are few.
  struct Written {
    const void *place;
    int32_t number;
  } written[64] = {};
  unsigned num_written = 0;  // ever, so that the next one takes the room of the oldest
  bool is_for_few = false;  // what is being recorded: linear layers of few rows have one kernel
  pagedec::PlanDraft draft;
  pagedec::DeviceMemory partials, totals;  // of attention
  pagedec::DeviceMemory carried, answers;  // arrays of a call that pd_roll makes, and what it gives
  std::vector<char> packed;                // those arrays, one behind the other
};

// A copy to the host's memory, and when it is through.
struct pd_fetch {
  pd_context *context = nullptr;
  int32_t device = 0;  // the context's, which may end first
  char *memory = nullptr;
  int64_t max_bytes = 0, num_bytes = -1;  // -1: none is under way
  int64_t staged_end = 0;                 // of the context when it began: all before is free when it is through
  cudaEvent_t through = nullptr;
};

// A plan, and its words where kernels read them.
struct pd_device_plan : pd_plan {
  int32_t device = -1;  // whose memory it is
  pagedec::DeviceMemory resident;
};

namespace pagedec {

// Checks a list of kernels, and puts it into the context's stream.
int carry_out(pd_context &, const pd_op *ops, int64_t num_ops);

inline cudaStream_t stream_of(const pd_context &c) { return (cudaStream_t)c.stream; }
int32_t any_device();     // for a thread that frees memory: one that contexts are of
bool is_in_use(int device);  // whether this process has memory there, of whomever: going there makes a context
int await_devices();      // until all is through that is in any stream of this process
int before_checks(pd_context &);  // which, of an emulated device, look at what records lead to
int await(pd_context &);  // until all is through that is in its stream
int is_through(pd_context &);     // 1: all is, 0: not yet, -1: fail(...)
int is_through(pd_context &, pd_fetch &);  // the same of what came before its copy, and of that
int await_ranks(pd_context &, pd_fetch * = nullptr);  // until one is, as long as the ranks that it has joined may take
int check_ranks(pd_context &);    // that it has not left those that it has joined
int any_rank(pd_context &, bool &so);  // whether one of them says so
void leave_ranks(pd_context &);
void end_recordings(pd_context &);  // they are made anew when they are wanted again
int upload(pd_context &, void *to, const void *from, int64_t bytes);  // host to device, in the context's stream
int download(pd_context &, void *to, const void *from, int64_t bytes);  // and back, when all is through

}  // namespace pagedec
