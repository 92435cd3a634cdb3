// Attention's entry: what a launch needs besides the plan.
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/attention_work.h"
#include "cuda/context.h"

namespace pagedec {
namespace attention {
namespace {

// A chunk as it is folded: what the result so far and its own are multiplied by; l of 0: it has nothing.
struct alignas(16) Step {
  float x, y, l, none;
};

// What several spans have of a row, put together: a warp has 32 columns of a row and head. A warp of chunks at a time
// is loaded at once, and a lane has a chunk's m and l: a row behind 131,072 tokens has 256 of them, and only sums wait
// for those of the chunk before. Whether there is a larger m before does not depend on how it is found.
template <class E>
PD_KERNEL(kThreads) merge_kernel(Work w) {
  SHARED_ARRAY(Step, steps, kThreads);
  let_next_begin();
  const Sections p{*(const plan::Header *)w.words, w.words};
  const plan::Header &h = p.header;
  const int lane = thread_index() % kWarp, own = thread_index() / kWarp * kWarp, dim = h.head_dim;
  const int parts = (dim + kWarp - 1) / kWarp;
  const int merges = h.splits.count * h.q_heads * parts;  // fewer than the numbers of their records
  const int stride = h.q_heads * (dim + 2);
  for (int i = block_index() * kWarps + own / kWarp; i < merges; i += num_grid_blocks() * kWarps) {
    const int of = i / parts;
    const plan::Row &row = p.of<plan::Row>(h.rows)[p.of<int32_t>(h.splits)[of / h.q_heads]];
    const int head = of % h.q_heads, d = i % parts * kWarp + lane, row_id = row.row_id;
    await_kernels();
    const float *from = w.partials + ((int64_t)row.split * h.q_heads + head) * (dim + 2);
    float x = d < dim ? from[d] : 0.0f, m = from[dim], l = from[dim + 1];
    for (int left = (row.end - 1) / CHUNK - row.merge_chunk; left > 0; left -= kWarp) {
      from += stride;
      float chunks[kWarp];
      const float *column = from + (d < dim ? d : 0);
      PD_UNROLL for (int c = 0; c < kWarp; c++, column += stride) chunks[c] = c < left ? *column : 0.0f;
      const bool is_there = lane < left;
      const float of_m = is_there ? from[lane * stride + dim] : 0.0f;
      const float of_l = is_there ? from[lane * stride + dim + 1] : 0.0f;
      float top = of_l == 0.0f ? -INFINITY : of_m;
      for (int apart = 1; apart < kWarp; apart *= 2) {
        const float other = shuffle(top, (lane - apart) & (kWarp - 1));
        if (lane >= apart) top = other > top ? other : top;
      }
      top = m > top ? m : top;
      const float above = shuffle(top, (lane - 1) & (kWarp - 1));
      const Fold fold(lane == 0 ? m : above, of_m);
      steps[own + lane] = Step{fold.x, fold.y, of_l, 0.0f};
      m = shuffle(top, kWarp - 1);
      sync_warp();
      PD_UNROLL for (int c = 0; c < kWarp; c++) {
        if (c % 8 == 0 && c >= left) break;
        const Step by = steps[own + c];
        if (by.l != 0.0f) x = x * by.x + chunks[c] * by.y, l = l * by.x + by.l * by.y;
      }
      sync_warp();
      from += (kWarp - 1) * stride;
    }
    x = x * weight_of(w, head, m, l);
    if (d < dim) ((E *)w.out)[((int64_t)row_id * h.q_heads + head) * dim + d] = from_float<E>(x);
  }
  await_kernels();  // who has none, too
}

int put_walk(pd_context &c, const Work &w, const plan::Header &h) {
  const bool is_bf16 = h.dtype == PD_BF16;
  if (h.dtype == PD_F32) return enqueue_fp32(c, w, h.head_dim, h.kv_kind);
  if (h.kv_kind == PD_KV_PLAIN) return (is_bf16 ? enqueue_bf16 : enqueue_fp16)(c, w, h.head_dim);
  return (is_bf16 ? enqueue_bf16_of_bytes : enqueue_fp16_of_bytes)(c, w, h.head_dim, h.kv_kind);
}

int64_t totals_bytes(const pd_context &c, const plan::Header &h) {
  const int64_t pieces = columns_of(h.dtype, h.head_dim) / 8 + 1;  // and one of m and l
  return (int64_t)num_blocks(c, Grid(kThreads, kBlocksAtATime)) * pieces * 4 * kThreads * (int64_t)sizeof(float);
}

// What is copied 16 bytes at a time: a kernel's fault would take the device from the whole process.
int check_alignment(const pd_attention_args &a, int dtype) {
  if (dtype == PD_F32) return 0;
  const std::pair<const char *, const void *> copied[] = {{"q", a.q}, {"k_cache", a.k_cache}, {"v_cache", a.v_cache}};
  for (const auto &[name, from] : copied)
    if ((uintptr_t)from % 16) return fail("pd_attention: %s is at %p; it must be 16-byte aligned", name, from);
  return 0;
}

}  // namespace
}  // namespace attention

int reserve_attention(pd_context &c, const pd_attention_args &a) {
  const int32_t device = ((const pd_device_plan *)a.plan)->device;
  if (device != c.device)
    return fail("pd_attention: plan was made for device %d; this context is of device %d", device, c.device);
  const plan::Header &h = a.plan->header();
  if (h.num_rows && attention::check_alignment(a, h.dtype)) return -1;
  const int64_t partial_bytes = (int64_t)h.num_split_partials * h.q_heads * (h.head_dim + 2) * (int64_t)sizeof(float);
  return c.partials.reserve(partial_bytes) || c.totals.reserve(attention::totals_bytes(c, h)) ? -1 : 0;
}

// What is launched, and with what, follows from the layer's shape and from where memory is, never from the step's rows:
// so it can be recorded. Blocks that find no rows end.
int enqueue_attention(pd_context &c, const pd_attention_args &a) {
  using namespace attention;
  const plan::Header &h = a.plan->header();
  float scale, soft_cap;
  memcpy(&scale, &h.scale_bits, 4), memcpy(&soft_cap, &h.soft_cap_bits, 4);
  Work w{(const int32_t *)((pd_device_plan *)a.plan)->resident.get(),
         a.q,
         a.k_cache,
         a.v_cache,
         a.out,
         a.sinks,
         (float *)c.partials.get(),
         (float *)c.totals.get(),
         scale * kLog2E,
         0.0f,
         0.0f,
         h.kv_heads,
         h.head_dim,
         std::countr_zero((uint32_t)h.block_size),
         0,
         0};
  if (soft_cap > 0) w.scale = 1.0f, w.soft_cap = soft_cap * kLog2E, w.inner_scale = scale / soft_cap;
  if (put_walk(c, w, h)) return -1;
  const auto merge = of_dtype(h.dtype, [](auto e) { return merge_kernel<decltype(e)>; });
  return launch_early(c, "pd_attention", merge, kThreads, w);
}

}  // namespace pagedec
#if !defined(__CUDACC__)
// For tests: how much shared memory a block has at most, as a device of another kind has it.
extern "C" PD_EXPORT void pd_emulate_shared_bytes(pd_context *context, int64_t bytes) {
  context->max_shared_bytes = bytes;
}
#endif
