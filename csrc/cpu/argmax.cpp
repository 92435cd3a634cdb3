// The largest logit of each row; the lowest token id of equals. A NaN counts as -inf.
#include <limits>

#include "cpu/row_max.h"

namespace pagedec {

void argmax_part(const pd_argmax_args &a, int thread, int num_threads) {
  const Range rows = share(*a.num_rows, thread, num_threads);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float *x = a.logits + r * a.vocab;
    float best = kMinusInf;
    int64_t group = 0;
    for (int64_t g = 0; g < num_groups(a.vocab); g++) {
      const float top = group_max(x, a.vocab, g);
      if (top > best) best = top, group = g;
    }
    a.token_ids[r] = first_equal(x, a.vocab, group, best);
  }
}

}  // namespace pagedec
