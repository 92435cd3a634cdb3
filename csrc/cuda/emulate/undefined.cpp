// What the compiler's checks call where a kernel does what C++ leaves undefined, and a GPU does otherwise than this
// processor: a value that does not lie at a multiple of its size is read here and ends a kernel there, and shifts by 32
// and more, integers that overflow and floats that are no integer's give other bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/emulate/machine.h"

namespace {

struct Site {  // how each call's first argument begins
  const char *file;
  uint32_t line, column;
};
[[noreturn]] void tell(const void *data, const char *what) {
  const Site &site = *(const Site *)data;
  const char *slash = strrchr(site.file, '/'), *file = slash ? slash + 1 : site.file;
  if (pagedec::emulate::is_running()) pagedec::emulate::fault("%s, at %s:%u", what, file, site.line);
  fprintf(stderr, "pagedec: %s, at %s:%u\n", what, file, site.line);
  abort();
}

}  // namespace

#define PD_UNDEFINED(name, what) \
  void __ubsan_handle_##name(const void *data) { tell(data, what); }

extern "C" {
PD_UNDEFINED(type_mismatch_v1, "a value that is not aligned")
PD_UNDEFINED(out_of_bounds, "an index outside an array")
PD_UNDEFINED(shift_out_of_bounds, "a shift that is too far")
PD_UNDEFINED(add_overflow, "a sum that overflows")
PD_UNDEFINED(sub_overflow, "a difference that overflows")
PD_UNDEFINED(mul_overflow, "a product that overflows")
PD_UNDEFINED(negate_overflow, "a negation that overflows")
PD_UNDEFINED(divrem_overflow, "a quotient that overflows")
PD_UNDEFINED(float_cast_overflow, "a float that no integer is")
}
