// The largest logit of each row; the lowest token id of equals. A NaN counts as -inf.
#include "cuda/launch.h"
#include "cuda/readout.h"

namespace pagedec {
namespace {

struct Best {
  float value;
  int32_t token;
};
// Of any two, the one that comes first: an order, so how they are paired does not matter.
PD_DEVICE Best better(Best a, Best b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token) ? a : b;
}

PD_KERNEL(kRowThreads) argmax_kernel(pd_argmax_args a) {
  SHARED_ARRAY(float, values, kRowWarps);
  SHARED_ARRAY(int32_t, tokens, kRowWarps);
  for (int64_t r = block_index(); r < *a.num_rows; r += num_grid_blocks()) {
    const float *x = a.logits + r * a.vocab;
    Best best{-INFINITY, INT32_MAX};
    const auto visit = [&](int64_t t, float value) { best = better(best, {without_nan(value), (int32_t)t}); };
    each_logit_of_four(x, a.vocab, visit);
    for (int mask = kWarp / 2; mask; mask /= 2)
      best = better(best, {shuffle_xor(best.value, mask), shuffle_xor(best.token, mask)});
    if (thread_index() % kWarp == 0) values[thread_index() / kWarp] = best.value;
    if (thread_index() % kWarp == 0) tokens[thread_index() / kWarp] = best.token;
    sync_block();
    if (thread_index() == 0) {
      for (int w = 1; w < kRowWarps; w++) best = better(best, {values[w], tokens[w]});
      a.token_ids[r] = best.token;
    }
    sync_block();  // before the next row's are written
  }
}

}  // namespace

int enqueue_argmax(pd_context &c, const pd_argmax_args &a) {
  return launch(c, "pd_argmax", argmax_kernel, kRowThreads, a);
}

}  // namespace pagedec
