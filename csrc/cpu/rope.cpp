// Rotary positions and the cache write in one pass over qkv: norm of a head, rotation, then to q_out or to the slot.
#include <cmath>

#include "cpu/cache_layout.h"
#include "common/check.h"
#include "cpu/kv_bytes.h"

namespace pagedec {
namespace {

constexpr int kMaxHeadDim = 1024;

// What a norm over `count` values multiplies them with.
template <class E>
float norm_scale(const E *x, int64_t count, float eps) {
  F16 sum = set16(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const F16 v = load_some(x + i, count - i);
    sum = sum + v * v;
  }
  return 1.0f / std::sqrt(sum_lanes(sum) / (float)count + eps);
}
void norm_head(float *x, const float *weight, int64_t dim, float by) {
  const F16 scale = set16(by);
  for (int64_t i = 0; i < dim; i += 16)
    store_some(x + i, load_some(x + i, dim - i) * scale * load_some(weight + i, dim - i), dim - i);
}

// `table`: cos of the half, then sin.
void rotate_halves(float *x, const float *table, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i;
    const F16 cos = load_some(table + i, n), sin = load_some(table + half + i, n);
    const F16 a = load_some(x + i, n), b = load_some(x + half + i, n);
    store_some(x + i, a * cos - b * sin, n);
    store_some(x + half + i, b * cos + a * sin, n);
  }
}
void rotate_pairs(float *x, const float *table, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1], cos = table[i], sin = table[half + i];
    x[2 * i] = a * cos - b * sin;
    x[2 * i + 1] = b * cos + a * sin;
  }
}

void write_k(float *k, const CacheShape &shape, const float *x) {
  for (int64_t d = 0; d < shape.head_dim; d++) k[d * shape.block_size] = x[d];
}
void write_k(bf16 *k, const CacheShape &shape, const float *x) {
  bf16 rounded[kMaxHeadDim];
  for (int64_t d = 0; d < shape.head_dim; d += 16) {
    const int64_t n = shape.head_dim - d;
    store_some(rounded + d, load_some(x + d, n), n);
  }
  for (int64_t d = 0; d < shape.head_dim; d += 2) memcpy(k + d * shape.block_size, rounded + d, 4);
}
void write_v(float *v, const CacheShape &shape, const float *x) { memcpy(v, x, shape.head_dim * 4); }
// Element by element: the other half of each pair is a neighbour's slot, which another thread may be writing.
void write_v(bf16 *v, const CacheShape &shape, const bf16 *x) {
  for (int64_t d = 0; d < shape.head_dim; d++) v[d * 2] = x[d];
}

// A head of K or V, quantised once and for all; place: its slot's.
void write_bytes(char *cache, const SlotPlace &place, const CacheShape &shape, int32_t kind, bool keys,
                 const float *x) {
  uint8_t bytes[kMaxHeadDim];
  const int64_t dim = shape.head_dim, size = shape.block_size;
  const uint16_t scale = to_bytes(kind, x, dim, bytes);
  memcpy(cache + place.scale, &scale, 2);
  char *k = cache + place.k, *v = cache + place.v;
  if (keys && shape.paired)
    for (int64_t d = 0; d < dim; d += 2) memcpy(k + d * size, bytes + d, 2);
  else if (keys)
    for (int64_t d = 0; d < dim; d++) k[d * size] = (char)bytes[d];
  else if (shape.paired)
    for (int64_t d = 0; d < dim; d++) v[d * 2] = (char)bytes[d];
  else
    memcpy(v, bytes, dim);
}

template <class E>
struct Heads {
  const pd_rope_kv_write_args &a;
  CacheShape shape;
  // Of a norm over all heads: those that a thread has come to, q's or k's of a row, and their scale.
  const E *first = nullptr;
  float scale = 0.0f;

  void load(const E *in, float *x) const {
    const int64_t dim = a.head_dim;
    for (int64_t i = 0; i < dim; i += 16) store_some(x + i, load_some(in + i, dim - i), dim - i);
  }
  // A q or k head in fp32, normed and rotated; `at` of `count`.
  void prepare(const E *in, const float *norm, int64_t at, int64_t count, int64_t row, float *x) {
    const int64_t dim = a.head_dim;
    load(in, x);
    if (norm && a.norms_all_heads) {
      if (first != in - at * dim) first = in - at * dim, scale = norm_scale(first, count * dim, a.norm_eps);
      norm_head(x, norm + at * dim, dim, scale);
    } else if (norm) {
      norm_head(x, norm, dim, norm_scale(in, dim, a.norm_eps));
    }
    if (!a.cos_sin) return;
    const float *table = a.cos_sin + a.positions[row] * (int64_t)a.rotary_dim;
    a.interleaved ? rotate_pairs(x, table, a.rotary_dim / 2) : rotate_halves(x, table, a.rotary_dim / 2);
  }
  void run(int64_t row, int64_t head) {
    const int64_t dim = a.head_dim, slot = a.slots[row];
    const E *in = (const E *)a.qkv + (row * (a.q_heads + 2 * a.kv_heads) + head) * dim;
    alignas(64) float x[kMaxHeadDim];
    if (head < a.q_heads) {
      prepare(in, a.q_norm, head, a.q_heads, row, x);
      E *out = (E *)a.q_out + (row * a.q_heads + head) * dim;
      for (int64_t i = 0; i < dim; i += 16) store_some(out + i, load_some(x + i, dim - i), dim - i);
    } else if (slot >= 0) {
      const bool keys = head < a.q_heads + a.kv_heads;
      const SlotPlace place = shape.place(slot, head - a.q_heads - (keys ? 0 : a.kv_heads));
      char *cache = (char *)(keys ? a.k_cache : a.v_cache);
      if (keys)
        prepare(in, a.k_norm, head - a.q_heads, a.kv_heads, row, x);
      else if (shape.scale)
        load(in, x);
      if (shape.scale)
        write_bytes(cache, place, shape, a.kv_kind, keys, x);
      else if (keys)
        write_k((E *)(cache + place.k), shape, x);
      else
        write_v((E *)(cache + place.v), shape, in);
    }
  }
};

template <class E>
void write_rows(const pd_rope_kv_write_args &a, int thread, int num_threads) {
  Heads<E> heads{a, {a.kv_heads, a.head_dim, a.block_size, a.dtype, a.kv_kind}};
  const int64_t num_heads = a.q_heads + 2 * a.kv_heads;
  const Range units = share(*a.num_rows * num_heads, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) heads.run(u / num_heads, u % num_heads);
}

}  // namespace

void rope_kv_write_part(const pd_rope_kv_write_args &a, int thread, int num_threads) {
  a.dtype == PD_BF16 ? write_rows<bf16>(a, thread, num_threads) : write_rows<float>(a, thread, num_threads);
}

}  // namespace pagedec
