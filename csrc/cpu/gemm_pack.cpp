// Weights into panels: [N/32][steps][32] words of 4 bytes, a word being two bf16 or one fp32 of one output's row.
#include <omp.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/check.h"
#include "cpu/gemm_fp8.h"
#include "cpu/gemm_int8.h"
#include "cpu/gemm_weight_only.h"

namespace pagedec {
namespace {

// w of one output: q + 128 [k] and its scale. Every operation is one of IEEE 754: the same on every instruction set.
void quantize_output(const void *w, int32_t dtype, int64_t k, float *wide, uint8_t *q, float *scale) {
  const float *f = (const float *)w;
  if (dtype == PD_BF16) {
    for (int64_t i = 0; i < k; i++) {
      const uint32_t u = (uint32_t)((const uint16_t *)w)[i] << 16;
      memcpy(wide + i, &u, 4);
    }
    f = wide;
  }
  uint32_t max_bits = 0;  // magnitudes compare like integers
  for (int64_t i = 0; i < k; i++) {
    uint32_t u;
    memcpy(&u, f + i, 4);
    u &= 0x7fffffff;
    max_bits = u > max_bits ? u : max_bits;
  }
  float max;
  memcpy(&max, &max_bits, 4);
  const float by = int8_factor(max);
  *scale = max / 127.f;
  if (by == 0) return (void)memset(q, 128, k);
  for (int64_t i = 0; i < k; i++) q[i] = (uint8_t)(int8_round(f[i] * by) + 128);
}

struct Free {
  void operator()(void *p) const { free(p); }
};

// W in int8: panels of 32 scales and what place(to, q, padded, rows) makes of 32 rows of q + 128, `padded` bytes apart.
template <class Place>
int pack_integers(const char *name, pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype,
                  int64_t panel_bytes, void *packed, Place place) {
  if (check_pack(name, context, w, packed) || check_dtype(name, dtype)) return -1;
  if (dtype != PD_F32 && dtype != PD_BF16) return fail("%s: dtype is %d; it must be 0 (fp32) or 1 (bf16)", name, dtype);
  if (check_size(name, n, k)) return -1;
  const int64_t padded = (k + 3) / 4 * 4, row_bytes = k * (dtype == PD_BF16 ? 2 : 4);
  const int threads = num_threads(*context);
  // for each thread: one row in fp32, and 32 rows of q
  const int64_t scratch_bytes = (padded * 36 + 63) / 64 * 64;
  const std::unique_ptr<char, Free> scratch((char *)aligned_alloc(64, threads * scratch_bytes));
  if (!scratch) return fail("%s: no memory for %lld bytes of scratch", name, (long long)(threads * scratch_bytes));
#pragma omp parallel num_threads(threads)
  {
    float *wide = (float *)(scratch.get() + omp_get_thread_num() * scratch_bytes);
    uint8_t *q = (uint8_t *)(wide + padded);
    memset(q, 0, padded * 32);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < (n + 31) / 32; p++) {
      char *to = (char *)packed + p * panel_bytes;
      const int rows = n - p * 32 < 32 ? (int)(n - p * 32) : 32;
      float scales[32] = {};
      for (int c = 0; c < rows; c++)
        quantize_output((const char *)w + (p * 32 + c) * row_bytes, dtype, k, wide, q + c * padded, scales + c);
      static_assert(INT8_HEADER == sizeof scales && WEIGHT_ONLY_HEADER == sizeof scales);
      memcpy(to, scales, sizeof scales);
      if (rows < 32) memset(to + sizeof scales, 0, panel_bytes - sizeof scales);
      place(to + sizeof scales, q, padded, rows);
    }
  }
  return 0;
}

}  // namespace
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int64_t pd_packed_bytes(int64_t n, int64_t k, int32_t dtype) {
  if (check_size("pd_packed_bytes", n, k) || check_dtype("pd_packed_bytes", dtype)) return -1;
  return (n + 31) / 32 * (dtype == PD_BF16 ? (k + 1) / 2 : k) * 128;
}

