// Checks that argument records have in common; each names kernel, field, value and limit.
#pragma once
#include <cstdint>

#include "common/internal.h"

namespace pagedec {
namespace {

#if defined(PD_EMULATED_DEVICE)
}
namespace emulate {
bool may_reach(const void *);  // emulate/memory.h
}
namespace {
inline int check_pointer(const char *kernel, const char *field, const void *p) {
  if (p && !emulate::may_reach(p)) return fail("%s: %s points to memory that is not the device's", kernel, field);
#else
inline int check_pointer(const char *kernel, const char *field, const void *p) {
#endif
  return p ? 0 : fail("%s: %s is NULL; it must point to data", kernel, field);
}
inline int check_optional(const char *kernel, const char *field, const void *p) {
  return p ? check_pointer(kernel, field, p) : 0;
}
inline int check_range(const char *kernel, const char *field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return 0;
  return fail("%s: %s is %lld; it must be %lld to %lld", kernel, field, (long long)value, (long long)low,
              (long long)high);
}
// What a pointer of a record leads to can be looked at where the device's memory is the host's.
#if defined(PD_DEVICE_MEMORY)
constexpr bool kReadsRecords = false;
#else
constexpr bool kReadsRecords = true;
#endif
// A CPU computes in fp32 and bf16.
#if defined(PD_DEVICE_MEMORY) || defined(PD_EMULATED_DEVICE)
constexpr bool kHasF16 = true;
#else
constexpr bool kHasF16 = false;
#endif
// Floats of 4 bits are multiplied by a CPU alone.
constexpr bool kHasMxfp4 = !kHasF16, kHasFp8 = !kHasF16;
inline int check_count(const char *kernel, const char *field, const int32_t *count) {
  if (check_pointer(kernel, field, count)) return -1;
  return kReadsRecords ? check_range(kernel, field, *count, 0, INT32_MAX) : 0;
}
// An array with an element (or row) for each of `count`: of none, there need be no array.
inline int check_array(const char *kernel, const char *field, const void *p, const int32_t *count) {
  return kReadsRecords && *count == 0 ? 0 : check_pointer(kernel, field, p);
}
inline int check_dtype(const char *kernel, int32_t dtype, const char *field = "dtype") {
  if (dtype == PD_F32 || dtype == PD_BF16 || (kHasF16 && dtype == PD_F16)) return 0;
  if (kHasF16)
    return fail("%s: %s is %d; it must be %d (fp32), %d (bf16) or %d (fp16)", kernel, field, dtype, PD_F32, PD_BF16,
                PD_F16);
  return fail("%s: %s is %d%s; it must be %d (fp32) or %d (bf16)", kernel, field, dtype,
              dtype == PD_F16 ? " (fp16), which a CPU does not compute in" : "", PD_F32, PD_BF16);
}
inline int check_kv_kind(const char *kernel, int32_t kind) {
  if (kind >= PD_KV_PLAIN && kind <= PD_KV_FP8) return 0;
  return fail("%s: kv_kind is %d; it must be %d (as dtype says), %d (int8) or %d (fp8)", kernel, kind, PD_KV_PLAIN,
              PD_KV_INT8, PD_KV_FP8);
}
// One cache block of a head: whole pairs along the head in K and along the block in V, in bf16; whole scales of bytes.
inline int check_cache_shape(const char *kernel, int32_t kv_heads, int32_t head_dim, int32_t block_size, int32_t dtype,
                             int32_t kv_kind) {
  if (check_dtype(kernel, dtype) || check_kv_kind(kernel, kv_kind)) return -1;
  if (check_range(kernel, "kv_heads", kv_heads, 1, 65536)) return -1;
  if (check_range(kernel, "head_dim", head_dim, 2, 1024)) return -1;
  if (check_range(kernel, "block_size", block_size, 1, 65536)) return -1;
  if (head_dim % 2) return fail("%s: head_dim is %d; it must be even", kernel, head_dim);
  if (dtype == PD_BF16 && block_size % 2)
    return fail("%s: block_size is %d; in bf16 it must be even", kernel, block_size);
  return 0;
}
// Of memory: a size, and what is copied.
inline int check_memory(const char *name, const pd_context *context, int64_t num_bytes) {
  if (!context) return fail("%s: context is NULL", name);
  return check_range(name, "num_bytes", num_bytes, 0, INT64_MAX / 2);
}
inline int check_copy(const char *name, const pd_context *context, const void *to, const void *from,
                      int64_t num_bytes) {
  if (check_memory(name, context, num_bytes)) return -1;
  if (num_bytes && !to) return fail("%s: to is NULL; it must point to %lld bytes", name, (long long)num_bytes);
  if (num_bytes && !from) return fail("%s: from is NULL; it must point to %lld bytes", name, (long long)num_bytes);
  return 0;
}

}  // namespace
}  // namespace pagedec
