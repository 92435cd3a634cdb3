// The attention kernel's entry: checks, and the choice of a dtype.
#include "cpu/attention.h"

namespace pagedec {

int check_attention(const pd_attention_args &a) {
  if (!a.plan) return fail("pd_attention: plan is NULL");
  if (!a.plan->ready) return fail("pd_attention: plan holds nothing; pd_attn_plan must succeed first");
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

void attention_part(const pd_attention_args &a, int thread, int num_threads) {
  (a.plan->shape.dtype == PD_BF16 ? attention_bf16 : attention_fp32)(a, thread, num_threads);
}

size_t attention_state_bytes(const pd_attn_shape &s) { return (s.dtype == PD_BF16 ? bf16_state_bytes : fp32_state_bytes)(s.head_dim); }

}  // namespace pagedec
