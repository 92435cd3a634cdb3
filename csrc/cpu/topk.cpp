// The k largest logits and the logsumexp of a row: one pass finds group maxima and the sum, a second looks only into
// the groups that reach the k-th largest group maximum.
#include "cpu/topk.h"

#include <cmath>

#include "common/context.h"
#include "cpu/check_small.h"
#include "cpu/softmax_mass.h"

namespace pagedec {

int check_topk_lse(const pd_topk_lse_args &a) {
  const char *name = "pd_topk_lse";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "logits", a.logits, a.num_rows) ||
      check_array(name, "lse", a.lse, a.num_rows) || check_range(name, "vocab", a.vocab, 1, INT32_MAX - kGroup) ||
      check_range(name, "k", a.k, 0, a.vocab))
    return -1;
  if (a.k && (check_array(name, "token_ids", a.token_ids, a.num_rows) ||
              check_array(name, "values", a.values, a.num_rows)))
    return -1;
  return 0;
}

void topk_lse_part(pd_context &c, const pd_topk_lse_args &a, int thread, int num_threads) {
  ThreadScratch &own = c.scratch[thread];
  const Range rows = share(*a.num_rows, thread, num_threads);
  own.maxima.resize(num_groups(a.vocab));
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float *x = a.logits + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.vocab;
    a.lse[r] = maxima_and_lse(x, a.vocab, own.maxima.data());
    if (a.k == 0) continue;
    select_largest(x, a.vocab, own.maxima.data(), a.k, own.values, own.keys);
    for (int64_t i = 0; i < a.k; i++) {
      a.token_ids[r * a.k + i] = key_token(own.keys[i]);
      a.values[r * a.k + i] = key_value(own.keys[i]);
    }
  }
}

}  // namespace pagedec
