// The parts of a linear layer with int8 weights and x in its own dtype: integers become numbers of that dtype, which
// has all of -127 .. 127, and go the way of a plain weight. So an output's chain is that of a plain layer whose weights
// are q, on every instruction set and in tiles of any height; its scale comes behind it.
//
// A panel is 32 scales (fp32), then for each two values of k 64 bytes q: [32][2] where words of two bf16 are
// multiplied, a step of a bf16 panel in half of its bytes; elsewhere [2][2][16], outputs by sixteen, so that one load
// and one conversion give numbers of fp32.
#pragma once
#include "cpu/gemm_vec.h"

namespace pagedec {

constexpr int64_t WEIGHT_ONLY_HEADER = 128;  // bytes of a panel before its weights
constexpr int64_t WEIGHT_ONLY_PAIR = 64;     // of two values of k
// Where q of an output (0 .. 31) by a value of k is.
constexpr int64_t weight_only_at(int output, int64_t k) {
  const int in_pair = PD_LEVEL >= 3 ? output * 2 + k % 2 : output / 16 * 32 + k % 2 * 16 + output % 16;
  return k / 2 * WEIGHT_ONLY_PAIR + in_pair;
}

// Sixteen q as numbers.
#if PD_LEVEL >= 2
PD_INLINE F16 widen_bytes(const char *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#elif PD_LEVEL == 1
PD_INLINE __m256 widen_eight_bytes(const char *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
PD_INLINE F16 widen_bytes(const char *p) { return {widen_eight_bytes(p), widen_eight_bytes(p + 8)}; }
#else
PD_INLINE F16 widen_bytes(const char *p) {
  float lane[16];
  for (int i = 0; i < 16; i++) lane[i] = (float)(int8_t)p[i];
  return load16(lane);
}
#endif

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
PD_INLINE void store_words(const char *p, char *to) { _mm512_storeu_si512(to, (__m512i)widen_words(p)); }
PD_INLINE void widen_pair(const char *p, char *even, char *odd) {  // 16 outputs: two words of fp32
  const __m512i words = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
  _mm512_storeu_ps(even, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24)));
  _mm512_storeu_ps(odd, _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 8)));
}
#else
// 16 outputs: words of bf16, the upper halves of fp32, whose lower ones are zero.
PD_INLINE void store_words(const char *p, char *to) {
  store16((float *)to, pair_of_upper_halves(widen_bytes(p), widen_bytes(p + 16)));
}
PD_INLINE void widen_pair(const char *p, char *even, char *odd) {
  store16((float *)even, widen_bytes(p)), store16((float *)odd, widen_bytes(p + 16));
}
#endif

// Pairs of values of k of a panel as a plain panel has them: words of bf16, or two of fp32 each.
inline void widen_panel(const char *from, int dtype, int64_t pairs, char *to) {
  for (int64_t i = 0; i < pairs; i++, from += WEIGHT_ONLY_PAIR)
    for (int j = 0; j < 2; j++) {
      if (dtype == PD_BF16) store_words(from + j * 32, to + i * 128 + j * 64);
      else widen_pair(from + j * 32, to + i * 256 + j * 64, to + i * 256 + 128 + j * 64);
    }
}

}  // namespace pagedec
