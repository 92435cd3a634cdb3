// Attention of bf16 layers over a cache of bytes.
#include "cpu/attention_amx.h"  // before the loop, which asks for it
#include "cpu/attention_loop.h"

namespace pagedec {
size_t bf16_of_bytes_state_bytes() { return sizeof(AttentionState<OfBytes<Bf16>>); }
void attention_bf16_of_bytes(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  AttentionLoop<OfBytes<Bf16>>(a, workspace, thread, num_threads).run();
}
}  // namespace pagedec
