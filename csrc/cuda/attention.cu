// Attention's entry: what a launch needs besides the plan.
#include <bit>
#include <cstring>

#include "cuda/attention_work.h"
#include "cuda/context.h"

namespace pagedec {
namespace attention {
namespace {

// What several spans have of a row, put together: a warp a row and head.
template <class E>
PD_KERNEL(kThreads) merge_kernel(Work w) {
  const Sections p{*(const plan::Header *)w.words, w.words};
  const plan::Header &h = p.header;
  const int lane = thread_index() % kWarp;
  const int64_t merges = (int64_t)h.splits.count * h.q_heads, step = (int64_t)num_grid_blocks() * kWarps;
  for (int64_t i = (int64_t)block_index() * kWarps + thread_index() / kWarp; i < merges; i += step) {
    const plan::Row &row = p.of<plan::Row>(h.rows)[p.of<int32_t>(h.splits)[i / h.q_heads]];
    const int last = (row.end - 1) / CHUNK, head = (int)(i % h.q_heads), dim = h.head_dim;
    const auto record = [&](int chunk) {
      return w.partials + ((int64_t)(row.split + chunk - row.merge_chunk) * h.q_heads + head) * (dim + 2);
    };
    for (int d = lane; d < dim; d += kWarp) {
      const float *from = record(row.merge_chunk);
      float x = from[d], m = from[dim], l = from[dim + 1];
      for (int chunk = row.merge_chunk + 1; chunk <= last; chunk++) {
        from = record(chunk);
        if (from[dim + 1] == 0.0f) continue;
        const Fold fold(m, from[dim]);
        x = fold.of(x, from[d]), l = fold.of(l, from[dim + 1]), m = fold.top;
      }
      ((E *)w.out)[((int64_t)row.row_id * h.q_heads + head) * dim + d] = from_float<E>(x * weight_of(l));
    }
  }
}

int put_walk(pd_context &c, const Work &w, const plan::Header &h) {
  const bool is_bf16 = h.dtype == PD_BF16;
  if (h.dtype == PD_F32) return enqueue_fp32(c, w, h.head_dim, h.kv_kind);
  if (h.kv_kind == PD_KV_PLAIN) return (is_bf16 ? enqueue_bf16 : enqueue_fp16)(c, w, h.head_dim);
  return (is_bf16 ? enqueue_bf16_of_bytes : enqueue_fp16_of_bytes)(c, w, h.head_dim, h.kv_kind);
}

int64_t totals_bytes(const pd_context &c, const plan::Header &h) {
  const int64_t pieces = columns_of(h.dtype, h.head_dim) / (8 * kWarps) + 1;  // and one of m and l
  return (int64_t)num_blocks(c, Grid(kThreads, kBlocksAtATime)) * kRowTiles * pieces * 4 * kThreads *
         (int64_t)sizeof(float);
}

}  // namespace
}  // namespace attention

int reserve_attention(pd_context &c, const pd_attention_args &a) {
  const int32_t device = ((const pd_device_plan *)a.plan)->device;
  if (device != c.device)
    return fail("pd_attention: plan was made for device %d; this context is of device %d", device, c.device);
  const plan::Header &h = a.plan->header();
  const int64_t partial_bytes = (int64_t)h.num_split_partials * h.q_heads * (h.head_dim + 2) * (int64_t)sizeof(float);
  return c.partials.reserve(partial_bytes) || c.totals.reserve(attention::totals_bytes(c, h)) ? -1 : 0;
}

// What is launched, and with what, follows from the layer's shape and from where memory is, never from the step's rows:
// so it can be recorded. Blocks that find no rows end.
int enqueue_attention(pd_context &c, const pd_attention_args &a) {
  using namespace attention;
  constexpr float LOG2E = 1.44269504f;
  const plan::Header &h = a.plan->header();
  float scale, soft_cap;
  memcpy(&scale, &h.scale_bits, 4), memcpy(&soft_cap, &h.soft_cap_bits, 4);
  Work w{(const int32_t *)((pd_device_plan *)a.plan)->resident.get(),
         a.q,
         a.k_cache,
         a.v_cache,
         a.out,
         (float *)c.partials.get(),
         (float *)c.totals.get(),
         scale * LOG2E,
         0.0f,
         0.0f,
         h.kv_heads,
         h.head_dim,
         std::countr_zero((uint32_t)h.block_size),
         0};
  if (soft_cap > 0) w.scale = 1.0f, w.soft_cap = soft_cap * LOG2E, w.inner_scale = scale / soft_cap;
  if (put_walk(c, w, h)) return -1;
  const auto merge = of_dtype(h.dtype, [](auto e) { return merge_kernel<decltype(e)>; });
  return launch(c, "pd_attention", merge, kThreads, w);
}

}  // namespace pagedec
