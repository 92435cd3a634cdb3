// The attention kernel's entry: the choice of a dtype, and of what the cache holds.
#include "cpu/attention.h"

#include "common/context.h"

namespace pagedec {
namespace {

struct Kind {
  size_t (*state_bytes)();
  void (*run)(const pd_attention_args &, char *workspace, int thread, int num_threads);
};

Kind kind_of(const plan::Header &h) {
  if (h.kv_kind == PD_KV_PLAIN)
    return h.dtype == PD_BF16 ? Kind{bf16_state_bytes, attention_bf16} : Kind{fp32_state_bytes, attention_fp32};
  return h.dtype == PD_BF16 ? Kind{bf16_of_bytes_state_bytes, attention_bf16_of_bytes}
                            : Kind{fp32_of_bytes_state_bytes, attention_fp32_of_bytes};
}

}  // namespace

int64_t attention_workspace_bytes(const pd_attention_args &a, int num_threads) {
  const plan::Header &h = a.plan->header();
  const size_t state = kind_of(h).state_bytes();
  return (int64_t)(state * num_threads + (size_t)h.num_split_partials * h.q_heads * (h.head_dim + 2) * sizeof(float));
}

void attention_part(const pd_context &c, const pd_attention_args &a, int thread, int num_threads) {
  kind_of(a.plan->header()).run(a, c.attention.get(), thread, num_threads);
}

}  // namespace pagedec
