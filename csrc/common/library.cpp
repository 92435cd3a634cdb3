#include <cstdarg>
#include <cstdio>

#include "common/internal.h"

namespace pagedec {
static thread_local char last_error[512];

int fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  return -1;
}

}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_abi_version(void) { return PD_ABI_VERSION; }
const char *pd_last_error(void) { return last_error; }
const char *pd_isa(void) { return PD_ISA; }
const char *pd_best_isa(void) { return best_isa(); }
}
