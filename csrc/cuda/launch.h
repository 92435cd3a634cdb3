// How kernels are launched in a context: what a file of kernels needs of it. What a context is (context.h) takes nvcc
// longer than most kernels do.
#pragma once
#include "common/check.h"
#include "cuda/device.h"
#if !defined(__CUDACC__)
#include "cuda/emulate/memory.h"
#include "cuda/emulate/runtime.h"
#endif

namespace pagedec {

// A device as kernels are launched on it: which one, its stream, and how many of its multiprocessors are used.
struct Target {
  int32_t device = 0, num_multiprocessors = 1;
  int64_t max_shared_bytes = 0;  // of a block
  int32_t capability = 0;        // 10 times the major one and the minor one
  int32_t driver = 0;            // the version of CUDA that it is for: 12030 is 12.3
  void *stream = nullptr;
};
const Target &target(const pd_context &);

// This thread's device, for as long as this object lives. It is then again the one that it was, which whoever calls us
// may count on.
class OnDevice {
 public:
  explicit OnDevice(int32_t device);
  ~OnDevice();
  OnDevice(const OnDevice &) = delete;

 private:
  int before_ = -1;  // there is nothing to go back to
};

// The right to put kernels into a context, for as long as this object lives: one thread has it at a time. Its device is
// then this thread's. `records`: the thread will look at some.
class Turn {
 public:
  explicit Turn(pd_context &, bool records = false);
  ~Turn();
  Turn(const Turn &) = delete;
  explicit operator bool() const { return taken_; }

 private:
  pd_context &context_;
  const bool taken_;
  const OnDevice on_;
#if !defined(__CUDACC__)
  const emulate::Access access_;
#endif
};

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
int enqueue_spread_logits(pd_context &, const pd_spread_logits_args &);
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
int enqueue_route(pd_context &, const pd_route_args &);
int enqueue_experts(pd_context &, const pd_experts_args &);
int enqueue_combine(pd_context &, const pd_combine_args &);
int enqueue_lora(pd_context &, const pd_lora_args &);

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

// Whether what is being recorded is for few rows, as far as the host knows (recording.cu).
bool is_for_few(const pd_context &);
// Of kernels that go through rows: where there are few, what most blocks would do is to begin.
inline Grid grid_of_rows(const pd_context &c, int threads) {
  return {threads, is_for_few(c) ? 1 : kBlocksAMultiprocessor};
}

// What is to be said of an error besides.
const char *advice_on(cudaError_t);
// An error that is told is forgotten: else the next launch would find it and take it for its own.
inline int launched(const char *name, cudaError_t error) {
  if (error == cudaSuccess) return 0;
  cudaGetLastError();
  return fail("%s: %s%s", name, cudaGetErrorString(error), advice_on(error));
}
// And of a call whose failure changes nothing for who makes it.
inline void ignore(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
}
#if defined(__CUDACC__)
template <class... P, class... A>
int launch(pd_context &c, const char *name, bool is_early, void (*kernel)(P...), Grid grid, A... arguments) {
  constexpr int64_t kDeclared = 48 << 10;  // what a kernel may have without being allowed more
  if (grid.shared_bytes > kDeclared &&
      launched(name, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)grid.shared_bytes)))
    return -1;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  const Target &on = target(c);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(on.num_multiprocessors * grid.blocks), config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes, config.stream = (cudaStream_t)on.stream;
  config.attrs = &early, config.numAttrs = is_early ? 1 : 0;
  return launched(name, cudaLaunchKernelEx(&config, kernel, (P)arguments...));
}
// One kernel, put into the context's stream.
template <class... P, class... A>
int launch(pd_context &c, const char *name, void (*kernel)(P...), Grid grid, A... arguments) {
  return launch(c, name, false, kernel, grid, arguments...);
}
// One that may begin before those in front of it are through, until it waits for them (device.h): where its code has
// the instruction, which depends on what it was compiled from, not on the device, and the driver can record such.
template <class... P, class... A>
int launch_early(pd_context &c, const char *name, void (*kernel)(P...), Grid grid, A... arguments) {
  cudaFuncAttributes compiled;
  if (launched(name, cudaFuncGetAttributes(&compiled, (const void *)kernel))) return -1;
  constexpr int kRecordsEarly = 12030;
  return launch(c, name, compiled.ptxVersion >= 90 && target(c).driver >= kRecordsEarly, kernel, grid, arguments...);
}
inline int num_blocks(const pd_context &c, const Grid &grid) { return target(c).num_multiprocessors * grid.blocks; }
#else
inline int num_blocks(const pd_context &c, const Grid &) { return target(c).num_multiprocessors; }
template <class... P, class... A>
int launch(pd_context &c, const char *name, bool is_early, void (*kernel)(P...), Grid grid, A... arguments) {
  const Target &on = target(c);
  if (grid.shared_bytes > on.max_shared_bytes) return launched(name, cudaErrorInvalidValue);
  if (emulate::device_now() != on.device) return launched(name, cudaErrorInvalidResourceHandle);
  emulate::put((cudaStream_t)on.stream, [=, blocks = num_blocks(c, grid)] {
    const auto body = [&] {
      kernel(arguments...);
      if (is_early) emulate::check_awaited();
    };
    emulate::Before *before = emulate::before_kernel(on.stream, is_early);
    const std::string problem = emulate::run(blocks, grid.threads, grid.shared_bytes, body, before);
    return problem.empty() ? problem : std::string(name) + ": " + problem;
  });
  return launched(name, cudaGetLastError());
}
template <class... P, class... A>
int launch(pd_context &c, const char *name, void (*kernel)(P...), Grid grid, A... arguments) {
  return launch(c, name, false, kernel, grid, arguments...);
}
template <class... P, class... A>
int launch_early(pd_context &c, const char *name, void (*kernel)(P...), Grid grid, A... arguments) {
  return launch(c, name, true, kernel, grid, arguments...);
}
#endif

}  // namespace pagedec
