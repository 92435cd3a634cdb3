#include "common/check.h"
#include "plan/plan.h"

namespace pagedec {

int check_attention(const pd_attention_args &a) {
  if (!a.plan) return fail("pd_attention: plan is NULL");
  if (a.plan->words.empty()) return fail("pd_attention: plan holds nothing; pd_attn_plan must succeed first");
  if (!a.num_rows) return fail("pd_attention: num_rows is NULL");
  const int planned = a.plan->header().num_rows;
  if (kReadsRecords && *a.num_rows != planned)
    return fail("pd_attention: num_rows is %d; the plan is for %d", *a.num_rows, planned);
  if (!planned) return 0;
  if (!a.q) return fail("pd_attention: q is NULL");
  if (!a.k_cache) return fail("pd_attention: k_cache is NULL");
  if (!a.v_cache) return fail("pd_attention: v_cache is NULL");
  if (!a.out) return fail("pd_attention: out is NULL");
  return 0;
}

}  // namespace pagedec
