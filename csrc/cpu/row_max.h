// Maxima over groups of 64 logits: what argmax, top-k and sampling look at before single logits. A NaN counts as -inf.
#pragma once
#include <limits>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int64_t kGroup = 64;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

PD_INLINE int64_t num_groups(int64_t vocab) { return (vocab + kGroup - 1) / kGroup; }

PD_INLINE float group_max(const float *x, int64_t vocab, int64_t group) {
  const float *p = x + group * kGroup;
  const int64_t n = vocab - group * kGroup;
  F16 top = set16(kMinusInf);
  if (n >= kGroup) {
    const F16 a = larger(load16(p), top), b = larger(load16(p + 16), top);
    top = larger(larger(load16(p + 32), a), larger(load16(p + 48), b));
  } else {
    for (int64_t i = 0; i < n; i += 16) top = larger(load_some(p + i, n - i, kMinusInf), top);
  }
  return max_lanes(top);
}

// The lowest id in the group whose logit is `value`; the group's first id where there is none (NaN counting as -inf).
PD_INLINE int32_t first_equal(const float *x, int64_t vocab, int64_t group, float value) {
  const int64_t begin = group * kGroup, end = begin + kGroup < vocab ? begin + kGroup : vocab;
  for (int64_t i = begin; i < end; i++)
    if (x[i] == value || (x[i] != x[i] && value == kMinusInf)) return (int32_t)i;
  return (int32_t)begin;
}

}  // namespace
}  // namespace pagedec
