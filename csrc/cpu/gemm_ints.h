// One vector of bytes, or of what becomes of them, of the instruction set: what weights in blocks need of it.
#pragma once
#include "cpu/gemm_vec.h"

namespace pagedec {

#if PD_LEVEL >= 2
using Ints = __m512i;
using Floats = __m512;
PD_INLINE Ints load_ints(const void *p) { return _mm512_loadu_si512(p); }
PD_INLINE void store_ints(void *p, Ints a) { _mm512_storeu_si512(p, a); }
PD_INLINE Ints set_ints(int32_t word) { return _mm512_set1_epi32(word); }
PD_INLINE Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
template <int N>
PD_INLINE Ints shift16(Ints a) {  // 16 bits each, to the right; N < 0: to the left
  if constexpr (N == 0) return a;
  else if constexpr (N > 0) return _mm512_srli_epi16(a, N);
  else return _mm512_slli_epi16(a, -N);
}
PD_INLINE Ints and_or(Ints a, Ints b, Ints c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }  // (a & b) | c
PD_INLINE Ints look_up(const uint8_t (&table)[16], Ints nibbles) {  // of each byte
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)table)), nibbles);
}
PD_INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
PD_INLINE Ints add_shorts(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
PD_INLINE Ints madd_bytes(Ints a, Ints b) { return _mm512_maddubs_epi16(a, b); }
PD_INLINE Ints madd_shorts(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
PD_INLINE Ints signed_products(Ints w, Ints x) {  // of q + 128: pairs in 16 bits
  const Ints q = _mm512_xor_si512(w, set_ints((int32_t)0x80808080));
  return madd_bytes(_mm512_abs_epi8(q), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(q), _mm512_setzero_si512(), x));
}
PD_INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
PD_INLINE Floats set_floats(float f) { return _mm512_set1_ps(f); }
PD_INLINE Floats load_floats(const float *p) { return _mm512_loadu_ps(p); }
PD_INLINE void store_floats(float *p, Floats a) { _mm512_storeu_ps(p, a); }
PD_INLINE Floats load_halves(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
PD_INLINE Floats load_bytes(const char *p) {
  return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
PD_INLINE Floats load_signed(const char *p) {
  return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
PD_INLINE Floats add_floats(Floats a, Floats b) { return _mm512_add_ps(a, b); }
PD_INLINE Floats sub_floats(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
PD_INLINE Floats mul_floats(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
#elif PD_LEVEL == 1
using Ints = __m256i;
using Floats = __m256;
PD_INLINE Ints load_ints(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
PD_INLINE void store_ints(void *p, Ints a) { _mm256_storeu_si256((__m256i *)p, a); }
PD_INLINE Ints set_ints(int32_t word) { return _mm256_set1_epi32(word); }
PD_INLINE Ints and_ints(Ints a, Ints b) { return _mm256_and_si256(a, b); }
template <int N>
PD_INLINE Ints shift16(Ints a) {
  if constexpr (N == 0) return a;
  else if constexpr (N > 0) return _mm256_srli_epi16(a, N);
  else return _mm256_slli_epi16(a, -N);
}
PD_INLINE Ints and_or(Ints a, Ints b, Ints c) { return _mm256_or_si256(_mm256_and_si256(a, b), c); }
PD_INLINE Ints look_up(const uint8_t (&table)[16], Ints nibbles) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table)), nibbles);
}
PD_INLINE Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
PD_INLINE Ints add_shorts(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
PD_INLINE Ints madd_bytes(Ints a, Ints b) { return _mm256_maddubs_epi16(a, b); }
PD_INLINE Ints madd_shorts(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
PD_INLINE Ints signed_products(Ints w, Ints x) {
  const Ints q = _mm256_xor_si256(w, set_ints((int32_t)0x80808080));
  return madd_bytes(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
}
PD_INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
PD_INLINE Floats set_floats(float f) { return _mm256_set1_ps(f); }
PD_INLINE Floats load_floats(const float *p) { return _mm256_loadu_ps(p); }
PD_INLINE void store_floats(float *p, Floats a) { _mm256_storeu_ps(p, a); }
PD_INLINE Floats load_halves(const char *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
PD_INLINE Floats load_bytes(const char *p) {
  return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
PD_INLINE Floats load_signed(const char *p) {
  return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
PD_INLINE Floats add_floats(Floats a, Floats b) { return _mm256_add_ps(a, b); }
PD_INLINE Floats sub_floats(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
PD_INLINE Floats mul_floats(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
#endif

}  // namespace pagedec
