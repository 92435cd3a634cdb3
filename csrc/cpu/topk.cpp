// The k largest logits and the logsumexp of a row: one pass finds group maxima and the sum, a second looks only into
// the groups that reach the k-th largest group maximum.
#include "cpu/topk.h"

#include "common/context.h"
#include "cpu/softmax_mass.h"

namespace pagedec {

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
