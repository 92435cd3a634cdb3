// A device as kernels are launched on it: which one, its stream, and how many of its multiprocessors are used.
#pragma once
#include <atomic>
#include <vector>

#include "common/check.h"
#include "cuda/device.h"
#include "plan/plan.h"
#if !defined(__CUDACC__)
#include "cuda/emulate/memory.h"
#include "cuda/emulate/stream.h"
#endif

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

struct pd_context {
  int32_t device = 0, num_multiprocessors = 1;
  int64_t max_shared_bytes = 0;  // of a block
  void *stream = nullptr;
  // Host memory that the device copies from, a ring: what of it copies under way use, in bytes since the first of all.
  char *staging = nullptr;
  int64_t staged_begin = 0, staged_end = 0;
#if !defined(__CUDACC__)
  pagedec::emulate::Stream work;  // what `stream` leads to
  bool is_alone = false;  // records lead to the device's memory; before any was asked for, anywhere
#endif
  std::atomic<bool> busy{false};
  pagedec::Ranks *ranks = nullptr;
  std::vector<pd_recording *> recordings;  // that hold launches in this context
  pagedec::PlanDraft draft;
  pagedec::DeviceMemory partials, totals;  // of attention
  pagedec::DeviceMemory carried, answers;  // arrays of a call that pd_roll makes, and what it gives
  std::vector<char> packed;                // those arrays, one behind the other
};

// A copy to the host's memory, and when it is through.
struct pd_fetch {
  pd_context *context = nullptr;
  char *memory = nullptr;
  int64_t max_bytes = 0, num_bytes = -1;  // -1: none is under way
  int64_t staged_end = 0;                 // of the context when it began: all before is free when it is through
#if defined(__CUDACC__)
  cudaEvent_t through = nullptr;
#else
  uint64_t through = 0;
#endif
};

// A plan, and its words where kernels read them.
struct pd_device_plan : pd_plan {
  int32_t device = -1;  // whose memory it is
  pagedec::DeviceMemory resident;
};

namespace pagedec {

// The right to put kernels into a context, for as long as this object lives: one thread has it at a time. Its device is
// then this thread's. `records`: the thread will look at some.
class Turn {
 public:
#if defined(__CUDACC__)
  explicit Turn(pd_context &context, bool = false)
      : context_(context), taken_(!context.busy.exchange(true, std::memory_order_acquire)) {
    cudaSetDevice(context.device);
  }
#else
  explicit Turn(pd_context &context, bool records = false)
      : context_(context),
        taken_(!context.busy.exchange(true, std::memory_order_acquire)),
        access_(context.device, records && context.is_alone) {}
#endif
  ~Turn() {
    if (taken_) context_.busy.store(false, std::memory_order_release);
  }
  Turn(const Turn &) = delete;
  explicit operator bool() const { return taken_; }

 private:
  pd_context &context_;
  const bool taken_;
#if !defined(__CUDACC__)
  const emulate::Access access_;
#endif
};

// Checks a list of kernels, and puts it into the context's stream.
int carry_out(pd_context &, const pd_op *ops, int64_t num_ops);

void any_device();        // for a thread that frees memory: one that contexts are of
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

// Put one kernel of a checked record into the context's stream. 0, or fail(...).
int enqueue_gemm(pd_context &, const pd_gemm_args &);
int enqueue_embed(pd_context &, const pd_embed_args &);
int enqueue_rms_norm(pd_context &, const pd_rms_norm_args &);
int enqueue_layer_norm(pd_context &, const pd_layer_norm_args &);
int enqueue_rope_kv_write(pd_context &, const pd_rope_kv_write_args &);
int enqueue_kv_copy(pd_context &, const pd_kv_copy_args &);
int enqueue_attention(pd_context &, const pd_attention_args &);
int reserve_attention(pd_context &, const pd_attention_args &);  // the memory that it works in
int enqueue_soft_cap(pd_context &, const pd_soft_cap_args &);
int enqueue_restrict_logits(pd_context &, const pd_restrict_logits_args &);
int enqueue_copy_rows(pd_context &, const pd_copy_rows_args &);
int enqueue_pick_logits(pd_context &, const pd_pick_logits_args &);
int enqueue_argmax(pd_context &, const pd_argmax_args &);
int enqueue_process_logits(pd_context &, const pd_process_logits_args &);
int enqueue_topk_lse(pd_context &, const pd_topk_lse_args &);
int enqueue_sample(pd_context &, const pd_sample_args &);
int enqueue_best(pd_context &, const pd_best_args &);
int enqueue_verify(pd_context &, const pd_verify_args &);
int enqueue_add_parts(pd_context &, const pd_add_parts_args &);
int enqueue_join_parts(pd_context &, const pd_join_parts_args &);
int enqueue_all_gather(pd_context &, const pd_all_gather_args &);
int enqueue_gather(pd_context &, const pd_gather_args &);

// Blocks of a grid that goes through all rows, however many the device finds: enough to fill it, whatever the step.
constexpr int kBlocksAMultiprocessor = 8;
// Of attention, whose blocks hold much of the shared memory: a plan has as many workers.
constexpr int kBlocksAtATime = 2;

// The threads of a block, the blocks that a multiprocessor is to have at a time, and the bytes of shared memory that
// each has besides what the kernel declares.
struct Grid {
  Grid(int threads, int blocks = kBlocksAMultiprocessor, int64_t shared_bytes = 0)
      : threads(threads), blocks(blocks), shared_bytes(shared_bytes) {}
  int threads, blocks;
  int64_t shared_bytes;
};

#if defined(__CUDACC__)
// An error that is told is forgotten: else the next launch would find it and take it for its own.
inline int launched(const char *name, cudaError_t error) {
  if (error == cudaSuccess) return 0;
  cudaGetLastError();
  const char *more = error == cudaErrorInitializationError ? "; a fork cannot use the device that its parent uses" : "";
  return fail("%s: %s%s", name, cudaGetErrorString(error), more);
}
// One kernel, put into the context's stream.
template <class... P, class... A>
int launch(pd_context &c, const char *name, void (*kernel)(P...), Grid grid, A... arguments) {
  constexpr int64_t kDeclared = 48 << 10;  // what a kernel may have without being allowed more
  if (grid.shared_bytes > kDeclared &&
      launched(name, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)grid.shared_bytes)))
    return -1;
  kernel<<<c.num_multiprocessors * grid.blocks, grid.threads, grid.shared_bytes, (cudaStream_t)c.stream>>>(
      arguments...);
  return launched(name, cudaGetLastError());
}
inline int num_blocks(const pd_context &c, const Grid &grid) { return c.num_multiprocessors * grid.blocks; }
#else
inline int num_blocks(const pd_context &c, const Grid &) { return c.num_multiprocessors; }
template <class... P, class... A>
int launch(pd_context &c, const char *name, void (*kernel)(P...), Grid grid, A... arguments) {
  if (grid.shared_bytes > c.max_shared_bytes) return fail("%s: invalid argument", name);  // as cudaFuncSetAttribute
  const auto run = [=, blocks = num_blocks(c, grid)] {
    const std::string problem =
        emulate::run(blocks, grid.threads, grid.shared_bytes, [&] { kernel(arguments...); });
    return problem.empty() ? problem : std::string(name) + ": " + problem;
  };
  c.work.put(run);
  return 0;
}
#endif

}  // namespace pagedec
