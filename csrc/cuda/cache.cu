// What is written to the KV cache. On a device K and V lie alike, [block][kv_head][block_size][head_dim], so that a
// token's head is one run of memory.
#include "cuda/context.h"

namespace pagedec {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;

// Where a slot's head begins, in elements from a layer's start.
PD_DEVICE int64_t place_of(int64_t slot, int64_t head, int64_t kv_heads, int64_t head_dim, int64_t block_size) {
  return ((slot / block_size * kv_heads + head) * block_size + slot % block_size) * head_dim;
}

template <class E>
PD_DEVICE float turned(const pd_rope_kv_write_args &a, const E *in, const float *norm, float scale, int64_t row,
                       int d) {
  const auto value = [&](int i) { return norm ? to_float(in[i]) * scale * norm[i] : to_float(in[i]); };
  if (!a.cos_sin || d >= a.rotary_dim) return value(d);
  const int half = a.rotary_dim / 2, pair = a.interleaved ? d / 2 : d % half;
  const bool is_first = a.interleaved ? d % 2 == 0 : d < half;
  const float *table = a.cos_sin + a.positions[row] * (int64_t)a.rotary_dim;
  const float cos = table[pair], sin = table[half + pair];
  const float first = value(a.interleaved ? 2 * pair : pair);
  const float second = value(a.interleaved ? 2 * pair + 1 : half + pair);
  return is_first ? first * cos - second * sin : second * cos + first * sin;
}

// A warp a head: its norm, its rotation, then to q_out or to its slot.
template <class E>
PD_KERNEL(kThreads) rope_kv_write_kernel(pd_rope_kv_write_args a) {
  const int num_heads = a.q_heads + 2 * a.kv_heads, lane = thread_index() % kWarp;
  const int64_t units = *a.num_rows * (int64_t)num_heads, step = (int64_t)num_grid_blocks() * kWarps;
  for (int64_t u = (int64_t)block_index() * kWarps + thread_index() / kWarp; u < units; u += step) {
    const int64_t row = u / num_heads, head = u % num_heads, slot = a.slots[row], dim = a.head_dim;
    const E *in = (const E *)a.qkv + u * dim;
    const bool is_q = head < a.q_heads, is_v = head >= a.q_heads + a.kv_heads;
    if (!is_q && slot < 0) continue;  // the whole warp
    const float *norm = is_q ? a.q_norm : is_v ? nullptr : a.k_norm;
    float scale = 1.0f;
    if (norm) {
      float sum = 0.0f;
      for (int d = lane; d < dim; d += kWarp) sum = sum + to_float(in[d]) * to_float(in[d]);
      for (int mask = kWarp / 2; mask; mask /= 2) sum = sum + shuffle_xor(sum, mask);
      scale = quotient(1.0f, square_root(quotient(sum, (float)dim) + a.norm_eps));
    }
    const int64_t kv_head = is_v ? head - a.q_heads - a.kv_heads : head - a.q_heads;
    E *out = is_q ? (E *)a.q_out + (row * a.q_heads + head) * dim
                  : (E *)(is_v ? a.v_cache : a.k_cache) + place_of(slot, kv_head, a.kv_heads, dim, a.block_size);
    for (int d = lane; d < dim; d += kWarp)
      out[d] = is_v ? in[d] : from_float<E>(turned(a, in, norm, scale, row, d));
  }
}

// A block has whole (layer, head) pairs, so that moves keep their order without waiting for other blocks.
template <class E>
PD_KERNEL(kThreads) kv_copy_kernel(pd_kv_copy_args a) {
  const int64_t units = (int64_t)a.num_layers * a.kv_heads;
  if (block_index() == 0 && thread_index() == 0 && a.token_plane)
    for (int32_t i = 0; i < *a.num_moves; i++) a.token_plane[a.dst[i]] = a.token_plane[a.src[i]];
  for (int64_t u = block_index(); u < units; u += num_grid_blocks()) {
    E *k = (E *)a.k_cache + u / a.kv_heads * a.layer_stride, *v = (E *)a.v_cache + u / a.kv_heads * a.layer_stride;
    for (int32_t i = 0; i < *a.num_moves; i++) {  // a thread has the same dimensions of all moves: its own order
      const int64_t from = place_of(a.src[i], u % a.kv_heads, a.kv_heads, a.head_dim, a.block_size);
      const int64_t to = place_of(a.dst[i], u % a.kv_heads, a.kv_heads, a.head_dim, a.block_size);
      for (int d = thread_index(); d < a.head_dim; d += kThreads) k[to + d] = k[from + d], v[to + d] = v[from + d];
    }
  }
}

}  // namespace

int enqueue_rope_kv_write(pd_context &c, const pd_rope_kv_write_args &a) {
  const auto kernel = a.dtype == PD_BF16 ? rope_kv_write_kernel<bf16> : rope_kv_write_kernel<float>;
  return launch(c, "pd_rope_kv_write", kernel, kThreads, a);
}
int enqueue_kv_copy(pd_context &c, const pd_kv_copy_args &a) {
  const auto kernel = a.dtype == PD_BF16 ? kv_copy_kernel<bf16> : kv_copy_kernel<float>;
  return launch(c, "pd_kv_copy", kernel, kThreads, a);
}

}  // namespace pagedec
