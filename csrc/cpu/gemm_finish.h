// What becomes of a linear layer's sums: scales of outputs, bias, epilogue, and y's dtype.
#pragma once
#include "cpu/gemm_vec.h"

namespace pagedec {
namespace {  // private to each file that includes it

// Logits that are more than what a cache keeps until they are read go past the caches: else each line is fetched to be
// written whole. Measured: the output matrix of 49,152 tokens gains 1, 7 and 8 % at 16, 24 and 64 rows on Zen 4, 1, 5
// and 4 % on Zen 3. Not what is no wider than a layer: its reader comes next.
constexpr bool HAS_STORES_PAST_CACHES = PD_LEVEL == 1 || PD_LEVEL == 3;
constexpr int64_t PAST_CACHES_BYTES = 2 << 20, PAST_CACHES_WIDTH = 16384;
inline bool goes_past_caches(const pd_gemm_args &a) {
  const int64_t bytes = (int64_t)*a.num_rows * a.n * 4;
  return HAS_STORES_PAST_CACHES && a.y_dtype == PD_F32 && a.epilogue == PD_STORE && bytes >= PAST_CACHES_BYTES &&
         a.n > PAST_CACHES_WIDTH && a.n % 16 == 0 && (uintptr_t)a.y % 64 == 0;
}

// acc [rows][32] of panel p becomes rows row, row + 1, ... of y. scales: int8 only, of the outputs.
template <int EPILOGUE, int Y_DTYPE, bool INT8>
void finish(const pd_gemm_args &a, int64_t row, int rows, int64_t p, const float *acc, const float *scales) {
  constexpr bool gated = is_gated(EPILOGUE);
  const int64_t width = gated ? a.n / 2 : a.n, column = gated ? p * 16 : p * 32;
  const int left = width - column < 32 ? (int)(width - column) : 32;
  F16 bias[2] = {zero16(), zero16()};
  for (int j = 0; a.bias && j < 2; j++)
    bias[j] = gated ? load16(a.bias + p * 32 + j * 16)
                    : load16_part(a.bias + column + j * 16, left > j * 16 ? left - j * 16 : 0);
  F16 scale[2] = {zero16(), zero16()};
  if constexpr (INT8) scale[0] = load16(scales), scale[1] = load16(scales + 16);
  const bool past = EPILOGUE == PD_STORE && Y_DTYPE == PD_F32 && goes_past_caches(a);
  for (int i = 0; i < rows; i++) {
    F16 r[2] = {load16(acc + i * 32), load16(acc + i * 32 + 16)};
    if constexpr (INT8) r[0] = mul16(r[0], scale[0]), r[1] = mul16(r[1], scale[1]);
    if (a.bias) r[0] = add16(r[0], bias[0]), r[1] = add16(r[1], bias[1]);
    if constexpr (EPILOGUE == PD_CLAMPED_SWIGLU) r[0] = clamped_swiglu16(r[0], r[1]);
    else if constexpr (gated) r[0] = mul16(EPILOGUE == PD_SILU_MUL ? silu16(r[0]) : gelu16(r[0]), r[1]);
    if constexpr (EPILOGUE == PD_GELU) r[0] = gelu16(r[0]), r[1] = gelu16(r[1]);
    const int64_t at = (row + i) * width + column;
    for (int j = 0; j < (gated ? 1 : 2) && left > j * 16; j++) {
      float *y = (float *)a.y + at + j * 16;
      if constexpr (EPILOGUE == PD_ADD) r[j] = add16(load16_part(y, left - j * 16), r[j]);
      if (past) store16_past_caches(y, r[j]);
      else if constexpr (Y_DTYPE == PD_F32) store16_part(y, r[j], left - j * 16);
      else store16_bf16((uint16_t *)a.y + at + j * 16, r[j], left - j * 16);
    }
  }
}

using FinishFn = void (*)(const pd_gemm_args &, int64_t, int, int64_t, const float *, const float *);
template <bool INT8>
FinishFn pick_finish(const pd_gemm_args &a) {
  static constexpr FinishFn fn[6][2] = {{finish<PD_STORE, PD_F32, INT8>, finish<PD_STORE, PD_BF16, INT8>},
                                        {finish<PD_ADD, PD_F32, INT8>, nullptr},
                                        {finish<PD_SILU_MUL, PD_F32, INT8>, finish<PD_SILU_MUL, PD_BF16, INT8>},
                                        {finish<PD_GELU_MUL, PD_F32, INT8>, finish<PD_GELU_MUL, PD_BF16, INT8>},
                                        {finish<PD_GELU, PD_F32, INT8>, finish<PD_GELU, PD_BF16, INT8>},
                                        {finish<PD_CLAMPED_SWIGLU, PD_F32, INT8>,
                                         finish<PD_CLAMPED_SWIGLU, PD_BF16, INT8>}};
  return fn[a.epilogue][a.y_dtype];
}

}  // namespace
}  // namespace pagedec
