// Sums of exp over a row. One order, whatever the threads: 16 lanes over a chunk of 1,024 logits, a tree over the
// lanes, chunks in ascending order in double.
#pragma once
#include <cmath>
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

// Fills the group maxima and returns log(sum(exp)).
inline float maxima_and_lse(const float *x, int64_t vocab, float *group_maxima) {
  float top = kMinusInf;
  double sum = 0.0;
  for (int64_t begin = 0; begin < vocab; begin += kMassChunk) {
    const int64_t n = vocab - begin < kMassChunk ? vocab - begin : kMassChunk;
    float chunk_top = kMinusInf;
    for (int64_t g = begin / kGroup; g * kGroup < begin + n; g++) {
      group_maxima[g] = group_max(x, vocab, g);
      chunk_top = larger(group_maxima[g], chunk_top);
    }
    if (chunk_top == kMinusInf) continue;  // adds nothing
    if (chunk_top > top) {
      sum = sum == 0.0 ? 0.0 : sum * std::exp((double)top - (double)chunk_top);
      top = chunk_top;
    }
    if (top <= kLargest) sum += (double)mass_of_chunk(x + begin, n, top, 1.0f);
  }
  if (top == kMinusInf || top > kLargest) return top;
  return (float)((double)top + std::log(sum));
}

}  // namespace
}  // namespace pagedec
