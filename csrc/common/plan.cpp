// Plans as a CPU has them.
#include <new>

#include "common/context.h"

using namespace pagedec;

extern "C" {
pd_plan *pd_plan_new(void) {
  pd_plan *p = new (std::nothrow) pd_plan;
  if (!p) fail("pd_plan_new: out of memory");
  return p;
}
void pd_plan_free(pd_plan *p) { delete p; }

int pd_attn_plan(pd_context *context, pd_plan *p, const pd_attn_shape *s, const pd_attn_batch *b) {
  if (!context) return fail("pd_attn_plan: context is NULL");
  if (!p) return fail("pd_attn_plan: plan is NULL");
  const Turn turn(*context);
  if (!turn) {
    p->words.clear();
    return fail("pd_attn_plan: another thread works in this context");
  }
  return make_plan(context->draft, p->words, s, b, {num_threads(*context), true});
}
}
