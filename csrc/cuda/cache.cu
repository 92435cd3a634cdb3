// What is written to the KV cache. On a device K and V lie alike, [block][kv_head][block_size][head_dim], so that a
// token's head is one run of memory.
#include "cuda/launch.h"
#include "cuda/kv_bytes.h"

namespace pagedec {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kTogether = 8;  // moves that a thread has under way
constexpr int kAhead = 4;     // and numbers of a head, since to a compiler what is written may be what is read next

// Where a slot's head begins, in elements from a layer's start.
PD_DEVICE int64_t place_of(int32_t slot, int64_t head, int64_t kv_heads, int64_t head_dim, int32_t block_size) {
  return ((slot / block_size * kv_heads + head) * block_size + slot % block_size) * head_dim;
}

// The same in a cache of bytes, and where its scale lies.
struct BytePlace {
  int64_t first, scale;
  PD_DEVICE BytePlace(int32_t slot, int64_t head, int64_t kv_heads, int64_t head_dim, int32_t block_size) {
    const int64_t before = (slot / block_size * kv_heads + head) * block_size;  // slots
    first = before * (head_dim + kScaleBytes) + slot % block_size * head_dim;
    scale = before * (head_dim + kScaleBytes) + block_size * head_dim + slot % block_size * kScaleBytes;
  }
};

template <class E>
PD_DEVICE float turned(const pd_rope_kv_write_args &a, const E *in, const float *norm, float scale, int64_t row,
                       int d) {
  const auto value = [&](int i) { return norm ? to_float(in[i]) * scale * norm[i] : to_float(in[i]); };
  if (!a.cos_sin || d >= a.rotary_dim) return value(d);
  const int half = a.rotary_dim / 2, pair = a.interleaved ? d / 2 : d < half ? d : d - half;
  const bool is_first = a.interleaved ? d % 2 == 0 : d < half;
  const float *table = a.cos_sin + a.positions[row] * (int64_t)a.rotary_dim;
  const float cos = table[pair], sin = table[half + pair];
  const float first = value(a.interleaved ? 2 * pair : pair);
  const float second = value(a.interleaved ? 2 * pair + 1 : half + pair);
  return is_first ? first * cos - second * sin : second * cos + first * sin;
}

// A warp has a head, whose numbers `value` gives.
template <int kKind, class Value>
PD_DEVICE void put_bytes(uint8_t *cache, const BytePlace &place, int64_t dim, const Value &value) {
  const int lane = thread_index() % kWarp;
  uint32_t top = 0;
  for (int d = lane; d < dim; d += kWarp) top = upper(top, float_bits(value(d)) & 0x7fffffffu);
  for (int mask = kWarp / 2; mask; mask /= 2) top = upper(top, shuffle_xor(top, mask));
  const bf16 scale = scale_of<kKind>(top);
  const float by = to_float(scale);
  for (int d = lane; d < dim; d += kWarp) {
    const int at = d < dim / kGroup * kGroup ? place_of_byte(d) : d;  // what is no whole group is as it is
    cache[place.first + at] = by > 0.0f ? to_byte<kKind>(quotient(value(d), by)) : 0;
  }
  if (lane == 0) *(bf16 *)(cache + place.scale) = scale;
}

// A warp a head: its norm, its rotation, then to q_out or to its slot.
template <class E, int kKind>
PD_KERNEL(kThreads) rope_kv_write_kernel(pd_rope_kv_write_args a) {
  let_next_begin();
  await_kernels();
  const int num_heads = a.q_heads + 2 * a.kv_heads, lane = thread_index() % kWarp;
  const int64_t units = *a.num_rows * (int64_t)num_heads, step = (int64_t)num_grid_blocks() * kWarps;
  for (int64_t u = (int64_t)block_index() * kWarps + thread_index() / kWarp; u < units; u += step) {
    const int64_t row = u / num_heads, head = u % num_heads, dim = a.head_dim;
    const int32_t slot = a.slots[row];
    const E *in = (const E *)a.qkv + u * dim;
    const bool is_q = head < a.q_heads, is_v = head >= a.q_heads + a.kv_heads;
    if (!is_q && slot < 0) continue;  // the whole warp
    const float *norm = is_q ? a.q_norm : is_v ? nullptr : a.k_norm;
    float scale = 1.0f;
    if (norm) {
      const int64_t at = !a.norms_all_heads ? 0 : is_q ? head : head - a.q_heads;  // of the heads that a norm is over
      const int64_t count = !a.norms_all_heads ? dim : (is_q ? a.q_heads : a.kv_heads) * dim;
      const E *normed = in - at * dim;
      float sum = 0.0f;
      for (int64_t d = lane; d < count; d += kWarp) sum = sum + to_float(normed[d]) * to_float(normed[d]);
      for (int mask = kWarp / 2; mask; mask /= 2) sum = sum + shuffle_xor(sum, mask);
      scale = quotient(1.0f, square_root(quotient(sum, (float)count) + a.norm_eps));
      norm += at * dim;
    }
    const int64_t kv_head = is_v ? head - a.q_heads - a.kv_heads : head - a.q_heads;
    if (kKind != PD_KV_PLAIN && !is_q) {
      const BytePlace place(slot, kv_head, a.kv_heads, dim, a.block_size);
      put_bytes<kKind>((uint8_t *)(is_v ? a.v_cache : a.k_cache), place, dim, [&](int d) {
        return is_v ? to_float(in[d]) : turned(a, in, norm, scale, row, d);
      });
      continue;
    }
    E *out = is_q ? (E *)a.q_out + (row * a.q_heads + head) * dim
                  : (E *)(is_v ? a.v_cache : a.k_cache) + place_of(slot, kv_head, a.kv_heads, dim, a.block_size);
    for (int first = lane; first < dim; first += kAhead * kWarp) {
      E y[kAhead];
      PD_UNROLL for (int j = 0; j < kAhead; j++) {
        const int d = first + j * kWarp;
        if (d < dim) y[j] = is_v ? in[d] : from_float<E>(turned(a, in, norm, scale, row, d));
      }
      PD_UNROLL for (int j = 0; j < kAhead; j++)
        if (first + j * kWarp < dim) out[first + j * kWarp] = y[j];
    }
  }
}

// Moves that may be under way at a time: none of them reads what one before it writes.
struct Moves {
  int num;
  int32_t src[kTogether], dst[kTogether];

