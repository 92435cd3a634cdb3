// Logits of some of a vocabulary's tokens, at the places that these have in it.
#include <algorithm>
#include <cmath>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int64_t kColumns = 4096;  // threads share columns as well as rows

}  // namespace

void spread_logits_part(const pd_spread_logits_args &a, int thread, int num_threads) {
  const int64_t vocab = a.vocab, pieces = (vocab + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t r = u / pieces, begin = u % pieces * kColumns, end = std::min(begin + kColumns, vocab);
    const float *from = a.src + r * a.draft_vocab;
    float *to = a.dst + r * vocab;
    for (int64_t v = begin; v < end; v++) to[v] = a.places[v] < 0 ? -INFINITY : from[a.places[v]];
  }
}

}  // namespace pagedec
