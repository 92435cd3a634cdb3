// One vector of floats of the instruction set this file is compiled for, and the few operations attention needs of it.
// Results are deterministic for one instruction set; two instruction sets need not agree in the last bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"  // _mm512_undefined_ps of these compilers' own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "cpu/vectors.h"

namespace pagedec::vec {

#if PD_LEVEL >= 2
constexpr int W = 16;
using F = __m512;
using I = __m512i;
PD_INLINE F zero() { return _mm512_setzero_ps(); }
PD_INLINE F set1(float x) { return _mm512_set1_ps(x); }
PD_INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
PD_INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x); }
PD_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
PD_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
PD_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
PD_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
PD_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
PD_INLINE F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
PD_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
PD_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
PD_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PD_INLINE F scale_pow2(F a, F n) { return _mm512_scalef_ps(a, n); }  // n an integer >= -200: a below 2^-150 becomes 0
PD_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
PD_INLINE float reduce_sum(F a) { return _mm512_reduce_add_ps(a); }
PD_INLINE F keep_lanes(F a, int lo, int hi, float other) {  // a in lanes lo .. hi-1
  const uint32_t below_hi = hi >= W   ? 0xffffu
                            : hi <= 0 ? 0u
                                      : (1u << hi) - 1,
                 below_lo = lo >= W   ? 0xffffu
                            : lo <= 0 ? 0u
                                      : (1u << lo) - 1;
  return _mm512_mask_mov_ps(set1(other), (__mmask16)(below_hi & ~below_lo), a);
}
PD_INLINE I load_raw(const void *p) { return _mm512_loadu_si512(p); }
PD_INLINE I and_raw(I a, uint32_t mask) { return _mm512_and_si512(a, _mm512_set1_epi32((int32_t)mask)); }
PD_INLINE F low_half(I a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }  // bf16 at even places, widened
PD_INLINE F high_half(I a) { return _mm512_castsi512_ps(and_raw(a, 0xffff0000u)); }  // and at odd places
#elif PD_LEVEL == 1
constexpr int W = 8;
using F = __m256;
using I = __m256i;
PD_INLINE F zero() { return _mm256_setzero_ps(); }
PD_INLINE F set1(float x) { return _mm256_set1_ps(x); }
PD_INLINE F load(const float *p) { return _mm256_loadu_ps(p); }
PD_INLINE void store(float *p, F x) { _mm256_storeu_ps(p, x); }
PD_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
PD_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
PD_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
PD_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
PD_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
PD_INLINE F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
PD_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
PD_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
PD_INLINE F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PD_INLINE F scale_pow2(F a, F n) {  // n an integer; -127 and below: factor 0
  const __m256i e = _mm256_cvtps_epi32(_mm256_max_ps(n, set1(-127.f)));
  return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23)));
}
PD_INLINE float reduce_max(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
PD_INLINE float reduce_sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
PD_INLINE F keep_lanes(F a, int lo, int hi, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
  return _mm256_blendv_ps(set1(other), a, _mm256_castsi256_ps(in));
}
PD_INLINE I load_raw(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
PD_INLINE I and_raw(I a, uint32_t mask) { return _mm256_and_si256(a, _mm256_set1_epi32((int32_t)mask)); }
PD_INLINE F low_half(I a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
PD_INLINE F high_half(I a) { return _mm256_castsi256_ps(and_raw(a, 0xffff0000u)); }
#else  // any processor: compiler vectors of four; a product and a sum are rounded apart, because fma without hardware
       // is a call
constexpr int W = 4;
typedef float F __attribute__((vector_size(16)));
typedef uint32_t I __attribute__((vector_size(16)));
typedef int32_t S __attribute__((vector_size(16)));
PD_INLINE F set1(float x) { return F{x, x, x, x}; }
PD_INLINE F zero() { return set1(0.f); }
PD_INLINE F load(const float *p) { F x; memcpy(&x, p, sizeof x); return x; }
PD_INLINE void store(float *p, F x) { memcpy(p, &x, sizeof x); }
PD_INLINE F add(F a, F b) { return a + b; }
PD_INLINE F sub(F a, F b) { return a - b; }
PD_INLINE F mul(F a, F b) { return a * b; }
PD_INLINE F div(F a, F b) { return a / b; }
PD_INLINE F fma(F a, F b, F c) { return a * b + c; }
PD_INLINE F fms(F a, F b, F c) { return a * b - c; }
PD_INLINE F min(F a, F b) { return a < b ? a : b; }
PD_INLINE F max(F a, F b) { return a > b ? a : b; }
PD_INLINE F round(F a) {
  const F big = set1(12582912.f);
  return (a + big) - big;
}  // 1.5 * 2^23: to nearest even, |a| < 2^22
PD_INLINE F scale_pow2(F a, F n) {
  const S whole = __builtin_convertvector(max(n, set1(-127.f)), S);
  return a * (F)((whole + 127) << 23);
}
PD_INLINE float reduce_max(F a) {
  const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
  return x > y ? x : y;
}
PD_INLINE float reduce_sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
PD_INLINE F keep_lanes(F a, int lo, int hi, float other) {
  const S lane = {0, 1, 2, 3};
  return (lane >= S{lo, lo, lo, lo}) & (lane < S{hi, hi, hi, hi}) ? a : set1(other);
}
PD_INLINE I load_raw(const void *p) { I x; memcpy(&x, p, sizeof x); return x; }
PD_INLINE I and_raw(I a, uint32_t mask) { return a & mask; }
PD_INLINE F low_half(I a) { return (F)(a << 16); }
PD_INLINE F high_half(I a) { return (F)(a & 0xffff0000u); }
#endif

// 2^x. Exact at 0, exactly 0 far below (a masked logit is minus infinity), NaN stays NaN. Minimax polynomials on [-1/2,
// 1/2]: degree 4 errs by 3e-6, far below a bf16 probability's 2e-3; degree 6 by 2e-7.
template <bool PRECISE>
PD_INLINE F exp2(F x) {
  x = max(set1(-200.f), x);
  const F n = round(x), f = sub(x, n);
  F p;
  if constexpr (PRECISE) {
    p = set1(1.53533761e-4f);
    p = fma(p, f, set1(1.33988796e-3f));
    p = fma(p, f, set1(9.61843735e-3f));
    p = fma(p, f, set1(5.55033246e-2f));
    p = fma(p, f, set1(2.40226479e-1f));
    p = fma(p, f, set1(6.93147203e-1f));
  } else {
    p = set1(0.009582852944731712f);
    p = fma(p, f, set1(0.055906426161527634f));
    p = fma(p, f, set1(0.24024099111557007f));
    p = fma(p, f, set1(0.6931241750717163f));
  }
  return scale_pow2(fma(p, f, set1(1.f)), n);
}
PD_INLINE float exp2_one(float x) {
  float out[W];
  store(out, exp2<true>(set1(x)));
  return out[0];
}

// tanh(x) = 1 - 2 / (e^2x + 1); beyond |x| = 10 it is 1 in fp32.
PD_INLINE F tanh(F x) {
  const F limit = set1(10.f);
  x = max(sub(zero(), limit), min(limit, x));  // the NaN operand comes second in both, so a NaN stays one
  const F e = exp2<true>(mul(x, set1(2.885390081777927f)));
  return sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
}

PD_INLINE uint16_t to_bf16(float x) {  // to nearest even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t nearest = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = u >> 16 | 0x40;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
}
PD_INLINE float from_bf16(uint16_t x) {
  const uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

}  // namespace pagedec::vec
