#include "common/check.h"

namespace pagedec {

int check_gemm(const pd_gemm_args &a) {
  if (!a.num_rows) return fail("pd_gemm: num_rows is NULL");
  const int rows = kReadsRecords ? *a.num_rows : 1;
  if (rows < 0) return fail("pd_gemm: num_rows is %d; it must be 0 or more", rows);
  if (a.n < 1) return fail("pd_gemm: n is %d; it must be 1 or more", a.n);
  if (a.k < 1) return fail("pd_gemm: k is %d; it must be 1 or more", a.k);
  if (a.dtype != PD_F32 && a.dtype != PD_BF16)
    return fail("pd_gemm: dtype is %d; it must be 0 (fp32) or 1 (bf16)", a.dtype);
  if (a.y_dtype != PD_F32 && a.y_dtype != PD_BF16)
    return fail("pd_gemm: y_dtype is %d; it must be 0 (fp32) or 1 (bf16)", a.y_dtype);
  if (a.epilogue < PD_STORE || a.epilogue > PD_GELU)
    return fail("pd_gemm: epilogue is %d; it must be %d to %d", a.epilogue, PD_STORE, PD_GELU);
  if (a.epilogue == PD_ADD && a.y_dtype != PD_F32)
    return fail("pd_gemm: y_dtype is %d; with PD_ADD it must be 0 (fp32)", a.y_dtype);
  if ((a.epilogue == PD_SILU_MUL || a.epilogue == PD_GELU_MUL) && a.n % 2)
    return fail("pd_gemm: n is %d; with gate and up rows it must be even", a.n);
  if (a.quantization != PD_PLAIN && a.quantization != PD_INT8)
    return fail("pd_gemm: quantization is %d; it must be 0 (none) or 1 (int8)", a.quantization);
  if (!a.packed) return fail("pd_gemm: packed is NULL");
  if ((uintptr_t)a.packed % 64) return fail("pd_gemm: packed is at %p; it must be 64-byte aligned", a.packed);
  if (a.next_bytes < 0) return fail("pd_gemm: next_bytes is %lld; it must be 0 or more", (long long)a.next_bytes);
  if (rows && !a.x) return fail("pd_gemm: x is NULL with %d rows", rows);
  if (rows && !a.y) return fail("pd_gemm: y is NULL with %d rows", rows);
  return 0;
}

// Sizes that a linear layer can have, of which no number of bytes overflows.
int check_size(const char *name, int64_t n, int64_t k) {
  constexpr int64_t MOST = INT32_MAX, MOST_WEIGHTS = (int64_t)1 << 48;
  if (n < 1 || n > MOST) return fail("%s: n is %lld; it must be 1 to %lld", name, (long long)n, (long long)MOST);
  if (k < 1 || k > MOST) return fail("%s: k is %lld; it must be 1 to %lld", name, (long long)k, (long long)MOST);
  if (n * k <= MOST_WEIGHTS) return 0;
  return fail("%s: n * k is %lld; it must be at most %lld", name, (long long)(n * k), (long long)MOST_WEIGHTS);
}

int check_pack(const char *name, const pd_context *context, const void *w, const void *packed) {
  if (!context) return fail("%s: context is NULL", name);
  if (!w) return fail("%s: w is NULL", name);
  if (!packed) return fail("%s: packed is NULL", name);
  if ((uintptr_t)packed % 64) return fail("%s: packed is at %p; it must be 64-byte aligned", name, packed);
  return 0;
}

}  // namespace pagedec
