#include "common/check.h"

namespace pagedec {
namespace {

// Where there may be something, it is the device's.
int check_gemm_places(const pd_gemm_args &a, bool has_rows) {
  const char *name = "pd_gemm";
  if (has_rows && (check_optional(name, "x", a.x) || check_optional(name, "y", a.y))) return -1;
  return check_optional(name, "packed", a.packed) || check_optional(name, "bias", a.bias) ||
                 check_optional(name, "next_packed", a.next_packed)
             ? -1
             : 0;
}

}  // namespace

int check_gemm(const pd_gemm_args &a) {
  if (!a.num_rows) return fail("pd_gemm: num_rows is NULL");
  if (check_optional("pd_gemm", "num_rows", a.num_rows)) return -1;
  const int rows = kReadsRecords ? *a.num_rows : 1;
  if (rows < 0) return fail("pd_gemm: num_rows is %d; it must be 0 or more", rows);
  if (a.n < 1) return fail("pd_gemm: n is %d; it must be 1 or more", a.n);
  if (a.k < 1) return fail("pd_gemm: k is %d; it must be 1 or more", a.k);
  if (check_dtype("pd_gemm", a.dtype) || check_dtype("pd_gemm", a.y_dtype, "y_dtype")) return -1;
  if (a.epilogue < PD_STORE || a.epilogue > PD_CLAMPED_SWIGLU)
    return fail("pd_gemm: epilogue is %d; it must be %d to %d", a.epilogue, PD_STORE, PD_CLAMPED_SWIGLU);
  if (a.epilogue == PD_ADD && a.y_dtype != PD_F32)
    return fail("pd_gemm: y_dtype is %d; with PD_ADD it must be 0 (fp32)", a.y_dtype);
  if (is_gated(a.epilogue) && a.n % 2)
    return fail("pd_gemm: n is %d; with gate and up rows it must be even", a.n);
  if (a.quantization < PD_PLAIN || a.quantization > (kHasFp8 ? PD_FP8 : PD_INT8_WEIGHT_ONLY))
    return fail("pd_gemm: quantization is %d; it must be 0 (none), 1 (int8), 2 (blocks), 3 (int8, weight only)%s",
                a.quantization, kHasFp8 ? " or 4 (fp8)" : ", and not 4 (fp8), which a device's kernels do not have");
  if (a.quantization == PD_BLOCKS && check_segments("pd_gemm", a.segments, a.num_segments, a.n, a.k)) return -1;
  if (!a.packed) return fail("pd_gemm: packed is NULL");
  if ((uintptr_t)a.packed % 64) return fail("pd_gemm: packed is at %p; it must be 64-byte aligned", a.packed);
  if (a.next_bytes < 0) return fail("pd_gemm: next_bytes is %lld; it must be 0 or more", (long long)a.next_bytes);
  if (a.x_rows < 0) return fail("pd_gemm: x_rows is %d; it must be 0 or more", a.x_rows);
  if (kReadsRecords && a.x_rows && a.x_rows < rows)
    return fail("pd_gemm: x_rows is %d; with %d rows it must be 0 or at least as many", a.x_rows, rows);
  if (rows && !a.x) return fail("pd_gemm: x is NULL with %d rows", rows);
  if (rows && !a.y) return fail("pd_gemm: y is NULL with %d rows", rows);
  return check_gemm_places(a, rows > 0);
}

int block_values(int32_t format) {
  switch (format) {
    case PD_Q4_0: case PD_Q8_0: case PD_INT4_ZERO_32: case PD_MXFP4: return 32;
    case PD_INT4_128: case PD_INT4_ZERO_128: return 128;
    case PD_Q4_K: case PD_Q6_K: return 256;
    default: return 0;
  }
}

int check_blocks(const char *name, int64_t k, int32_t format) {
  const int values = block_values(format);
  if (!values || (format == PD_MXFP4 && !kHasMxfp4))
    return fail("%s: format is %d%s; it must be %d to %d", name, format,
                values ? " (MXFP4), which a device's kernels do not have" : "", PD_Q4_0,
                kHasMxfp4 ? PD_MXFP4 : PD_INT4_ZERO_128);
  if (k % values == 0) return 0;
  return fail("%s: k is %lld; with format %d it must be a multiple of %d", name, (long long)k, format, values);
}

int check_segments(const char *name, const pd_segment *segments, int32_t num_segments, int64_t n, int64_t k) {
  if (!segments) return fail("%s: segments is NULL; a weight in blocks must have them", name);
  if (check_range(name, "num_segments", num_segments, 1, PD_MAX_SEGMENTS)) return -1;
  for (int i = 0; i < num_segments; i++) {
    const int first = segments[i].first_output, least = i ? segments[i - 1].first_output + 32 : 0;
    if (check_blocks(name, k, segments[i].format)) return -1;
    if (i == 0 ? first != 0 : first % 32 || first < least || first >= n)
      return fail("%s: segments[%d].first_output is %d; it must be %s%d", name, i, first,
                  i ? "a multiple of 32 below n, at least " : "", least);
  }
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
