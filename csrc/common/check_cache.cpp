// What can be wrong with the records of kernels that write to the KV cache.
#include <cmath>

#include "common/check.h"

namespace pagedec {

int check_rope_kv_write(const pd_rope_kv_write_args &a) {
  const char *name = "pd_rope_kv_write";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "qkv", a.qkv, a.num_rows) ||
      check_array(name, "q_out", a.q_out, a.num_rows) || check_array(name, "slots", a.slots, a.num_rows) ||
      check_pointer(name, "k_cache", a.k_cache) || check_pointer(name, "v_cache", a.v_cache) ||
      check_cache_shape(name, a.kv_heads, a.head_dim, a.block_size, a.dtype, a.kv_kind) ||
      check_range(name, "q_heads", a.q_heads, 1, 65536) || check_range(name, "interleaved", a.interleaved, 0, 1) ||
      check_optional(name, "cos_sin", a.cos_sin) || check_optional(name, "q_norm", a.q_norm) ||
      check_optional(name, "k_norm", a.k_norm) || check_range(name, "norms_all_heads", a.norms_all_heads, 0, 1))
    return -1;
  if (a.cos_sin) {
    if (check_array(name, "positions", a.positions, a.num_rows) ||
        check_range(name, "rotary_dim", a.rotary_dim, 2, a.head_dim))
      return -1;
    if (a.rotary_dim % 2) return fail("%s: rotary_dim is %d; it must be even", name, a.rotary_dim);
  }
  if (!(a.norm_eps >= 0.0f) || !std::isfinite(a.norm_eps))
    return fail("%s: norm_eps is %g; it must be 0 or more", name, (double)a.norm_eps);
  return 0;
}

int check_kv_copy(const pd_kv_copy_args &a) {
  const char *name = "pd_kv_copy";
  if (check_count(name, "num_moves", a.num_moves) || check_array(name, "src", a.src, a.num_moves) ||
      check_array(name, "dst", a.dst, a.num_moves) || check_pointer(name, "k_cache", a.k_cache) ||
      check_pointer(name, "v_cache", a.v_cache) || check_optional(name, "token_plane", a.token_plane) ||
      check_cache_shape(name, a.kv_heads, a.head_dim, a.block_size, a.dtype, a.kv_kind) ||
      check_range(name, "num_layers", a.num_layers, 1, 65536) ||
      check_range(name, "layer_stride", a.layer_stride, 0, INT64_MAX) ||
      check_optional(name, "features", a.features) ||
      (a.features && check_range(name, "feature_bytes", a.feature_bytes, 4, INT32_MAX)))
    return -1;
  if (a.features && a.feature_bytes % 4)
    return fail("%s: feature_bytes is %d; it must be a multiple of 4", name, a.feature_bytes);
  if (a.kv_kind != PD_KV_PLAIN && a.layer_stride % 2)  // scales have two bytes
    return fail("%s: layer_stride is %lld; of bytes it must be even", name, (long long)a.layer_stride);
  if (!kReadsRecords) return 0;
  for (int32_t i = 0; i < *a.num_moves; i++) {
    if (a.src[i] < 0) return fail("%s: src[%d] is %d; a slot must be 0 or more", name, i, a.src[i]);
    if (a.dst[i] < 0) return fail("%s: dst[%d] is %d; a slot must be 0 or more", name, i, a.dst[i]);
  }
  return 0;
}

}  // namespace pagedec
