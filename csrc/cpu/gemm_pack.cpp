// Weights into panels: [N/32][steps][32] words of 4 bytes, a word being two bf16 or one fp32 of one output's row.
#include <cstring>

#include "common/internal.h"

using namespace pagedec;

extern "C" {
int64_t pd_packed_bytes(int64_t n, int64_t k, int32_t dtype) {
  if (n < 1) return fail("pd_packed_bytes: n is %lld; it must be 1 or more", (long long)n);
  if (k < 1) return fail("pd_packed_bytes: k is %lld; it must be 1 or more", (long long)k);
  if (dtype != PD_F32 && dtype != PD_BF16) return fail("pd_packed_bytes: dtype is %d; it must be 0 (fp32) or 1 (bf16)", dtype);
  return (n + 31) / 32 * (dtype == PD_BF16 ? (k + 1) / 2 : k) * 128;
}

int pd_pack(const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  if (!w) return fail("pd_pack: w is NULL");
  if (!packed) return fail("pd_pack: packed is NULL");
  if ((uintptr_t)packed % 64) return fail("pd_pack: packed is at %p; it must be 64-byte aligned", packed);
  if (pd_packed_bytes(n, k, dtype) < 0) return -1;
  const int64_t row_bytes = k * (dtype == PD_BF16 ? 2 : 4), steps = (row_bytes + 3) / 4, whole = row_bytes / 4;
  const int threads = num_threads();
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
}
