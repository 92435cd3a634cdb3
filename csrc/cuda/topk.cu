// The k largest logits and the logsumexp of each row. A small k takes two passes over the row, and one for the sum: the
// first finds each thread's largest logit, the second collects what is not below the k-th of those (select.h). A large
// one, up to the whole vocabulary, is answered in runs of as many as find room in shared memory: of each run the last
// key is found in its bits, then its keys are collected and sorted; so the passes grow with k, and nothing else does.
#include "cuda/launch.h"
#include "cuda/select.h"

namespace pagedec {
namespace {

constexpr int kRoom = 2048;

PD_KERNEL(kRowThreads) topk_lse_kernel(pd_topk_lse_args a) {
  SHARED_ARRAY(uint64_t, list, kRoom);
  SHARED_ARRAY(uint32_t, counts, kBins);
  for (int64_t r = block_index(); r < *a.num_rows; r += num_grid_blocks()) {
    const Row row = scan_row(a.logits + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.vocab, a.vocab);
    const float lse = log_sum_exp(row);
    if (thread_index() == 0) a.lse[r] = lse;
    if (a.k == 0) continue;
    const auto each = [&](auto visit) { row.each(visit); };
    const auto most = [&](int word) { return word == 0 ? ~0u : (uint32_t)(a.vocab - 1); };
    int num_found = collect_first(list, kRoom, a.k, row.own, each);
    uint64_t first = 0;
    for (int64_t done = 0;;) {
      const int64_t left = a.k - done;
      if (num_found < 0) {
        const int64_t until = done + (left < kRoom ? left : kRoom);
        const uint64_t last = select<uint64_t>(CountBins{counts}, (uint64_t)until, Count{}, most, each);
        num_found = collect(list, kRoom, first, last, each);
        first = last + 1;
      }
      const int64_t n = num_found < left ? num_found : left;
      for (int64_t i = thread_index(); i < n; i += kRowThreads) {
        a.token_ids[r * a.k + done + i] = key_token(list[i]);
        a.values[r * a.k + done + i] = key_value(list[i]);
      }
      done += n;
      if (done >= a.k) break;
      num_found = -1;
    }
  }
}

}  // namespace

int enqueue_topk_lse(pd_context &c, const pd_topk_lse_args &a) {
  return launch(c, "pd_topk_lse", topk_lse_kernel, kRowThreads, a);
}

}  // namespace pagedec
