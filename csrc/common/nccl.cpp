// NCCL is for CUDA devices: a processor says so.
#include "common/check.h"

namespace pagedec {
namespace {
int refuse(const char *name) { return fail("%s: NCCL is for CUDA devices; a processor has none", name); }
}  // namespace
int check_all_gather(const pd_all_gather_args &) { return refuse("pd_all_gather"); }
int check_gather(const pd_gather_args &) { return refuse("pd_gather"); }
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_nccl_open(const char *) { return refuse("pd_nccl_open"); }
int pd_nccl_id(void *) { return refuse("pd_nccl_id"); }
int pd_nccl_join(pd_context *context, const void *, int32_t, int32_t, double) {
  return context ? refuse("pd_nccl_join") : fail("pd_nccl_join: context is NULL");
}
int pd_nccl_alike(pd_context *context) {
  return context ? refuse("pd_nccl_alike") : fail("pd_nccl_alike: context is NULL");
}
int32_t pd_nccl_world(const pd_context *context) { return context ? 0 : fail("pd_nccl_world: context is NULL"); }
}
