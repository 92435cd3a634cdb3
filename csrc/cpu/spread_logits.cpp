// Logits of some of a vocabulary's tokens, at the places that these have in it.
#include <algorithm>
#include <cstring>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int64_t kColumns = 4096;  // threads share columns as well as rows

// -inf where the place is negative: without a branch, which nobody could foresee.
PD_INLINE float value_at(const float *from, int32_t place) {
  constexpr uint32_t kMinusInfinity = 0xff800000u;
  const uint32_t none = (uint32_t)(place >> 31);
  uint32_t bits;
  memcpy(&bits, from + (place & ~none), sizeof bits);
  bits = (bits & ~none) | (kMinusInfinity & none);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

void spread_logits_part(const pd_spread_logits_args &a, int thread, int num_threads) {
  const int64_t vocab = a.vocab, pieces = (vocab + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t r = u / pieces, begin = u % pieces * kColumns, end = std::min(begin + kColumns, vocab);
    const float *from = a.src + r * a.draft_vocab;
    float *to = a.dst + r * vocab;
    for (int64_t v = begin; v < end; v++) to[v] = value_at(from, a.places[v]);
  }
}

}  // namespace pagedec
