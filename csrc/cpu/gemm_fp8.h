// The parts of a linear layer whose weights are e4m3 with scales, and x in its own dtype: a byte times its scale,
// rounded to fp32 and for rows of bf16 once more, is the number of a plain weight, and goes that weight's way. So the
// bits are those of a plain layer whose weights were made numbers before, in tiles of any height.
//
// A panel is for each 128 values of k 32 scales (fp32, times 2^120), then for each two values of k 64 bytes. Where
// words of two bf16 are multiplied [2][8][2][2]: of sixteen outputs eight by two values of k, and beside each byte that
// of the output eight further on, so that two vectors of fp32 are rounded to words in order; elsewhere [2][2][16], as
// int8.
#pragma once
#include <algorithm>

#include "cpu/gemm_vec.h"

namespace pagedec {

// bytes of two values of k; how many of those share scales
constexpr int64_t FP8_PAIR = 64, FP8_PAIRS = PD_FP8_GROUP / 2;
constexpr int64_t fp8_header(int64_t k) { return (k + PD_FP8_GROUP - 1) / PD_FP8_GROUP * 32 * (int64_t)sizeof(float); }
// Where a byte of an output (0 .. 31) by a value of k is.
constexpr int64_t fp8_at(int output, int64_t k) {
  const int half = output / 16 * 32;
  const int in_half = PD_LEVEL >= 3 ? (output % 8 * 2 + k % 2) * 2 + output / 8 % 2 : k % 2 * 16 + output % 16;
  return k / 2 * FP8_PAIR + half + in_half;
}

// A byte's bits as those of fp32 are 2^-120 of it, below 2^-6 a denormal, which no thread flushes here
// (common/program.cpp).
constexpr float FP8_SCALE = 0x1p120f;
constexpr int FP8_BITS = (int)0x87f00000;

#if PD_LEVEL >= 3
struct Fp8Scales {  // of sixteen outputs: the first eight and the last, each twice
  F16 first, last;
};
PD_INLINE Fp8Scales fp8_scales(const float *p) {
  float twice[32];
  for (int i = 0; i < 32; i++) twice[i] = p[i / 2];
  return {load16(twice), load16(twice + 16)};
}
// 32 bytes: eight outputs by two values of k, and eight more.
PD_INLINE void fp8_floats(const char *p, const Fp8Scales &scales, F16 &first, F16 &last) {
  const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)), bits = _mm512_set1_epi32(FP8_BITS);
  first = mul16(_mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(x, 20), bits)), scales.first);
  last = mul16(_mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(x, 4), bits)), scales.last);
}
PD_INLINE __m512bh fp8_words(const char *p, const Fp8Scales &scales) {
  F16 first, last;
  fp8_floats(p, scales, first, last);
  return _mm512_cvtne2ps_pbh(last, first);
}
PD_INLINE void store_fp8_words(const char *p, const Fp8Scales &scales, char *to) {
  _mm512_storeu_si512(to, (__m512i)fp8_words(p, scales));
}
PD_INLINE void widen_fp8_pair(const char *p, const Fp8Scales &scales, char *even, char *odd) {
  F16 first, last;
  fp8_floats(p, scales, first, last);
  float values[32], of_k[2][16];
  store16(values, first), store16(values + 16, last);
  for (int i = 0; i < 16; i++) of_k[0][i] = values[2 * i], of_k[1][i] = values[2 * i + 1];
  memcpy(even, of_k[0], 64), memcpy(odd, of_k[1], 64);
}
#else
using Fp8Scales = F16;  // of sixteen outputs
PD_INLINE Fp8Scales fp8_scales(const float *p) { return load16(p); }
// Sixteen outputs.
#if PD_LEVEL == 2
PD_INLINE F16 fp8_floats(const char *p, const Fp8Scales &scales) {
  const __m512i x = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)), 20);
  return mul16(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(FP8_BITS))), scales);
}
// To bf16, as fp32 has it: of what is finite.
PD_INLINE F16 rounded16(F16 a) {
  const __m512i u = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32((int)0xffff0000)));
}
#elif PD_LEVEL == 1
PD_INLINE __m256 fp8_eight_floats(const char *p, __m256 scales) {
  const __m256i x = _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)), 20);
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(FP8_BITS))), scales);
}
PD_INLINE F16 fp8_floats(const char *p, const Fp8Scales &scales) {
  return {fp8_eight_floats(p, scales.lo), fp8_eight_floats(p + 8, scales.hi)};
}
PD_INLINE __m256 rounded8(__m256 a) {
  const __m256i u = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32((int)0xffff0000)));
}
PD_INLINE F16 rounded16(F16 a) { return {rounded8(a.lo), rounded8(a.hi)}; }
#else
PD_INLINE F16 fp8_floats(const char *p, const Fp8Scales &scales) {
  uint32_t bits[16];
  for (int i = 0; i < 16; i++) bits[i] = ((uint32_t)(p[i] & 0x7f) << 20) | ((uint32_t)(p[i] & 0x80) << 24);
  return mul16(load16(bits), scales);
}
PD_INLINE F16 rounded16(F16 a) {
  return each([&](int i) {
    const U4 u = (U4)a.v[i];
    return (F4)((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u);
  });
}
#endif
PD_INLINE void store_fp8_words(const char *p, const Fp8Scales &scales, char *to) {
  const F16 even = rounded16(fp8_floats(p, scales)), odd = rounded16(fp8_floats(p + 16, scales));
  store16((float *)to, pair_of_upper_halves(even, odd));
}
PD_INLINE void widen_fp8_pair(const char *p, const Fp8Scales &scales, char *even, char *odd) {
  store16((float *)even, fp8_floats(p, scales)), store16((float *)odd, fp8_floats(p + 16, scales));
}
#endif

// The scales of a panel's pair `at`, by H halves of the outputs; and how many of `left` pairs from there on have them.
template <int H>
PD_INLINE int64_t fp8_group(const float *scales, int64_t at, int64_t left, Fp8Scales (&own)[H]) {
  for (int j = 0; j < H; j++) own[j] = fp8_scales(scales + at / FP8_PAIRS * 32 + j * 16);
  return std::min(left, FP8_PAIRS - at % FP8_PAIRS);
}

// Pairs of values of k of a panel, from pair `begin` on, as a plain panel has them: words of bf16, or two of fp32 each.
inline void widen_fp8_panel(const char *from, const float *scales, int dtype, int64_t begin, int64_t pairs, char *to) {
  Fp8Scales own[2];
  for (int64_t count; pairs > 0; pairs -= count, begin += count) {
    count = fp8_group(scales, begin, pairs, own);
    for (int64_t i = 0; i < count; i++, from += FP8_PAIR, to += dtype == PD_BF16 ? 128 : 256)
      for (int j = 0; j < 2; j++) {
        if (dtype == PD_BF16) store_fp8_words(from + j * 32, own[j], to + j * 64);
        else widen_fp8_pair(from + j * 32, own[j], to + j * 64, to + 128 + j * 64);
      }
  }
}

}  // namespace pagedec
