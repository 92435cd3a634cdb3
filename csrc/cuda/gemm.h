// What the kernels of linear layers share: the order of sums, how rows are read, and what becomes of a sum.
//
// Bits     Every output is a sum over chunks of 256 of k, from the first on; a chunk's is the tensor cores' over groups
//          of 16 of k, in order (fp32: one chain of products). Which kernel computes it, who in it, how many rows there
//          are and where in their tile rows stand changes nothing.
// Layout   W of 16 bits: N padded to 32, K to 32, with zeros. A panel of 32 outputs is steps of 32 of k, each 2,048
//          bytes in a row: of eight outputs at a time four pieces of 8 of k, 16 bytes an output. So a piece of eight
//          outputs is the 128 bytes that tensor cores are given as a matrix, and weights are read as they lie. In fp32
//          [N][K].
#pragma once
#include "common/blocks.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"

namespace pagedec::gemm {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kPanel = 32, kChunk = 256, kStep = 32, kTileRows = 16;
constexpr int kPanelTiles = kPanel / 8;
constexpr int kSumStride = kPanel + 8;   // of a row of a panel's sums in shared memory: rows begin in different banks
constexpr int kFewRows = 2 * kTileRows;  // for which a layer is its weights (gemm_few.cu)

PD_DEVICE int64_t pad(int64_t k) { return (k + kStep - 1) / kStep * kStep; }

struct alignas(16) Eight {  // values of 16 bits, as the tensor cores take them: pairs
  uint32_t pairs[4];
};
// Of a row that may end, or begin anywhere: what is not there is 0. is_aligned (below): eight are there, or none.
template <class E>
PD_DEVICE Eight load_some(const E *p, int64_t num_left, bool is_aligned) {
  Eight x{};
  if (num_left <= 0) return x;
  if (is_aligned) return load_whole<Eight>(p);
  PD_ROLLED for (int i = 7; i >= 0; i--) {  // seldom taken, and inlined for every step
    PD_UNROLL for (int pair = 3; pair > 0; pair--) x.pairs[pair] = x.pairs[pair] << 16 | x.pairs[pair - 1] >> 16;
    x.pairs[0] = x.pairs[0] << 16 | (i < num_left ? p[i].bits : 0u);
  }
  return x;
}
// Where a weight of 16 bits lies, in numbers.
PD_DEVICE int64_t place_of_half(int64_t output, int64_t k, int64_t padded_k) {
  const int64_t of = output % kPanel, at = k % kStep;
  return (output - of) * padded_k + (k - at) * kPanel + ((of / 8 * (kStep / 8) + at / 8) * 8 + of % 8) * 8 + at % 8;
}
PD_DEVICE bool is_aligned(const void *x, int64_t k) { return k % 8 == 0 && (uintptr_t)x % 16 == 0; }

PD_DEVICE constexpr bool is_gated(int epilogue) {
  return epilogue == PD_SILU_MUL || epilogue == PD_GELU_MUL || epilogue == PD_CLAMPED_SWIGLU;
}
// Of a sum with its bias; `up`: that of the pair, where it is gated. All are x sigmoid(z), in one body.
PD_DEVICE float activated(int epilogue, float x, float up) {
  if (!is_gated(epilogue) && epilogue != PD_GELU) return x;
  float z = x;
  if (epilogue == PD_CLAMPED_SWIGLU) {  // NaN stays NaN
    x = x > 7.0f ? 7.0f : x, up = (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
    z = 1.702f * x;
  } else if (epilogue != PD_SILU_MUL) {  // 2 sqrt(2 / pi) (x + 0.044715 x^3), which is the tanh approximation of gelu
    z = 1.5957691216f * (x + 0.044715f * x * x * x);
  }
  x = quotient(x, 1.0f + expf(-z));
  return epilogue == PD_GELU ? x : x * up;
}

PD_DEVICE void store(const pd_gemm_args &a, int64_t at, float x) {
  const uint16_t half = a.y_dtype == PD_BF16 ? from_float<bf16>(x).bits : from_float<fp16>(x).bits;
  if (a.y_dtype == PD_F32) ((float *)a.y)[at] = x;  // a branch between the two conversions takes more registers
  else ((uint16_t *)a.y)[at] = half;
}

// What one output of a row is added to, if it is: a lane a column of the panel.
PD_DEVICE float before_sum(const pd_gemm_args &a, int64_t row, int64_t panel, bool is_there) {
  const int64_t column = panel * kPanel + thread_index() % kWarp;
  return is_there && a.epilogue == PD_ADD && column < a.n ? ((const float *)a.y)[row * a.n + column] : 0.0f;
}
// One output of a row, to y. before: before_sum(), which may be asked for long before.
PD_DEVICE void finish(const pd_gemm_args &a, int64_t row, int64_t panel, float x, bool is_there, float before) {
  const int lane = thread_index() % kWarp;
  const bool gated = is_gated(a.epilogue);
  const int64_t column = gated ? panel * (kPanel / 2) + lane : panel * kPanel + lane;
  const int64_t width = gated ? a.n / 2 : a.n;
  if (a.bias && (gated || column < width)) x = x + a.bias[panel * kPanel + lane];
  x = activated(a.epilogue, x, shuffle_xor(x, kPanel / 2));
  if (!is_there || column >= width || (gated && lane >= kPanel / 2)) return;
  if (a.epilogue == PD_ADD) x = before + x;
  store(a, row * width + column, x);
}
PD_DEVICE void finish(const pd_gemm_args &a, int64_t row, int64_t panel, float x, bool is_there) {
  finish(a, row, panel, x, is_there, before_sum(a, row, panel, is_there));
}

// For up to so many rows of bf16 or fp16; where there are more, it does nothing (gemm_few.cu).
int enqueue_few(pd_context &, const pd_gemm_args &, int most_rows);
// For more than kFewRows of them; where there are not as many, it does nothing (gemm_many.cu).
int enqueue_many(pd_context &, const pd_gemm_args &);
// Whether a layer's many rows are warpgroups': on devices of compute capability 9.0, of weights in the rows' own dtype
// (gemm_hopper.cu). And those, where there are more than few_rows.
bool is_for_hopper(const pd_context &, const pd_gemm_args &);
int enqueue_hopper(pd_context &, const pd_gemm_args &, int few_rows);
// Rows for which a layer's kernel of few is the faster one.
int few_rows(const pd_context &, const pd_gemm_args &);
// With int8 weights: any number of rows, and more than kFewRows (gemm_int8.cu, gemm_int8_many.cu).
int enqueue_int8(pd_context &, const pd_gemm_args &);
int enqueue_int8_many(pd_context &, const pd_gemm_args &);
// And with weights in blocks (gemm_blocks.cu, gemm_blocks_many.cu).
int enqueue_blocks(pd_context &, const pd_gemm_args &);
int enqueue_blocks_many(pd_context &, const pd_gemm_args &, const Segments &);

}  // namespace pagedec::gemm
