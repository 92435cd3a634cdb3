// Attention over a bf16 cache.
#include "cpu/attention_amx.h"  // before the loop, which asks for it
#include "cpu/attention_loop.h"

namespace pagedec {
size_t bf16_state_bytes() { return sizeof(AttentionState<Bf16>); }
void attention_bf16(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  AttentionLoop<Bf16>(a, workspace, thread, num_threads).run();
}
}  // namespace pagedec
