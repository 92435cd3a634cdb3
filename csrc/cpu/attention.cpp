// The attention kernel's entry: the choice of a dtype.
#include "cpu/attention.h"

#include "common/context.h"

namespace pagedec {

int64_t attention_workspace_bytes(const pd_attention_args &a, int num_threads) {
  const plan::Header &h = a.plan->header();
  const size_t state = (h.dtype == PD_BF16 ? bf16_state_bytes : fp32_state_bytes)(h.head_dim);
  return (int64_t)(state * num_threads + (size_t)h.num_split_partials * h.q_heads * (h.head_dim + 2) * sizeof(float));
}

void attention_part(const pd_context &c, const pd_attention_args &a, int thread, int num_threads) {
  (a.plan->header().dtype == PD_BF16 ? attention_bf16 : attention_fp32)(a, c.attention.get(), thread, num_threads);
}

}  // namespace pagedec
