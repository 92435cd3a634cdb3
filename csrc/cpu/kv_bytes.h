// A token's head as bytes and a scale: pd_kv_kind in pagedec.h says what they are. The same bits on every instruction
// set.
#pragma once
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr uint32_t kInfinity = 0x7f800000, kLeast = (127 - 100) << 23;  // the bits of 2^-100
constexpr uint16_t kNanScale = 0x7fc0;

// Magnitudes of floats compare like integers, infinity and NaN above all others.
uint32_t largest_magnitude(const float *x, int64_t count) {
  uint32_t top = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t u;
    memcpy(&u, x + i, 4);
    u &= 0x7fffffff;
    top = u > top ? u : top;
  }
  return top;
}

// To nearest even, of |x| below 2^22.
PD_INLINE I16 to_int8(F16 x) { return as_int(x + set16(12582912.0f)) - set16i(0x4b400000); }

// To nearest even, of |x| below 464: four bits of exponent less 7, three of mantissa; below 2^-6 steps of 2^-9.
PD_INLINE I16 to_e4m3(F16 x) {
  const F16 size = larger(x, set16(0.0f) - x);
  const I16 bits = as_int(size);
  const I16 odd = shift_right(bits, 20) - shift_left(shift_right(bits, 21), 1);
  const I16 normal = shift_right(bits + set16i(0x7ffff) + odd, 20) - set16i((127 - 7) << 3);
  const I16 small = as_int(size + set16(16384.0f)) - as_int(set16(16384.0f));  // 2^14 has steps of 2^-9
  const I16 sign = select(less(as_int(x), set16i(0)), set16i(128), set16i(0));
  return select(less(size, set16(0.015625f)), small, normal) + sign;
}

// x [dim] to bytes, at least dim rounded up to 16 of them; the scale.
inline uint16_t to_bytes(int32_t kind, const float *x, int64_t dim, uint8_t *bytes) {
  const uint32_t top = largest_magnitude(x, dim);
  if (top < kLeast || top >= kInfinity) {
    memset(bytes, 0, (uint32_t)dim);
    return top < kLeast ? 0 : kNanScale;
  }
  float size;
  memcpy(&size, &top, 4);
  bf16 scale;
  from_float(size / (kind == PD_KV_INT8 ? 127.0f : 448.0f), &scale);
  const F16 by = set16(to_float(scale));
  for (int64_t i = 0; i < dim; i += 16) {
    const F16 y = load_some(x + i, dim - i) / by;
    int32_t codes[16];
    store16i(codes, kind == PD_KV_INT8 ? to_int8(y) : to_e4m3(y));
    for (int j = 0; j < 16; j++) bytes[i + j] = (uint8_t)codes[j];
  }
  return scale.bits;
}

}  // namespace
}  // namespace pagedec
