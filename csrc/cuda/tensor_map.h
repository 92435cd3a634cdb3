// What the engine is told of a tensor whose parts it copies (warpgroup.h): numbers of 16 bits, up to four dimensions.
#pragma once
#include <cstdint>

namespace pagedec {

struct alignas(64) TensorMap {  // CUDA's CUtensorMap
  uint64_t words[16];
};
struct Extents {
  int64_t of[4];
};
struct Strides {  // of dimensions 1, 2 and 3, in bytes; multiples of 16
  int64_t of[3];
};
// Parts begin anywhere, are of `part` numbers, those of dimension 0 one behind the other, and zeros where the tensor
// has ended; if is_swizzled, dimension 0 of a part is 128 bytes (warpgroup.h: swizzled_operand). What has no further
// dimension has 1 of it. 0, or fail(...).
int map_tensor(TensorMap &, const void *begin, const Extents &, const Strides &, const Extents &part, bool is_swizzled);

}  // namespace pagedec
