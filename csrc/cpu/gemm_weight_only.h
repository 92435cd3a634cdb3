// The parts of a linear layer with int8 weights and x in its own dtype: integers become numbers of that dtype, which
// has all of -127 .. 127, and go the way of a plain weight. So an output's chain is that of a plain layer whose weights
// are q, on every instruction set and in tiles of any height; its scale comes behind it.
//
// A panel is 32 scales (fp32), then [K/2][32][2] bytes q: a step of a bf16 panel in half of its bytes.
#pragma once
#include "cpu/gemm_vec.h"

namespace pagedec {

constexpr int64_t WEIGHT_ONLY_HEADER = 128;  // bytes of a panel before its weights
constexpr int64_t WEIGHT_ONLY_PAIR = 64;     // of two values of k

#if PD_LEVEL >= 2
PD_INLINE __m512 widen_bytes(const char *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#if PD_LEVEL >= 3
// 32 bytes: 16 outputs by a word of k
PD_INLINE __m512bh widen_words(const char *p) { return _mm512_cvtne2ps_pbh(widen_bytes(p + 16), widen_bytes(p)); }
// The same where loads are what there is too little of.
PD_INLINE __m512bh widen_words_of_one_load(const char *p) {
  __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
  asm("" : "+x"(bytes));  // or the compiler loads the halves
  const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)),
                high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1));
  return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}
PD_INLINE void widen_words(const char *p, char *to) { _mm512_storeu_si512(to, (__m512i)widen_words(p)); }
#else
PD_INLINE void widen_words(const char *p, char *to) {  // the upper halves: what they stand for has no more
  for (int i = 0; i < 2; i++) {
    const __m512i word = _mm512_srli_epi32(_mm512_castps_si512(widen_bytes(p + i * 16)), 16);
    _mm256_storeu_si256((__m256i *)(to + i * 32), _mm512_cvtepi32_epi16(word));
  }
}
#endif
PD_INLINE void widen_pair(const char *p, char *even, char *odd) {  // 16 outputs: two words of fp32
  const __m512i words = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
  _mm512_storeu_ps(even, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24)));
  _mm512_storeu_ps(odd, _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 8)));
}
#elif PD_LEVEL == 1
PD_INLINE __m256i widen_bytes(const char *p) {
  const __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
  return _mm256_srli_epi32(_mm256_castps_si256(values), 16);
}
PD_INLINE void widen_words(const char *p, char *to) {
  for (int i = 0; i < 2; i++) {  // packus works within 128-bit halves, hence the permutation
    const __m256i both = _mm256_packus_epi32(widen_bytes(p + i * 16), widen_bytes(p + i * 16 + 8));
    _mm256_storeu_si256((__m256i *)(to + i * 32), _mm256_permute4x64_epi64(both, 0xd8));
  }
}
PD_INLINE void widen_pair(const char *p, char *even, char *odd) {
  for (int i = 0; i < 2; i++) {
    const __m256i words = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(p + i * 16)));
    const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(words, 24), 24), high = _mm256_srai_epi32(words, 8);
    _mm256_storeu_ps((float *)(even + i * 32), _mm256_cvtepi32_ps(low));
    _mm256_storeu_ps((float *)(odd + i * 32), _mm256_cvtepi32_ps(high));
  }
}
#else
PD_INLINE void widen_words(const char *p, char *to) {
  uint16_t words[32];
  for (int i = 0; i < 32; i++) words[i] = bf16_from_float((float)(int8_t)p[i]);
  memcpy(to, words, 64);
}
PD_INLINE void widen_pair(const char *p, char *even, char *odd) {
  float low[16], high[16];
  for (int i = 0; i < 16; i++) low[i] = (float)(int8_t)p[2 * i], high[i] = (float)(int8_t)p[2 * i + 1];
  memcpy(even, low, 64), memcpy(odd, high, 64);
}
#endif

// Pairs of values of k of a panel as a plain panel has them: words of bf16, or two of fp32 each.
inline void widen_panel(const char *from, int dtype, int64_t pairs, char *to) {
  for (int64_t i = 0; i < pairs; i++, from += WEIGHT_ONLY_PAIR)
    for (int j = 0; j < 2; j++) {
      if (dtype == PD_BF16) widen_words(from + j * 32, to + i * 128 + j * 64);
      else widen_pair(from + j * 32, to + i * 256 + j * 64, to + i * 256 + 128 + j * 64);
    }
}

}  // namespace pagedec
