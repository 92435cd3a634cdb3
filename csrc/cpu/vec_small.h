// Sixteen floats at every instruction-set level, for the kernels that are not matrix products.
//
// Only operations that IEEE 754 defines exactly are offered, no fused multiply-add and no approximate reciprocal, and
// sums over lanes have one order: what is written with these has the same bits on every instruction set. `add_exact` is
// sum + a * b of products that fp32 holds, as of two bf16 (but below 2^-126): fused or not, the bits are the same.
// `load_pairs` gives 32 numbers by even and odd places.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/internal.h"
#if PD_LEVEL >= 1
#pragma GCC diagnostic push  // g++ 12's own headers: "undefined" vectors initialised by themselves
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "cpu/vectors.h"
#pragma GCC diagnostic pop
#endif

namespace pagedec {
namespace {  // private to each file that includes it

struct bf16 {
  uint16_t bits;
};

PD_INLINE float to_float(float x) { return x; }
PD_INLINE float to_float(bf16 x) {
  const uint32_t u = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
PD_INLINE void from_float(float x, float *out) { *out = x; }
PD_INLINE void from_float(float x, bf16 *out) {  // nearest even; a NaN stays one
  uint32_t u;
  memcpy(&u, &x, 4);
  out->bits = x != x ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// A thread's share of n units of equal cost.
struct Range {
  int64_t begin, end;
};
PD_INLINE Range share(int64_t n, int thread, int num_threads) {
  return {n * thread / num_threads, n * (thread + 1) / num_threads};
}

#if PD_LEVEL >= 2

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};
struct M16 {
  __mmask16 v;
};
PD_INLINE F16 set16(float x) { return {_mm512_set1_ps(x)}; }
PD_INLINE I16 set16i(int32_t x) { return {_mm512_set1_epi32(x)}; }
PD_INLINE F16 load16(const float *p) { return {_mm512_loadu_ps(p)}; }
PD_INLINE I16 load16i(const int32_t *p) { return {_mm512_loadu_si512(p)}; }
PD_INLINE void store16(float *p, F16 a) { _mm512_storeu_ps(p, a.v); }
PD_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PD_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PD_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PD_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PD_INLINE F16 larger(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }   // a > b ? a : b, so b where one is NaN
PD_INLINE F16 smaller(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }  // a < b ? a : b
PD_INLINE M16 less(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PD_INLINE M16 less(I16 a, I16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
PD_INLINE F16 select(M16 m, F16 a, F16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
PD_INLINE I16 select(M16 m, I16 a, I16 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
PD_INLINE uint32_t mask_bits(M16 m) { return m.v; }
PD_INLINE M16 bits_mask(uint32_t bits) { return {(__mmask16)bits}; }  // of the lowest 16
PD_INLINE I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PD_INLINE I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PD_INLINE I16 shift_left(I16 a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
PD_INLINE I16 shift_right(I16 a, int n) { return {_mm512_srai_epi32(a.v, n)}; }
PD_INLINE F16 as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
PD_INLINE I16 as_int(F16 a) { return {_mm512_castps_si512(a.v)}; }
PD_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PD_INLINE I16 truncate(F16 a) { return {_mm512_cvttps_epi32(a.v)}; }
PD_INLINE void store16i(int32_t *p, I16 a) { _mm512_storeu_si512(p, a.v); }
PD_INLINE F16 load16(const bf16 *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
PD_INLINE void load_pairs(const bf16 *p, F16 &even, F16 &odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000u)))};
}
PD_INLINE F16 add_exact(F16 sum, F16 a, F16 b) { return {_mm512_fmadd_ps(a.v, b.v, sum.v)}; }
PD_INLINE void store16(bf16 *p, F16 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, bias), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}

#elif PD_LEVEL == 1

struct F16 {
  __m256 a, b;
};
struct I16 {
  __m256i a, b;
};
struct M16 {
  __m256 a, b;
};
#define PD_PAIR_F(name, op) \
  PD_INLINE F16 name(F16 x, F16 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
#define PD_PAIR_I(name, op) \
  PD_INLINE I16 name(I16 x, I16 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
PD_PAIR_F(operator+, _mm256_add_ps)
PD_PAIR_F(operator-, _mm256_sub_ps)
PD_PAIR_F(operator*, _mm256_mul_ps)
PD_PAIR_F(operator/, _mm256_div_ps)
PD_PAIR_F(larger, _mm256_max_ps)
PD_PAIR_F(smaller, _mm256_min_ps)
PD_PAIR_I(operator+, _mm256_add_epi32)
PD_PAIR_I(operator-, _mm256_sub_epi32)
#undef PD_PAIR_F
#undef PD_PAIR_I
PD_INLINE F16 set16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PD_INLINE I16 set16i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PD_INLINE F16 load16(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PD_INLINE I16 load16i(const int32_t *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
PD_INLINE void store16(float *p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PD_INLINE M16 less(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
PD_INLINE M16 less(I16 x, I16 y) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b))};
}
PD_INLINE F16 select(M16 m, F16 x, F16 y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
PD_INLINE uint32_t mask_bits(M16 m) {
  return (uint32_t)_mm256_movemask_ps(m.a) | (uint32_t)_mm256_movemask_ps(m.b) << 8;
}
PD_INLINE M16 bits_mask(uint32_t bits) {
  const __m256i all = _mm256_set1_epi32((int32_t)bits), low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i high = _mm256_slli_epi32(low, 8);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high))};
}
PD_INLINE I16 shift_left(I16 x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
PD_INLINE I16 shift_right(I16 x, int n) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
PD_INLINE F16 as_float(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
PD_INLINE I16 as_int(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
PD_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PD_INLINE I16 truncate(F16 x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
PD_INLINE void store16i(int32_t *p, I16 x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
PD_INLINE I16 select(M16 m, I16 x, I16 y) { return as_int(select(m, as_float(x), as_float(y))); }
PD_INLINE F16 load16(const bf16 *p) {
  const __m128i *q = (const __m128i *)p;
  const I16 wide{_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
  return as_float(shift_left(wide, 16));
}
PD_INLINE void load_pairs(const bf16 *p, F16 &even, F16 &odd) {
  const __m256i *q = (const __m256i *)p, upper = _mm256_set1_epi32((int32_t)0xffff0000u);
  const I16 pairs{_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  even = as_float(shift_left(pairs, 16));
  odd = as_float(I16{_mm256_and_si256(pairs.a, upper), _mm256_and_si256(pairs.b, upper)});
}
PD_INLINE F16 add_exact(F16 sum, F16 x, F16 y) {
  return {_mm256_fmadd_ps(x.a, y.a, sum.a), _mm256_fmadd_ps(x.b, y.b, sum.b)};
}
PD_INLINE __m256i round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
PD_INLINE void store16(bf16 *p, F16 x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

#else

struct F16 {
  float v[16];
};
struct I16 {
  int32_t v[16];
};
struct M16 {
  bool v[16];
};
#define PD_LANES for (int i = 0; i < 16; i++)
#define PD_LANEWISE(type, name, arguments, expression) \
  PD_INLINE type name arguments {                      \
    type r;                                            \
    PD_LANES r.v[i] = expression;                      \
    return r;                                          \
  }
PD_LANEWISE(F16, set16, (float x), x)
PD_LANEWISE(I16, set16i, (int32_t x), x)
PD_LANEWISE(F16, load16, (const float *p), p[i])
PD_LANEWISE(I16, load16i, (const int32_t *p), p[i])
PD_LANEWISE(F16, load16, (const bf16 *p), to_float(p[i]))
PD_LANEWISE(F16, operator+, (F16 a, F16 b), a.v[i] + b.v[i])
PD_LANEWISE(F16, add_exact, (F16 sum, F16 a, F16 b), sum.v[i] + a.v[i] * b.v[i])
PD_LANEWISE(F16, operator-, (F16 a, F16 b), a.v[i] - b.v[i])
PD_LANEWISE(F16, operator*, (F16 a, F16 b), a.v[i] * b.v[i])
PD_LANEWISE(F16, operator/, (F16 a, F16 b), a.v[i] / b.v[i])
PD_LANEWISE(F16, larger, (F16 a, F16 b), (a.v[i] > b.v[i] ? a.v[i] : b.v[i]))
PD_LANEWISE(F16, smaller, (F16 a, F16 b), (a.v[i] < b.v[i] ? a.v[i] : b.v[i]))
PD_LANEWISE(M16, less, (F16 a, F16 b), a.v[i] < b.v[i])
PD_LANEWISE(M16, less, (I16 a, I16 b), a.v[i] < b.v[i])
PD_LANEWISE(F16, select, (M16 m, F16 a, F16 b), (m.v[i] ? a.v[i] : b.v[i]))
PD_LANEWISE(I16, select, (M16 m, I16 a, I16 b), (m.v[i] ? a.v[i] : b.v[i]))
PD_LANEWISE(I16, operator+, (I16 a, I16 b), (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]))
PD_LANEWISE(I16, operator-, (I16 a, I16 b), (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]))
PD_LANEWISE(I16, shift_left, (I16 a, int n), (int32_t)((uint32_t)a.v[i] << n))
PD_LANEWISE(I16, shift_right, (I16 a, int n), a.v[i] >> n)
PD_LANEWISE(F16, to_float, (I16 a), (float)a.v[i])
PD_LANEWISE(I16, truncate, (F16 a), (int32_t)a.v[i])
#undef PD_LANEWISE
PD_INLINE F16 as_float(I16 a) {
  F16 r;
  memcpy(&r, &a, sizeof r);
  return r;
}
PD_INLINE I16 as_int(F16 a) {
  I16 r;
  memcpy(&r, &a, sizeof r);
  return r;
}
PD_INLINE void load_pairs(const bf16 *p, F16 &even, F16 &odd) {
  PD_LANES even.v[i] = to_float(p[2 * i]), odd.v[i] = to_float(p[2 * i + 1]);
}
template <class E>
PD_INLINE void store16(E *p, F16 a) {
  PD_LANES from_float(a.v[i], p + i);
}
PD_INLINE void store16i(int32_t *p, I16 a) { memcpy(p, &a, sizeof a); }
PD_INLINE uint32_t mask_bits(M16 m) {
  uint32_t bits = 0;
  PD_LANES bits |= (uint32_t)m.v[i] << i;
  return bits;
}
PD_INLINE M16 bits_mask(uint32_t bits) {
  M16 r;
  PD_LANES r.v[i] = bits >> i & 1u;
  return r;
}
#undef PD_LANES

#endif

// The first n (1 to 15) elements; the other lanes are `fill`.
template <class E>
PD_INLINE F16 load_tail(const E *p, int64_t n, float fill = 0.0f) {
  float lanes[16];
  for (int i = 0; i < 16; i++) lanes[i] = i < n ? to_float(p[i]) : fill;
  return load16(lanes);
}
template <class E>
PD_INLINE void store_tail(E *p, F16 a, int64_t n) {
  E lanes[16];
  store16(lanes, a);
  memcpy(p, lanes, n * sizeof(E));
}
template <class E>
PD_INLINE F16 load_some(const E *p, int64_t n, float fill = 0.0f) {
  return n >= 16 ? load16(p) : load_tail(p, n, fill);
}
template <class E>
PD_INLINE void store_some(E *p, F16 a, int64_t n) {
  n >= 16 ? store16(p, a) : store_tail(p, a, n);
}
PD_INLINE float sum_lanes(F16 a) {  // each of the lower half and its fellow in the upper one, and so on
#if PD_LEVEL >= 2
  return _mm512_reduce_add_ps(a.v);
#elif PD_LEVEL == 1
  const __m256 eight = _mm256_add_ps(a.a, a.b);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] = a.v[i] + a.v[i + width];
  return a.v[0];
#endif
}
PD_INLINE float max_lanes(F16 a) {  // of lanes without NaN, where the order cannot matter
#if PD_LEVEL >= 2
  return _mm512_reduce_max_ps(a.v);
#elif PD_LEVEL == 1
  __m256 m = _mm256_max_ps(a.a, a.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
#else
  float m = a.v[0];
  for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
#endif
}

// The same formulas for one float.
PD_INLINE float larger(float a, float b) { return a > b ? a : b; }
PD_INLINE float smaller(float a, float b) { return a < b ? a : b; }
PD_INLINE bool less(float a, float b) { return a < b; }
PD_INLINE bool less(int32_t a, int32_t b) { return a < b; }
PD_INLINE float select(bool m, float a, float b) { return m ? a : b; }
PD_INLINE int32_t select(bool m, int32_t a, int32_t b) { return m ? a : b; }
PD_INLINE int32_t shift_left(int32_t a, int n) { return (int32_t)((uint32_t)a << n); }
PD_INLINE int32_t shift_right(int32_t a, int n) { return a >> n; }
PD_INLINE float as_float(int32_t a) {
  float f;
  memcpy(&f, &a, 4);
  return f;
}
PD_INLINE int32_t as_int(float a) {
  int32_t i;
  memcpy(&i, &a, 4);
  return i;
}
PD_INLINE float to_float(int32_t a) { return (float)a; }

template <class F>
struct Ints;
template <>
struct Ints<F16> {
  PD_INLINE F16 real(float x) { return set16(x); }
  PD_INLINE I16 integer(int32_t x) { return set16i(x); }
};
template <>
struct Ints<float> {
  PD_INLINE float real(float x) { return x; }
  PD_INLINE int32_t integer(int32_t x) { return x; }
};

// exp with an error below 2 ulp; 0 and inf where fp32 has nothing closer; NaN stays NaN. Coefficients: Cephes expf.
template <class F>
PD_INLINE F exp_small(F x) {
  using C = Ints<F>;
  x = smaller(C::real(89.0f), larger(C::real(-104.0f), x));  // in this order a NaN passes
  const F magic =
      x * C::real(1.44269504088896341f) + C::real(12582912.0f);  // 1.5 * 2^23: the low bits are round(x log2 e)
  const F n = magic - C::real(12582912.0f);
  const F r = (x - n * C::real(0.693359375f)) - n * C::real(-2.12194440e-4f);
  F y = C::real(1.9875691500e-4f);
  y = y * r + C::real(1.3981999507e-3f);
  y = y * r + C::real(8.3334519073e-3f);
  y = y * r + C::real(4.1665795894e-2f);
  y = y * r + C::real(1.6666665459e-1f);
  y = y * r + C::real(5.0000001201e-1f);
  y = (y * (r * r) + r) + C::real(1.0f);
  const auto exponent = as_int(magic) - C::integer(0x4b400000);
  const auto half = shift_right(exponent, 1);  // in two steps: 2^-150 and 2^128 are no floats
  y = y * as_float(shift_left(half + C::integer(127), 23));
  return y * as_float(shift_left((exponent - half) + C::integer(127), 23));
}

// log(2^e (1 + f)) for 1 + f in [sqrt(1/2), sqrt(2)), with a relative error below 2 ulp. Coefficients: Cephes logf.
template <class F>
PD_INLINE F log_parts(F f, F e) {
  using C = Ints<F>;
  const F z = f * f;
  F y = C::real(7.0376836292e-2f);
  y = y * f + C::real(-1.1514610310e-1f);
  y = y * f + C::real(1.1676998740e-1f);
  y = y * f + C::real(-1.2420140846e-1f);
  y = y * f + C::real(1.4249322787e-1f);
  y = y * f + C::real(-1.6668057665e-1f);
  y = y * f + C::real(2.0000714765e-1f);
  y = y * f + C::real(-2.4999993993e-1f);
  y = y * f + C::real(3.3333331174e-1f);
  y = (y * f) * z;
  y = y + e * C::real(-2.12194440e-4f);
  y = y - z * C::real(0.5f);
  return (f + y) + e * C::real(0.693359375f);
}
// log of a positive normal number.
template <class F>
PD_INLINE F log_small(F x) {
  using C = Ints<F>;
  const auto bits = as_int(x);
  const auto e = shift_right(bits - C::integer(0x3f3504f3), 23);
  return log_parts(as_float(bits - shift_left(e, 23)) - C::real(1.0f), to_float(e));
}

}  // namespace
}  // namespace pagedec
