// The attention kernel's entry: checks, and the choice of a dtype.
#include "cpu/attention.h"

#include "common/context.h"

namespace pagedec {

int check_attention(const pd_attention_args &a) {
  if (!a.plan) return fail("pd_attention: plan is NULL");
  if (a.plan->words.empty()) return fail("pd_attention: plan holds nothing; pd_attn_plan must succeed first");
  if (!a.num_rows) return fail("pd_attention: num_rows is NULL");
  const int planned = a.plan->header().num_rows;
  if (*a.num_rows != planned) return fail("pd_attention: num_rows is %d; the plan is for %d", *a.num_rows, planned);
  if (!planned) return 0;
  if (!a.q) return fail("pd_attention: q is NULL");
  if (!a.k_cache) return fail("pd_attention: k_cache is NULL");
  if (!a.v_cache) return fail("pd_attention: v_cache is NULL");
  if (!a.out) return fail("pd_attention: out is NULL");
  return 0;
}

int64_t attention_workspace_bytes(const pd_attention_args &a, int num_threads) {
  const plan::Header &h = a.plan->header();
  const size_t state = (h.dtype == PD_BF16 ? bf16_state_bytes : fp32_state_bytes)(h.head_dim);
  return (int64_t)(state * num_threads + (size_t)h.num_split_partials * h.q_heads * (h.head_dim + 2) * sizeof(float));
}

void attention_part(const pd_context &c, const pd_attention_args &a, int thread, int num_threads) {
  (a.plan->header().dtype == PD_BF16 ? attention_bf16 : attention_fp32)(a, c.attention.get(), thread, num_threads);
}

}  // namespace pagedec
