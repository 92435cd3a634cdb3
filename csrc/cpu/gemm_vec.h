// Sixteen fp32 lanes, whatever the instruction set: one zmm, two ymm, or a portable vector. Only what the linear layers
// need.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/internal.h"
#if PD_LEVEL >= 1
#pragma GCC diagnostic push  // gcc 12's own header: "undefined" vectors are read before they are written, on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "cpu/vectors.h"
#pragma GCC diagnostic pop
#endif

namespace pagedec {

PD_INLINE uint16_t bf16_from_float(float f) {  // to nearest even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
PD_INLINE uint32_t load_word(const void *p) {
  uint32_t u;
  memcpy(&u, p, 4);
  return u;
}

// ---------------------------------------------------------------------------------------------------- AVX-512
#if PD_LEVEL >= 2
using F16 = __m512;
PD_INLINE F16 zero16() { return _mm512_setzero_ps(); }
PD_INLINE F16 set16(float f) { return _mm512_set1_ps(f); }
PD_INLINE F16 load16(const void *p) { return _mm512_loadu_ps(p); }
PD_INLINE void store16(float *p, F16 a) { _mm512_storeu_ps(p, a); }
PD_INLINE F16 add16(F16 a, F16 b) { return _mm512_add_ps(a, b); }
PD_INLINE F16 mul16(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
PD_INLINE F16 div16(F16 a, F16 b) { return _mm512_div_ps(a, b); }
PD_INLINE F16 fma16(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
PD_INLINE F16 set_word16(uint32_t w) { return _mm512_castsi512_ps(_mm512_set1_epi32((int)w)); }
// 16 pairs of bf16: the even (first) and the odd (second) of each, widened
PD_INLINE F16 even16(F16 a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16)); }
using OddMask = __m512i;
PD_INLINE OddMask odd_mask() { return _mm512_set1_epi32((int)0xffff0000); }
PD_INLINE F16 odd16(F16 a, OddMask mask) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), mask));
}
PD_INLINE F16 pair_of_upper_halves(F16 even, F16 odd) {  // where the lower one of each odd is zero
  return _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd)));
}
PD_INLINE __mmask16 mask16(int count) { return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1); }
PD_INLINE F16 load16_part(const float *p, int count) { return _mm512_maskz_loadu_ps(mask16(count), p); }
PD_INLINE void store16_part(float *p, F16 a, int count) {  // masked stores are microcode on some processors
  if (count >= 16) _mm512_storeu_ps(p, a);
  else _mm512_mask_storeu_ps(p, mask16(count), a);
}
PD_INLINE void store16_past_caches(float *p, F16 a) { _mm512_stream_ps(p, a); }  // a line
PD_INLINE void fence_past_caches() { _mm_sfence(); }  // others may read what was stored so
PD_INLINE void store16_bf16(uint16_t *p, F16 a, int count) {
#if PD_LEVEL >= 3
  const __m256i b = (__m256i)_mm512_cvtneps_pbh(a);
#else
  const __m512i u = _mm512_castps_si512(a);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __m256i b = _mm512_cvtepi32_epi16(r);
#endif
  if (count >= 16) _mm256_storeu_si256((__m256i *)p, b);
  else _mm256_mask_storeu_epi16(p, mask16(count), b);
}
PD_INLINE F16 clamp16(F16 a, float low, float high) {  // the second operand of min and max is what a NaN gives
  return _mm512_min_ps(set16(high), _mm512_max_ps(set16(low), a));
}
PD_INLINE F16 round16(F16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PD_INLINE F16 scale_by_power16(F16 a, F16 n) { return _mm512_scalef_ps(a, n); }

// ---------------------------------------------------------------------------------------------------- AVX2
#elif PD_LEVEL == 1
struct F16 {
  __m256 lo, hi;
};
PD_INLINE F16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PD_INLINE F16 set16(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
PD_INLINE F16 load16(const void *p) {
  return {_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)p + 8)};
}
PD_INLINE void store16(float *p, F16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
PD_INLINE void store16_past_caches(float *p, F16 a) {  // a line
  _mm256_stream_ps(p, a.lo), _mm256_stream_ps(p + 8, a.hi);
}
PD_INLINE void fence_past_caches() { _mm_sfence(); }
PD_INLINE F16 add16(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PD_INLINE F16 mul16(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PD_INLINE F16 div16(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PD_INLINE F16 fma16(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PD_INLINE __m256 even8(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
using OddMask = __m256;
PD_INLINE OddMask odd_mask() { return _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)); }
PD_INLINE F16 set_word16(uint32_t w) {
  const __m256 a = _mm256_castsi256_ps(_mm256_set1_epi32((int)w));
  return {a, a};
}
PD_INLINE F16 even16(F16 a) { return {even8(a.lo), even8(a.hi)}; }
PD_INLINE F16 odd16(F16 a, OddMask mask) { return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)}; }
PD_INLINE __m256 pair_of_upper_halves8(__m256 even, __m256 odd) {
  return _mm256_or_ps(_mm256_castsi256_ps(_mm256_srli_epi32(_mm256_castps_si256(even), 16)), odd);
}
PD_INLINE F16 pair_of_upper_halves(F16 even, F16 odd) {
  return {pair_of_upper_halves8(even.lo, odd.lo), pair_of_upper_halves8(even.hi, odd.hi)};
}
PD_INLINE __m256i bf16_words8(__m256 a) {  // eight bf16, each in 32 bits
  const __m256i u = _mm256_castps_si256(a), high = _mm256_srli_epi32(u, 16);
  const __m256i lsb = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
PD_INLINE __m256 clamp8(__m256 a, float low, float high) {
  return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), a));
}
PD_INLINE F16 clamp16(F16 a, float low, float high) { return {clamp8(a.lo, low, high), clamp8(a.hi, low, high)}; }
PD_INLINE __m256 round8(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PD_INLINE F16 round16(F16 a) { return {round8(a.lo), round8(a.hi)}; }
PD_INLINE __m256 scale_by_power8(__m256 a,
                                 __m256 n) {  // in two halves: one factor alone would leave the exponent's range
  const __m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), rest = _mm256_sub_epi32(e, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, f), g);
}
PD_INLINE F16 scale_by_power16(F16 a, F16 n) { return {scale_by_power8(a.lo, n.lo), scale_by_power8(a.hi, n.hi)}; }

