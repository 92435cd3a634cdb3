// Rows of activations to int8 in groups of 32 (gemm_blocks.h), by the rules of gemm_int8.h.
#include "cpu/gemm_blocks.h"
#include "cpu/gemm_int8.h"

namespace pagedec {
namespace {

PD_INLINE float of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

#if PD_LEVEL >= 2
PD_INLINE __m512 first_floats(const float *x) { return _mm512_loadu_ps(x); }
PD_INLINE __m512 first_floats(const uint16_t *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
PD_INLINE uint32_t largest(const float *x) {  // magnitudes compare like integers
  const __m512i positive = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x), positive),
                                                  _mm512_and_si512(_mm512_loadu_si512(x + 16), positive)));
}
PD_INLINE uint32_t largest(const uint16_t *x) {
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i b = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  const __m128i c = _mm_max_epu16(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  // the instruction that looks through eight values finds the smallest
  return (uint32_t)(uint16_t)~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(c, _mm_set1_epi16(-1)))) << 16;
}
template <class E>
PD_INLINE void quantize_group(const E *x, XGroup &to) {
  const float max = of_bits(largest(x)), factor = int8_factor(max);
  const __m512 by = _mm512_set1_ps(factor);
  const __mmask16 usable = factor == 0 ? 0 : 0xffff;  // infinity and NaN must not get into a sum
  const __m128i low = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(usable, _mm512_mul_ps(first_floats(x), by)));
  const __m128i high = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(usable, _mm512_mul_ps(first_floats(x + 16), by)));
  const __m256i q = _mm256_set_m128i(high, low);
  _mm256_storeu_si256((__m256i *)to.q, q);
  to.scale = max / 127.f;
  // sums of eight bytes each, without a sign
  const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m256i sums = _mm256_add_epi64(eights, _mm256_unpackhi_epi64(eights, eights));
  to.sums[0] = (int16_t)(_mm_cvtsi128_si32(_mm256_castsi256_si128(sums)) - 16 * 128);
  to.sums[1] = (int16_t)(_mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1)) - 16 * 128);
}

#else
PD_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
PD_INLINE uint32_t bits_of(uint16_t bf16) { return (uint32_t)bf16 << 16; }
template <class E>
PD_INLINE void quantize_group(const E *x, XGroup &to) {
  uint32_t most = 0;  // magnitudes compare like integers
  for (int i = 0; i < X_GROUP; i++) {
    const uint32_t u = bits_of(x[i]) & 0x7fffffff;
    most = u > most ? u : most;
  }
  const float max = of_bits(most), by = int8_factor(max);
  to.scale = max / 127.f;
  if (by == 0) return (void)(memset(to.q, 0, sizeof to.q), memset(to.sums, 0, sizeof to.sums));
  int32_t q[X_GROUP], sums[2] = {};
  for (int i = 0; i < X_GROUP; i++) q[i] = int8_round(of_bits(bits_of(x[i])) * by);
  for (int i = 0; i < X_GROUP; i++) sums[i / 16] += q[i], to.q[i] = (int8_t)q[i];
  to.sums[0] = (int16_t)sums[0], to.sums[1] = (int16_t)sums[1];
}
#endif

}  // namespace

void quantize_groups(const void *x, int dtype, int64_t k, XGroup *to) {
  if (dtype == PD_BF16)
    for (int64_t i = 0; i < k; i += X_GROUP) quantize_group((const uint16_t *)x + i, *to++);
  else
    for (int64_t i = 0; i < k; i += X_GROUP) quantize_group((const float *)x + i, *to++);
}

}  // namespace pagedec
