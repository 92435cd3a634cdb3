// Attention of bf16 layers over a plain cache.
#include "cuda/attention_half.h"

namespace pagedec::attention {
int enqueue_bf16(pd_context &c, const Work &w, int head_dim) {
  return put_plain<bf16>(c, w, head_dim, [&](auto kernel, const Grid &grid, const Work &work) {
    return launch_early(c, "pd_attention", kernel, grid, work);
  });
}
}  // namespace pagedec::attention
