// Single logits, and their ranks: a block an entry, which goes through the entry's row.
#include "cuda/launch.h"
#include "cuda/readout.h"

namespace pagedec {
namespace {

PD_KERNEL(kRowThreads) pick_logits_kernel(pd_pick_logits_args a) {
  for (int64_t i = block_index(); i < *a.num_entries; i += num_grid_blocks()) {
    const float *x = a.logits + a.rows[i] * (int64_t)a.vocab;
    const float value = x[a.tokens[i]];
    if (thread_index() == 0) a.values[i] = value;
    if (!a.ranks) continue;
    uint64_t greater = 0;
    each_logit(x, a.vocab, [&](int64_t, float other) { greater += other > value; });
    greater = block_total(greater);
    if (thread_index() == 0) a.ranks[i] = (int32_t)(1 + greater);
  }
}

}  // namespace

int enqueue_pick_logits(pd_context &c, const pd_pick_logits_args &a) {
  return launch(c, "pd_pick_logits", pick_logits_kernel, kRowThreads, a);
}

}  // namespace pagedec
