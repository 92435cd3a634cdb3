// Attention of fp32 layers over a cache of bytes.
#include "cpu/attention_loop.h"

namespace pagedec {
size_t fp32_of_bytes_state_bytes() { return sizeof(AttentionState<OfBytes<Fp32>>); }
void attention_fp32_of_bytes(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  AttentionLoop<OfBytes<Fp32>>(a, workspace, thread, num_threads).run();
}
}  // namespace pagedec
