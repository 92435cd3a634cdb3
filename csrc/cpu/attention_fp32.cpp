// Attention over an fp32 cache.
#include "cpu/attention_loop.h"

namespace pagedec {
size_t fp32_state_bytes(int head_dim) { return state_bytes<Fp32>(head_dim); }
void attention_fp32(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  run_attention<Fp32>(a, workspace, thread, num_threads);
}
}  // namespace pagedec