int pd_pack(pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  if (check_pack("pd_pack", context, w, packed)) return -1;
  if (pd_packed_bytes(n, k, dtype) < 0) return -1;
  const int64_t row_bytes = k * (dtype == PD_BF16 ? 2 : 4), steps = (row_bytes + 3) / 4, whole = row_bytes / 4;
  const int threads = num_threads(*context);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t p = 0; p < (n + 31) / 32; p++) {
    char *to = (char *)packed + p * steps * 128;
    const int rows = n - p * 32 < 32 ? (int)(n - p * 32) : 32;
    const char *from = (const char *)w + p * 32 * row_bytes;
    if (rows < 32) memset(to, 0, steps * 128);
    for (int64_t s = 0; s < whole; s++)
      for (int c = 0; c < rows; c++) memcpy(to + s * 128 + c * 4, from + c * row_bytes + s * 4, 4);
    for (int c = 0; c < rows && whole < steps; c++) {
      uint32_t last = 0;  // an odd k: the pair's second half is zero
      memcpy(&last, from + c * row_bytes + whole * 4, 2);
      memcpy(to + whole * 128 + c * 4, &last, 4);
    }
  }
  return 0;
}

int64_t pd_packed_int8_bytes(int64_t n, int64_t k) {
  if (check_size("pd_packed_int8_bytes", n, k)) return -1;
  return (n + 31) / 32 * (INT8_HEADER + (k + 3) / 4 * 128);
}

int pd_pack_int8(pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  const int64_t steps = (k + 3) / 4;
  return pack_integers("pd_pack_int8", context, w, n, k, dtype, INT8_HEADER + steps * 128, packed,
                       [=](char *to, const uint8_t *q, int64_t padded, int rows) {
                         for (int64_t s = 0; s < steps; s++)
                           for (int c = 0; c < rows; c++) memcpy(to + s * 128 + c * 4, q + c * padded + s * 4, 4);
                       });
}

int64_t pd_packed_int8_weight_only_bytes(int64_t n, int64_t k) {
  if (check_size("pd_packed_int8_weight_only_bytes", n, k)) return -1;
  return (n + 31) / 32 * (WEIGHT_ONLY_HEADER + (k + 1) / 2 * WEIGHT_ONLY_PAIR);
}

int pd_pack_int8_weight_only(pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  const int64_t panel_bytes = WEIGHT_ONLY_HEADER + (k + 1) / 2 * WEIGHT_ONLY_PAIR;
  return pack_integers("pd_pack_int8_weight_only", context, w, n, k, dtype, panel_bytes, packed,
                       [=](char *to, const uint8_t *q, int64_t padded, int rows) {
                         for (int c = 0; c < rows; c++, q += padded)
                           for (int64_t i = 0; i < k + k % 2; i++)
                             to[weight_only_at(c, i)] = i < k ? (char)(q[i] ^ 0x80) : 0;
                       });
}

int64_t pd_packed_fp8_bytes(int64_t n, int64_t k) {
  if (check_size("pd_packed_fp8_bytes", n, k)) return -1;
  return (n + 31) / 32 * (fp8_header(k) + (k + 1) / 2 * FP8_PAIR);
}

int pd_pack_fp8(pd_context *context, const void *blocks, int64_t n, int64_t k, void *packed) {
  if (check_pack("pd_pack_fp8", context, blocks, packed) || check_size("pd_pack_fp8", n, k)) return -1;
  constexpr int64_t block_bytes = sizeof(float) + PD_FP8_GROUP;
  const int64_t row_blocks = (k + PD_FP8_GROUP - 1) / PD_FP8_GROUP, header = fp8_header(k);
  const int64_t panel_bytes = header + (k + 1) / 2 * FP8_PAIR;
  const int threads = num_threads(*context);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t p = 0; p < (n + 31) / 32; p++) {
    char *to = (char *)packed + p * panel_bytes;
    const int rows = n - p * 32 < 32 ? (int)(n - p * 32) : 32;
    if (rows < 32 || k % 2) memset(to, 0, panel_bytes);
    for (int c = 0; c < rows; c++) {
      const char *from = (const char *)blocks + (p * 32 + c) * row_blocks * block_bytes;
      for (int64_t b = 0; b < row_blocks; b++, from += block_bytes) {
        float scale;
        memcpy(&scale, from, sizeof scale);
        ((float *)to)[b * 32 + c] = scale * FP8_SCALE;
        const int64_t begin = b * PD_FP8_GROUP, end = begin + PD_FP8_GROUP < k ? begin + PD_FP8_GROUP : k;
        for (int64_t i = begin; i < end; i++) to[header + fp8_at(c, i)] = from[sizeof scale + i - begin];
      }
    }
  }
  return 0;
}
}
