#include "cuda/tensor_map.h"

#include <dlfcn.h>

#include "cuda/launch.h"

#if defined(__CUDACC__)
#include <cuda.h>
#else
#include "cuda/emulate/warpgroup.h"
#endif

namespace pagedec {

#if defined(__CUDACC__)
// By the driver, which makes what its devices read.
int map_tensor(TensorMap &map, const void *begin, const Extents &extents, const Strides &strides, const Extents &part,
               bool is_swizzled) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? (Encode)dlsym(driver, "cuTensorMapEncodeTiled") : nullptr;
  }();
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  if (!encode) return fail("pd_gemm: the driver has no cuTensorMapEncodeTiled, which this device needs");
  int rank = 4;
  while (rank > 1 && extents.of[rank - 1] == 1 && part.of[rank - 1] == 1) rank--;
  cuuint64_t sizes[4], steps[3];
  cuuint32_t box[4], ones[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; i++) sizes[i] = (cuuint64_t)extents.of[i], box[i] = (cuuint32_t)part.of[i];
  for (int i = 0; i < 3; i++) steps[i] = (cuuint64_t)strides.of[i];
  const CUresult result =
      encode((CUtensorMap *)&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, (cuuint32_t)rank, (void *)begin, sizes, steps, box,
             ones, CU_TENSOR_MAP_INTERLEAVE_NONE, is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : fail("pd_gemm: cuTensorMapEncodeTiled: error %d", (int)result);
}
#else
int map_tensor(TensorMap &map, const void *begin, const Extents &extents, const Strides &strides, const Extents &part,
               bool is_swizzled) {
  return emulate::map_tensor(map, begin, extents, strides, part, is_swizzled)
             ? 0
             : fail("pd_gemm: cuTensorMapEncodeTiled: error 1");
}
#endif

}  // namespace pagedec