  PD_DEVICE Moves(const pd_kv_copy_args &a, int32_t first, int32_t left) : num(0) {
    PD_UNROLL for (int i = 0; i < kTogether; i++) {
      src[i] = i < left ? a.src[first + i] : 0, dst[i] = i < left ? a.dst[first + i] : 0;
      bool is_apart = i < left;
      PD_UNROLL for (int j = 0; j < i; j++) is_apart &= src[i] != dst[j];
      if (is_apart && num == i) num++;
    }
  }
  // to[place(dst)] = to[place(src)] of one place of each, in their order.
  template <class E, class Place>
  PD_DEVICE void carry_out(E *to, const Place &place) const {
    E values[kTogether] = {};
    PD_UNROLL for (int i = 0; i < kTogether; i++)
      if (i < num) values[i] = to[place(src[i])];
    PD_UNROLL for (int i = 0; i < kTogether; i++)
      if (i < num) to[place(dst[i])] = values[i];
  }
};
template <class Visit>
PD_DEVICE void each_moves(const pd_kv_copy_args &a, const Visit &visit) {
  for (int32_t i = 0, stop = *a.num_moves; i < stop;) {
    const Moves moves(a, i, stop - i);
    visit(moves);
    i += moves.num;
  }
}

// A block has whole (layer, head) pairs, and a thread the same numbers of all moves: they keep their order without
// waiting for others. Of bytes two at a time, since heads and scales begin at even places; the last is the scale. Of
// features four bytes at a time, each by one thread of all.
template <class E, bool kBytes>
PD_KERNEL(kThreads) kv_copy_kernel(pd_kv_copy_args a) {
  const int64_t stride = kBytes ? a.layer_stride / 2 : a.layer_stride;
  const int units = a.num_layers * a.kv_heads, width = kBytes ? a.head_dim / 2 + 1 : a.head_dim;
  if (block_index() == 0 && thread_index() == 0 && a.token_plane)
    each_moves(a, [&](const Moves &moves) { moves.carry_out(a.token_plane, [](int32_t slot) { return slot; }); });
  const int64_t words = a.features ? a.feature_bytes / 4 : 0, step = (int64_t)num_grid_blocks() * kThreads;
  for (int64_t d = (int64_t)block_index() * kThreads + thread_index(); d < words; d += step)
    each_moves(a, [&](const Moves &moves) {
      moves.carry_out((uint32_t *)a.features, [&](int32_t slot) { return slot * words + d; });
    });
  for (int u = block_index(); u < units; u += num_grid_blocks()) {
    E *k = (E *)a.k_cache + u / a.kv_heads * stride, *v = (E *)a.v_cache + u / a.kv_heads * stride;
    each_moves(a, [&](const Moves &moves) {
      for (int d = thread_index(); d < width; d += kThreads) {
        const auto place = [&](int32_t slot) {
          if (!kBytes) return place_of(slot, u % a.kv_heads, a.kv_heads, a.head_dim, a.block_size) + d;
          const BytePlace place(slot, u % a.kv_heads, a.kv_heads, a.head_dim, a.block_size);
          return d == width - 1 ? place.scale / 2 : place.first / 2 + d;
        };
        moves.carry_out(k, place), moves.carry_out(v, place);
      }
    });
  }
}

template <class E>
auto rope_kv_write_of(int32_t kv_kind) {
  if (kv_kind == PD_KV_PLAIN) return rope_kv_write_kernel<E, PD_KV_PLAIN>;
  return kv_kind == PD_KV_INT8 ? rope_kv_write_kernel<E, PD_KV_INT8> : rope_kv_write_kernel<E, PD_KV_FP8>;
}

}  // namespace

int enqueue_rope_kv_write(pd_context &c, const pd_rope_kv_write_args &a) {
  const auto kernel = of_dtype(a.dtype, [&](auto e) { return rope_kv_write_of<decltype(e)>(a.kv_kind); });
  return launch_early(c, "pd_rope_kv_write", kernel, grid_of_rows(c, kThreads), a);
}
int enqueue_kv_copy(pd_context &c, const pd_kv_copy_args &a) {
  const auto kernel = a.kv_kind != PD_KV_PLAIN ? kv_copy_kernel<uint16_t, true>
                      : a.dtype == PD_F32      ? kv_copy_kernel<float, false>
                                               : kv_copy_kernel<uint16_t, false>;
  return launch(c, "pd_kv_copy", kernel, kThreads, a);
}

}  // namespace pagedec
