// Single logits, and their ranks. Groups of 64 whose largest logit is not greater than an entry's are passed over:
// nearly all of them, where the entry is a probable token. A row's entries share one pass over its maxima.
#include <algorithm>

#include "cpu/row_max.h"

namespace pagedec {
namespace {

int32_t count_greater(const float *x, int64_t vocab, int64_t group, float value) {
  const int64_t end = std::min(group * kGroup + kGroup, vocab);
  const F16 limit = set16(value);
  int32_t count = 0;
  for (int64_t i = group * kGroup; i < end; i += 16)
    count += __builtin_popcount(mask_bits(less(limit, load_some(x + i, end - i, kMinusInf))));
  return count;
}

void rank(const float *x, int64_t vocab, const float *values, int32_t *ranks, int64_t n) {
  float least = std::numeric_limits<float>::infinity();  // NaN aside, of which the rank is 1
  for (int64_t i = 0; i < n; i++) {
    ranks[i] = 1;
    if (values[i] < least) least = values[i];
  }
  for (int64_t g = 0; g < num_groups(vocab); g++) {
    const float top = group_max(x, vocab, g);
    if (!(top > least)) continue;
    for (int64_t i = 0; i < n; i++)
      if (top > values[i]) ranks[i] += count_greater(x, vocab, g, values[i]);
  }
}

}  // namespace

void pick_logits_part(const pd_pick_logits_args &a, int thread, int num_threads) {
  const Range entries = share(*a.num_entries, thread, num_threads);
  for (int64_t i = entries.begin, stop; i < entries.end; i = stop) {
    const float *x = a.logits + a.rows[i] * (int64_t)a.vocab;
    for (stop = i; stop < entries.end && a.rows[stop] == a.rows[i]; stop++) a.values[stop] = x[a.tokens[stop]];
    if (a.ranks) rank(x, a.vocab, a.values + i, a.ranks + i, stop - i);
  }
}

}  // namespace pagedec
