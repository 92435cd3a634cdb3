// Gates and what they multiply, as the epilogues of linear layers have them.
#include "cpu/gemm_finish.h"

namespace pagedec {

void gate_outputs(int32_t epilogue, int32_t y_dtype, const float *z, int64_t groups, void *y) {
  for (int64_t g = 0; g < groups; g++) {
    const F16 gate = load16(z + g * 32), up = load16(z + g * 32 + 16);
    F16 r;
    if (epilogue == PD_CLAMPED_SWIGLU) r = clamped_swiglu16(gate, up);
    else r = mul16(epilogue == PD_SILU_MUL ? silu16(gate) : gelu16(gate), up);
    if (y_dtype == PD_F32) store16((float *)y + g * 16, r);
    else store16_bf16((uint16_t *)y + g * 16, r, 16);
  }
}

}  // namespace pagedec
