// Plans as a device has them: made by the host, with one worker for each block of attention's grid.
#include <new>

#include "cuda/attention_work.h"
#include "cuda/context.h"

using namespace pagedec;

extern "C" {
pd_plan *pd_plan_new(void) {
  pd_device_plan *p = new (std::nothrow) pd_device_plan;
  if (!p) fail("pd_plan_new: out of memory");
  return p;
}
void pd_plan_free(pd_plan *p) { delete (pd_device_plan *)p; }

int pd_attn_plan(pd_context *context, pd_plan *p, const pd_attn_shape *s, const pd_attn_batch *b) {
  if (!context) return fail("pd_attn_plan: context is NULL");
  if (!p) return fail("pd_attn_plan: plan is NULL");
  pd_device_plan &own = *(pd_device_plan *)p;
  DeviceMemory &resident = own.resident;
  if (own.device != context->device) resident.clear(), own.device = context->device;
  const Turn turn(*context);
  if (!turn) {
    p->words.clear();
    return fail("pd_attn_plan: another thread works in this context");
  }
  const int most_rows = s ? attention::most_rows(s->dtype, s->head_dim) : 0;
  const Workers workers{context->num_multiprocessors * kBlocksAtATime, false, most_rows};
  if (make_plan(context->draft, p->words, s, b, workers)) return -1;
  const int64_t bytes = (int64_t)p->words.size() * (int64_t)sizeof(int32_t);
  if (!resident.reserve(bytes) && !upload(*context, resident.get(), p->words.data(), bytes)) return 0;
  p->words.clear();
  return -1;
}
}
