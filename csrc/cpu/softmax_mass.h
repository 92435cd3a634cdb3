// Sums of exp over a row. One order, whatever the threads: 16 lanes over a chunk of 1,024 logits, a tree over the
// lanes, chunks in ascending order in double.
#pragma once
#include <limits>

#include "cpu/row_max.h"

namespace pagedec {
namespace {

constexpr int64_t kMassChunk = 1024;  // 4 KB: its second reading comes from L1
constexpr float kLargest = std::numeric_limits<float>::max();

// A logit's distance from the row's largest, over the temperature. NaN counts as -inf, +inf as the largest float.
template <class F>
PD_INLINE F distance(F x, F top, F inverse_temperature) {
  using C = Ints<F>;
  const F finite = smaller(C::real(kLargest), larger(x, C::real(kMinusInf)));
  return (finite - top) * inverse_temperature;
}
PD_INLINE float mass_of_chunk(const float *x, int64_t n, float top, float inverse_temperature) {
  F16 sum = set16(0.0f);
  for (int64_t i = 0; i < n; i += 16)
    sum = sum + exp_small(distance(load_some(x + i, n - i, kMinusInf), set16(top), set16(inverse_temperature)));
  return sum_lanes(sum);
}

}  // namespace
}  // namespace pagedec
