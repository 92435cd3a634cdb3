// The order of a row's logits and the selection of its first k: descending value, then ascending token id.
//
// An order key is 64 bits: the logit turned into an integer that grows as the logit falls, then the id. Any exact
// selection or sort of keys gives the one right answer, ties included.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/row_max.h"

namespace pagedec {
namespace {

PD_INLINE uint32_t falling_bits(float x) {  // of no NaN; 0 and -0 are equal
  const uint32_t u = (uint32_t)as_int(x + 0.0f);
  return u & 0x80000000 ? u : 0x7fffffff - u;
}
PD_INLINE float without_nan(float x) { return x != x ? kMinusInf : x; }
PD_INLINE uint64_t order_key(float x, int64_t token) {
  return (uint64_t)falling_bits(without_nan(x)) << 32 | (uint64_t)token;
}
PD_INLINE int32_t key_token(uint64_t key) { return (int32_t)(uint32_t)key; }
PD_INLINE float key_value(uint64_t key) {
  const uint32_t u = (uint32_t)(key >> 32);
  return as_float((int32_t)(u & 0x80000000 ? u : 0x7fffffff - u));
}

// keys = the order keys of all logits >= threshold, in id order; group maxima spare most groups the look.
inline void collect(const float *x, int64_t vocab, const float *group_maxima, float threshold,
                    std::vector<uint64_t> &keys) {
  keys.clear();
  const F16 limit = set16(threshold);
  for (int64_t g = 0; g < num_groups(vocab); g++) {
    if (group_maxima[g] < threshold) continue;
    const int64_t end = g * kGroup + kGroup < vocab ? g * kGroup + kGroup : vocab;
    for (int64_t i = g * kGroup; i < end; i += 16) {
      const F16 values = larger(load_some(x + i, end - i, kMinusInf), set16(kMinusInf));
      uint32_t mask = mask_bits(less(values, limit)) ^ 0xffff;
      if (end - i < 16) mask &= (1u << (end - i)) - 1;
      for (; mask; mask &= mask - 1) {
        const int64_t token = i + __builtin_ctz(mask);
        keys.push_back(order_key(x[token], token));
      }
    }
  }
}

// keys = the order keys of the k largest logits, sorted. At least k logits reach the k-th largest group maximum.
inline void select_largest(const float *x, int64_t vocab, const float *group_maxima, int64_t k,
                           std::vector<float> &scratch, std::vector<uint64_t> &keys) {
  const int64_t groups = num_groups(vocab);
  float threshold = kMinusInf;
  if (k < groups) {
    scratch.assign(group_maxima, group_maxima + groups);
    std::nth_element(scratch.begin(), scratch.begin() + (k > 0 ? k - 1 : 0), scratch.end(), std::greater<float>());
    threshold = scratch[k > 0 ? k - 1 : 0];
  }
  collect(x, vocab, group_maxima, threshold, keys);
  if (k < (int64_t)keys.size()) {
    std::nth_element(keys.begin(), keys.begin() + k, keys.end());
    keys.resize(k);
  }
  std::sort(keys.begin(), keys.end());
}

}  // namespace
}  // namespace pagedec
