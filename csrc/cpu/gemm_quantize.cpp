// Rows of activations to int8, and whether the processor multiplies bytes.
#include "common/context.h"
#include "cpu/gemm_int8.h"

namespace pagedec {
namespace {

bool find_vnni() {
#if PD_LEVEL >= 3
  return true;  // or the library would not be loaded
#elif defined(PD_EMULATE_VECTORS)
  return true;
#elif PD_LEVEL == 2
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

PD_INLINE float widen(float x) { return x; }
PD_INLINE float widen(uint16_t bf16) {
  const uint32_t u = (uint32_t)bf16 << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Magnitudes of floats compare like integers, NaN above everything: one NaN makes a whole group NaN.
float magnitude(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

template <class E>
uint32_t max_bits(const E *x, int64_t count) {
  uint32_t max = 0;
  for (int64_t i = 0; i < count; i++) {
    const float f = widen(x[i]);
    uint32_t u;
    memcpy(&u, &f, 4);
    u &= 0x7fffffff;
    max = u > max ? u : max;
  }
  return max;
}

// A group of `count` values, steps q0 q2 q1 q3 of 16 bits.
template <class E>
GroupHead quantize_wide(const E *x, int64_t count, int16_t *q) {
  const float max = magnitude(max_bits(x, count)), by = int8_factor(max);
  const int64_t steps = (count + 3) / 4;
  if (by == 0) {
    memset(q, 0, steps * 8);
    return {max / 127.f, 0};
  }
  int16_t rounded[GROUP] = {};
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i++) sum += rounded[i] = (int16_t)int8_round(widen(x[i]) * by);
  for (int64_t s = 0; s < steps; s++)
    q[s * 4] = rounded[s * 4], q[s * 4 + 1] = rounded[s * 4 + 2], q[s * 4 + 2] = rounded[s * 4 + 1],
          q[s * 4 + 3] = rounded[s * 4 + 3];
  return {max / 127.f, -128 * sum};
}

#if PD_LEVEL >= 2
PD_INLINE uint32_t max_bits64(const float *x) {
  const __m512i positive = _mm512_set1_epi32(0x7fffffff);
  __m512i max = _mm512_setzero_si512();
  for (int j = 0; j < 4; j++) max = _mm512_max_epu32(max, _mm512_and_si512(_mm512_loadu_si512(x + j * 16), positive));
  return _mm512_reduce_max_epu32(max);
}
PD_INLINE uint32_t max_bits64(const uint16_t *x) {
  const __m512i positive = _mm512_set1_epi16(0x7fff);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), positive),
                b = _mm512_and_si512(_mm512_loadu_si512(x + 32), positive);
  const __m512i c = _mm512_max_epu16(a, b);
  const __m256i d = _mm256_max_epu16(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  const __m128i e = _mm_max_epu16(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
  // the instruction that looks through eight values finds the smallest
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(e, _mm_set1_epi16(-1)));
  return (uint32_t)(uint16_t)~_mm_cvtsi128_si32(least) << 16;
}
PD_INLINE __m512 load_floats(const float *x) { return _mm512_loadu_ps(x); }
PD_INLINE __m512 load_floats(const uint16_t *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
// A whole group, as bytes.
template <class E>
PD_INLINE GroupHead quantize_bytes(const E *x, int8_t *q) {
  const float max = magnitude(max_bits64(x)), factor = int8_factor(max);
  const __m512 by = _mm512_set1_ps(factor);
  __m512i sum = _mm512_setzero_si512();
  for (int j = 0; j < 4; j++) {
    // factor 0: infinity and NaN must not get into a sum
    __m512i i = _mm512_maskz_cvtps_epi32(factor == 0 ? 0 : 0xffff, _mm512_mul_ps(load_floats(x + j * 16), by));
    sum = _mm512_add_epi32(sum, i);
    _mm_storeu_si128((__m128i *)(q + j * 16), _mm512_cvtepi32_epi8(i));
  }
  return {max / 127.f, -128 * _mm512_reduce_add_epi32(sum)};
}
template <class E>
void quantize_row_bytes(const E *x, int64_t k, const Int8Row &shape, char *row) {
  GroupHead *heads = (GroupHead *)(row + shape.heads);
  int64_t i = 0;
  for (; i + GROUP <= k; i += GROUP) *heads++ = quantize_bytes(x + i, (int8_t *)row + i);
  if (i == k) return;
  E rest[GROUP] = {};
  int8_t q[GROUP];
  memcpy(rest, x + i, (k - i) * sizeof(E));
  *heads = quantize_bytes(rest, q);
  memcpy(row + i, q, (k - i + 3) / 4 * 4);
}
#endif

template <class E>
void quantize(const E *x, int64_t k, const Int8Row &shape, char *row) {
#if PD_LEVEL >= 2
  if (shape.step_bytes == 4) return quantize_row_bytes(x, k, shape, row);
#endif
  GroupHead *heads = (GroupHead *)(row + shape.heads);
  for (int64_t i = 0; i < k; i += GROUP)
    *heads++ = quantize_wide(x + i, k - i < GROUP ? k - i : GROUP, (int16_t *)row + i);
}

}  // namespace

bool has_vnni() {
  static const bool found = find_vnni();
  return found;
}

void quantize_row(const void *x, int dtype, int64_t k, const Int8Row &shape, char *row) {
  if (dtype == PD_BF16) quantize((const uint16_t *)x, k, shape, row);
  else quantize((const float *)x, k, shape, row);
}

}  // namespace pagedec

extern "C" int pd_allow_vnni(pd_context *context, int32_t allow) {
  if (!context) return pagedec::fail("pd_allow_vnni: context is NULL");
  return context->vnni = pagedec::has_vnni() && (allow || PD_LEVEL >= 3);
}
