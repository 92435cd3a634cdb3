// Where a slot lies in the caches of one layer, in bytes from the layer's start (layouts: pagedec.h).
#pragma once
#include <cstdint>

#include "pagedec.h"

namespace pagedec {
namespace {

struct SlotPlace {
  int64_t k, v;   // of element 0 of a head
  int64_t scale;  // in K and in V, of caches of bytes
};

// Element d of a slot lies d * block_size elements behind the first in K of fp32, d behind it in V; in bf16, pairs of
// dimensions (K) and of tokens (V) lie side by side.
struct CacheShape {
  int64_t kv_heads, head_dim, block_size;
  bool paired;      // bf16
  int64_t element;  // bytes
  int64_t scale;    // bytes of a token's scale; 0: there is none

  CacheShape(int64_t kv_heads, int64_t head_dim, int64_t block_size, int32_t dtype, int32_t kv_kind)
      : kv_heads(kv_heads), head_dim(head_dim), block_size(block_size), paired(dtype == PD_BF16),
        element(kv_kind != PD_KV_PLAIN ? 1 : paired ? 2 : 4), scale(kv_kind != PD_KV_PLAIN ? 2 : 0) {}

  int64_t head_bytes() const { return head_dim * block_size * element; }  // without scales
  int64_t head_base(int64_t block, int64_t head) const {
    return (block * kv_heads + head) * (head_bytes() + block_size * scale);
  }
  SlotPlace place(int64_t slot, int64_t head) const {
    const int64_t base = head_base(slot / block_size, head), offset = slot % block_size;
    const int64_t scales = base + head_bytes() + offset * scale;
    if (paired)
      return {base + offset * 2 * element, base + ((offset / 2) * head_dim * 2 + offset % 2) * element, scales};
    return {base + offset * element, base + offset * head_dim * element, scales};
  }
};

}  // namespace
}  // namespace pagedec
