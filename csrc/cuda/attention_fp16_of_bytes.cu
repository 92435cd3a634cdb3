// Attention of fp16 layers over a cache of bytes.
#include "cuda/attention_bytes.h"

namespace pagedec::attention {
int enqueue_fp16_of_bytes(pd_context &c, const Work &w, int head_dim, int kv_kind) {
  return put_bytes<fp16>(c, w, head_dim, kv_kind, [&](auto kernel, const Grid &grid, const Work &work) {
    return launch_early(c, "pd_attention", kernel, grid, work);
  });
}
}  // namespace pagedec::attention
