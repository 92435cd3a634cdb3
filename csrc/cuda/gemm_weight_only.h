// Linear layers with int8 weights beside rows in their own dtype: W is bytes where it lies and numbers of the rows'
// dtype where it is multiplied, which hold them exactly. So the chain is that of a plain weight whose values they are,
// in every kernel, and an output's scale comes behind it.
//
// Layout   panels of 32 outputs; of a panel, for each 32 of k, 16 bytes a lane for outputs g and g + 8, then for g + 16
//          and g + 24: k = 2t, 2t + 1, 2t + 8, 2t + 9 of each 16, as an instruction takes them. Four bytes are 0 2 1 3,
//          as even and odd bytes become a pair each. Behind the last panel the outputs' scales (fp32).
#pragma once
#include "cuda/gemm.h"
#include "cuda/kv_bytes.h"

namespace pagedec::gemm {

// Where a value of W lies.
PD_DEVICE int64_t place_of_weight(int64_t output, int64_t k, int64_t padded_k) {
  const int of = (int)(output % kPanel), at = (int)(k % kStep), lane = of % 8 * 4 + at % 8 / 2;
  const int64_t step = (output - of) * padded_k + (k - at) * kPanel;
  return step + (of / 16 * kWarp + lane) * 16 + of / 8 % 2 * 8 + at / 16 * 4 + at % 2 * 2 + at / 8 % 2;
}
PD_DEVICE const float *weight_scales(const pd_gemm_args &a) {
  return (const float *)((const char *)a.packed + (a.n + kPanel - 1) / kPanel * kPanel * pad(a.k));
}
// Eight bytes of an output as numbers.
template <class E>
PD_DEVICE Eight widen_eight(uint32_t low, uint32_t high) {
  Eight w;
  widen<E, PD_KV_INT8>(low, w.pairs[0], w.pairs[1]);
  widen<E, PD_KV_INT8>(high, w.pairs[2], w.pairs[3]);
  return w;
}

}  // namespace pagedec::gemm