// ---------------------------------------------------------------------------------------------------- portable
#else
typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
struct F16 {
  F4 v[4];
};
template <class Fn>
PD_INLINE F16 each(Fn fn) {
  return {{fn(0), fn(1), fn(2), fn(3)}};
}
PD_INLINE F16 set16(float f) { return each([&](int) { return F4{} + f; }); }
PD_INLINE F16 zero16() { return each([](int) { return F4{}; }); }
PD_INLINE F16 load16(const void *p) {
  F16 a;
  memcpy(&a, p, 64);
  return a;
}
PD_INLINE void store16(float *p, F16 a) { memcpy(p, &a, 64); }
PD_INLINE F16 add16(F16 a, F16 b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
PD_INLINE F16 mul16(F16 a, F16 b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
PD_INLINE F16 div16(F16 a, F16 b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
PD_INLINE F16 fma16(F16 a, F16 b, F16 c) {  // two roundings: there may be no fma instruction
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
PD_INLINE F16 clamp16(F16 a, float low, float high) {  // NaN stays NaN
  for (int i = 0; i < 16; i++) {
    const float x = a.v[i / 4][i % 4];
    a.v[i / 4][i % 4] = x < low ? low : x > high ? high : x;
  }
  return a;
}
PD_INLINE F16 set_word16(uint32_t w) { return each([&](int) { return (F4)(U4{} + w); }); }
PD_INLINE F16 even16(F16 a) { return each([&](int i) { return (F4)((U4)a.v[i] << 16); }); }
using OddMask = U4;
PD_INLINE OddMask odd_mask() { return U4{} + 0xffff0000u; }
PD_INLINE F16 odd16(F16 a, OddMask mask) { return each([&](int i) { return (F4)((U4)a.v[i] & mask); }); }
PD_INLINE F16 pair_of_upper_halves(F16 even, F16 odd) {
  return each([&](int i) { return (F4)((U4)even.v[i] >> 16 | (U4)odd.v[i]); });
}
#endif

// ---------------------------------------------------------------------------------------------------- for all of them
#if PD_LEVEL < 1
PD_INLINE void store16_past_caches(float *p, F16 a) { store16(p, a); }
PD_INLINE void fence_past_caches() {}
#endif
#if PD_LEVEL < 2
PD_INLINE F16 load16_part(const float *p, int count) {
  if (count >= 16) return load16(p);
  float lane[16] = {};
  for (int i = 0; i < count; i++) lane[i] = p[i];
  return load16(lane);
}
PD_INLINE void store16_part(float *p, F16 a, int count) {
  if (count >= 16) return store16(p, a);
  float lane[16];
  store16(lane, a);
  for (int i = 0; i < count; i++) p[i] = lane[i];
}
PD_INLINE void store16_bf16(uint16_t *p, F16 a, int count) {
#if PD_LEVEL == 1
  if (count >= 16) {  // packus works within 128-bit halves, hence the permutation
    const __m256i both = _mm256_packus_epi32(bf16_words8(a.lo), bf16_words8(a.hi));
    return _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
  }
#endif
  float lane[16];
  store16(lane, a);
  for (int i = 0; i < 16 && i < count; i++) p[i] = bf16_from_float(lane[i]);
}
#endif

// A row of bf16 as fp32.
inline void floats_of_row(const uint16_t *x, int64_t k, float *to) {
  for (int64_t i = 0; i < k; i++) {
    const uint32_t u = (uint32_t)x[i] << 16;
    memcpy(to + i, &u, 4);
  }
}

#if PD_LEVEL >= 1
// Sums of integers so far. The compiler would take the products of several steps first, and keep them in memory until
// it adds them up.
template <class Ints>
PD_INLINE void add_now(Ints &a, Ints &b) {
#ifndef PD_EMULATE_VECTORS
  asm("" : "+v"(a), "+v"(b));
#endif
}

// e^a: a = n ln 2 + r with |r| <= ln 2 / 2, e^r by its series to r^6 (2e-7 relative). 0 below -104, inf above 88.8, NaN
// for NaN.
PD_INLINE F16 exp16(F16 a) {
  a = clamp16(a, -104.f, 89.f);
  const F16 n = round16(mul16(a, set16(1.44269504f)));
  F16 r = fma16(n, set16(-0.693359375f), a);  // ln 2 in two parts, the first with 9 bits: n times it is exact
  r = fma16(n, set16(2.12194440e-4f), r);
  F16 p = set16(1.f / 720);
  p = fma16(p, r, set16(1.f / 120));
  p = fma16(p, r, set16(1.f / 24));
  p = fma16(p, r, set16(1.f / 6));
  p = fma16(p, r, set16(.5f));
  p = fma16(p, r, set16(1.f));
  p = fma16(p, r, set16(1.f));
  return scale_by_power16(p, n);
}
#else
PD_INLINE F16 exp16(F16 a) {
  F16 e;
  for (int i = 0; i < 16; i++) e.v[i / 4][i % 4] = std::exp(a.v[i / 4][i % 4]);
  return e;
}
#endif

PD_INLINE F16 silu16(F16 a) { return div16(a, add16(set16(1.f), exp16(mul16(a, set16(-1.f))))); }

// (up + 1) * gate * sigmoid(1.702 gate), of what lies within 7; NaN stays NaN
PD_INLINE F16 clamped_swiglu16(F16 gate, F16 up) {
  gate = clamp16(gate, -std::numeric_limits<float>::infinity(), 7.f), up = clamp16(up, -7.f, 7.f);
  const F16 glu = div16(gate, add16(set16(1.f), exp16(mul16(gate, set16(-1.702f)))));
  return mul16(add16(up, set16(1.f)), glu);
}

// a * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (a + 0.044715 a^3), which is a / (1 + e^(-2u))
PD_INLINE F16 gelu16(F16 a) {
  const F16 t = mul16(a, fma16(mul16(a, a), set16(-2 * 0.7978845608f * 0.044715f), set16(-2 * 0.7978845608f)));
  return div16(a, add16(set16(1.f), exp16(t)));
}

}  // namespace pagedec
