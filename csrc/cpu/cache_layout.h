// Where an element of a slot lies in the caches of one layer (layouts: pagedec.h).
#pragma once
#include <cstdint>

namespace pagedec {
namespace {

// One slot of one head: the address of element d is base + d * step for K in fp32 and V, and in pairs for K in bf16.
struct SlotPlace {
  int64_t k, v;  // of element 0, in elements from the layer's start
};

struct CacheShape {
  int64_t kv_heads, head_dim, block_size;
  bool paired;  // bf16

  int64_t head_elements() const { return head_dim * block_size; }
  int64_t head_base(int64_t block, int64_t head) const { return (block * kv_heads + head) * head_elements(); }
  SlotPlace place(int64_t slot, int64_t head) const {
    const int64_t base = head_base(slot / block_size, head), offset = slot % block_size;
    if (paired) return {base + offset * 2, base + (offset / 2) * head_dim * 2 + offset % 2};
    return {base + offset, base + offset * head_dim};
  }
};

}  // namespace
}  // namespace pagedec
