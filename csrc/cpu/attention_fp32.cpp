// Attention over an fp32 cache.
#include "cpu/attention_loop.h"

namespace pagedec {
size_t fp32_state_bytes() { return sizeof(AttentionState<Fp32>); }
void attention_fp32(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  AttentionLoop<Fp32>(a, workspace, thread, num_threads).run();
}
}  // namespace pagedec
