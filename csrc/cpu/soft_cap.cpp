// cap * tanh(x / cap): logits of models that bound them.
#include <cmath>

#include "common/check.h"
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

// Below 2 ulp. Small arguments by a polynomial (Cephes tanhf), the others as 1 - 2 / (e^2x + 1); NaN stays NaN.
PD_INLINE F16 tanh16(F16 x) {
  const F16 one = set16(1.0f), two = set16(2.0f), zero = set16(0.0f), minus = zero - x;
  const F16 magnitude = select(less(x, zero), minus, x), z = x * x;
  F16 small = set16(-5.70498872745e-3f);
  small = small * z + set16(2.06390887954e-2f);
  small = small * z + set16(-5.37397155531e-2f);
  small = small * z + set16(1.33314422036e-1f);
  small = small * z + set16(-3.33332819422e-1f);
  small = (small * z) * x + x;
  const F16 large = one - two / (exp_small(magnitude + magnitude) + one);
  return select(less(magnitude, set16(0.625f)), small, select(less(x, zero), zero - large, large));
}

// Threads share columns as well as rows: a decode step may have one row of a large vocabulary.
constexpr int64_t kColumns = 1024;

}  // namespace

void soft_cap_part(const pd_soft_cap_args &a, int thread, int num_threads) {
  const int64_t pieces = (a.n + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  const F16 cap = set16(a.cap);
  for (int64_t u = units.begin; u < units.end; u++) {
    float *row = a.x + u / pieces * a.n;
    const int64_t begin = u % pieces * kColumns, end = begin + kColumns < a.n ? begin + kColumns : a.n;
    for (int64_t i = begin; i < end; i += 16)
      store_some(row + i, cap * tanh16(load_some(row + i, end - i) / cap), end - i);
  }
}

}  // namespace pagedec
