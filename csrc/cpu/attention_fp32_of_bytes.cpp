// Attention of fp32 layers over a cache of bytes.
#include "cpu/attention_loop.h"

namespace pagedec {
size_t fp32_of_bytes_state_bytes(int head_dim) { return state_bytes<OfBytes<Fp32>>(head_dim); }
void attention_fp32_of_bytes(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  run_attention<OfBytes<Fp32>>(a, workspace, thread, num_threads);
}
}  // namespace pagedec
