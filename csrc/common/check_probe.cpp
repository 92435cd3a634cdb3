#include "common/check.h"

namespace pagedec {

int check_probe_read(const pd_context *context, const void *data, int64_t bytes, int32_t repeats) {
  if (!context) return fail("pd_probe_read: context is NULL");
  if (!data) return fail("pd_probe_read: data is NULL");
  if (bytes < 1) return fail("pd_probe_read: bytes is %lld; it must be 1 or more", (long long)bytes);
  if (repeats < 1) return fail("pd_probe_read: repeats is %d; it must be 1 or more", repeats);
  return 0;
}

int check_probe_dot(const pd_context *context, int32_t dtype, double seconds) {
  if (!context) return fail("pd_probe_dot: context is NULL");
  if (check_dtype("pd_probe_dot", dtype)) return -1;
  if (seconds > 0 && seconds <= 60) return 0;
  return fail("pd_probe_dot: seconds is %g; it must be above 0 and at most 60", seconds);
}

}  // namespace pagedec
