#include "common/check.h"
#include "plan/plan.h"

namespace pagedec {

int check_attention(const pd_attention_args &a) {
  if (!a.plan) return fail("pd_attention: plan is NULL");
  if (a.plan->words.empty()) return fail("pd_attention: plan holds nothing; pd_attn_plan must succeed first");
  if (check_pointer("pd_attention", "num_rows", a.num_rows)) return -1;
  const int planned = a.plan->header().num_rows;
  if (kReadsRecords && *a.num_rows != planned)
    return fail("pd_attention: num_rows is %d; the plan is for %d", *a.num_rows, planned);
  if (!planned) return 0;
  if (check_pointer("pd_attention", "q", a.q)) return -1;
  if (check_pointer("pd_attention", "k_cache", a.k_cache)) return -1;
  if (check_pointer("pd_attention", "v_cache", a.v_cache)) return -1;
  if (check_pointer("pd_attention", "out", a.out)) return -1;
  return 0;
}

}  // namespace pagedec
