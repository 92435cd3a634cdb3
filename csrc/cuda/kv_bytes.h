// Bytes of a KV cache on a device: what a number becomes, and what a byte is (pd_kv_kind in pagedec.h). A head's
// dimensions lie in groups of 16, of each the first eight and the last eight in turn: as tensor cores take them, so
// that four bytes of a token are two pairs for one instruction, and two bytes of two tokens a pair for each of two.
#pragma once
#include "cuda/matrix.h"

namespace pagedec {

constexpr int kScaleBytes = 2;  // of a token, behind the bytes of a block's head
constexpr int kGroup = 16;

// Where a dimension lies among the bytes of its head, of whole groups.
PD_DEVICE int place_of_byte(int d) {
  const uint32_t at = (uint32_t)d % kGroup;
  return (int)((uint32_t)d - at + at % 8 * 2 + at / 8);
}

// To nearest even, of |x| below 2^22.
PD_DEVICE uint8_t to_int8(float x) { return (uint8_t)(float_bits(x + 12582912.0f) - 0x4b400000u); }
// To nearest even, of |x| below 464: four bits of exponent less 7, three of mantissa; below 2^-6 steps of 2^-9.
PD_DEVICE uint8_t to_e4m3(float x) {
  const uint32_t bits = float_bits(x) & 0x7fffffffu, sign = float_bits(x) >> 31 << 7;
  const float size = bits_float(bits);
  if (size < 0.015625f) return (uint8_t)((float_bits(size + 16384.0f) - float_bits(16384.0f)) | sign);
  return (uint8_t)((((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3)) | sign);
}
template <int kKind>
PD_DEVICE uint8_t to_byte(float x) {
  return kKind == PD_KV_INT8 ? to_int8(x) : to_e4m3(x);
}

// The scale of a head whose largest magnitude has these bits: magnitudes of floats compare like integers, infinity and
// NaN above all others.
template <int kKind>
PD_DEVICE bf16 scale_of(uint32_t top) {
  constexpr uint32_t kInfinity = 0x7f800000u, kLeast = (127 - 100) << 23;  // 2^-100
  constexpr uint16_t kNan = 0x7fc0;
  if (top < kLeast) return {0};
  if (top >= kInfinity) return {kNan};
  return from_float<bf16>(quotient(bits_float(top), kKind == PD_KV_INT8 ? 127.0f : 448.0f));
}

// Exact, and so are the others. e4m3's exponent has 120 less than fp32's; its NaN, which nobody writes, becomes 480.
template <int kKind>
PD_DEVICE float to_number(uint8_t x) {
  if (kKind == PD_KV_INT8) return (float)(int8_t)x;
  return bits_float((uint32_t)(x & 0x7f) << 20 | (uint32_t)(x & 0x80) << 24) * 0x1p120f;
}
// The lower bytes of both halves of x as a pair of E. A number's bits are put where it can be told by one product.
template <class E, int kKind>
PD_DEVICE uint32_t widened(uint32_t x);
template <>
PD_DEVICE uint32_t widened<bf16, PD_KV_INT8>(uint32_t x) {  // 128 and lower bits, less 128, or 256 of a sign
  return multiply_pairs<bf16>((x & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (x & 0x007f007fu) | 0x43004300u);
}
template <>
PD_DEVICE uint32_t widened<bf16, PD_KV_FP8>(uint32_t x) {  // times 2^120
  return multiply_pairs<bf16>((x << 8 & 0x80008000u) | (x << 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
}
template <>
PD_DEVICE uint32_t widened<fp16, PD_KV_INT8>(uint32_t x) {  // 1152 more, less 1152
  return multiply_pairs<fp16>((x & 0x00ff00ffu) ^ 0x64806480u, 0x3c003c00u, 0xe480e480u);
}
template <>
PD_DEVICE uint32_t widened<fp16, PD_KV_FP8>(uint32_t x) {  // times 2^8
  return multiply_pairs<fp16>((x << 8 & 0x80008000u) | (x << 7 & 0x3f803f80u), 0x5c005c00u, 0x80008000u);
}
// Bytes 0 and 2, then 1 and 3.
template <class E, int kKind>
PD_DEVICE void widen(uint32_t x, uint32_t &even, uint32_t &odd) {
  even = widened<E, kKind>(x), odd = widened<E, kKind>(x >> 8);
}

}  // namespace pagedec
