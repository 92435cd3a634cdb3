// Bytes of a KV cache (pd_kv_kind) as the numbers that they are, in fp32 or bf16: exact, so the same on every
// instruction set.
#pragma once
#include "cpu/attention_tile.h"

namespace pagedec {

constexpr int E4M3_BIAS = 127 - 7;  // what fp32's exponent has more

// W bytes. Below 8, e4m3 has no exponent and counts steps of 2^-9: as the low bits of 2^-6, which is then taken away.
// Its NaN, which nobody writes, becomes 480.
#if PD_LEVEL >= 2
template <int KIND>
PD_INLINE vec::F widen_lanes(const uint8_t *p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
  if (KIND == PD_KV_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  const __m512i x = _mm512_cvtepu8_epi32(bytes), size = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
  const __m512i bits = _mm512_slli_epi32(size, 20), least = _mm512_set1_epi32((E4M3_BIAS + 1) << 23);
  const __m512 small = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_add_epi32(bits, least)), _mm512_castsi512_ps(least));
  const __m512i normal = _mm512_add_epi32(bits, _mm512_set1_epi32(E4M3_BIAS << 23));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
  const __m512i value = _mm512_mask_mov_epi32(normal, is_small, _mm512_castps_si512(small));
  return _mm512_castsi512_ps(_mm512_or_si512(value, _mm512_slli_epi32(_mm512_xor_si512(x, size), 24)));
}
#elif PD_LEVEL == 1
// e4m3 bits at the top of each lane as fp32 exponent and fraction: 2^-120 of the number, below 8 a denormal, which no
// thread flushes here (common/program.cpp).
PD_INLINE vec::F e4m3_at_top(__m256i x) {
  const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(x, 4), _mm256_set1_epi32((int)0x87f00000));
  return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}
template <int KIND>
PD_INLINE vec::F widen_lanes(const uint8_t *p) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
  if (KIND == PD_KV_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  return e4m3_at_top(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 24));
}
#else
template <int KIND>
PD_INLINE vec::F widen_lanes(const uint8_t *p) {
  float lanes[vec::W];
  for (int i = 0; i < vec::W; i++) {
    const uint32_t size = p[i] & 0x7f, exponent = size >> 3, sign = (uint32_t)(p[i] & 0x80) << 24;
    if (KIND == PD_KV_INT8) {
      lanes[i] = (float)(int8_t)p[i];
    } else if (exponent) {
      const uint32_t bits = ((size << 20) + (E4M3_BIAS << 23)) | sign;
      memcpy(lanes + i, &bits, 4);
    } else {
      lanes[i] = (float)size * (sign ? -0x1p-9f : 0x1p-9f);
    }
  }
  return vec::load(lanes);
}
#endif

PD_INLINE void store_exact(float *p, vec::F a, vec::F b) { vec::store(p, a), vec::store(p + vec::W, b); }
// Numbers of no more than eight bits: the upper halves.
#if PD_LEVEL >= 3
PD_INLINE void store_exact(uint16_t *p, vec::F a, vec::F b) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}
#elif PD_LEVEL == 2
PD_INLINE void store_exact(uint16_t *p, vec::F a, vec::F b) {
  const __m512i x = _mm512_srli_epi32(_mm512_castps_si512(a), 16), y = _mm512_srli_epi32(_mm512_castps_si512(b), 16);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x));
  _mm256_storeu_si256((__m256i *)(p + 16), _mm512_cvtepi32_epi16(y));
}
#elif PD_LEVEL == 1
PD_INLINE void store_exact(uint16_t *p, vec::F a, vec::F b) {
  const __m256i x = _mm256_srli_epi32(_mm256_castps_si256(a), 16), y = _mm256_srli_epi32(_mm256_castps_si256(b), 16);
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8));
}
#else
PD_INLINE void store_exact(uint16_t *p, vec::F a, vec::F b) {
  uint32_t bits[2 * vec::W];
  memcpy(bits, &a, sizeof a), memcpy(bits + vec::W, &b, sizeof b);
  for (int i = 0; i < 2 * vec::W; i++) p[i] = (uint16_t)(bits[i] >> 16);
}
#endif

// A line of the cache.
template <int KIND, class E>
PD_INLINE void widen_line(const uint8_t *from, E *to) {
#pragma GCC unroll 8
  for (int i = 0; i < 64; i += 2 * vec::W)
    store_exact(to + i, widen_lanes<KIND>(from + i), widen_lanes<KIND>(from + i + vec::W));
}
#if PD_LEVEL >= 2
// 32 bytes as bf16: their bits, without arithmetic.
PD_INLINE vec::I widen_e4m3(const uint8_t *p) {
  alignas(64) static constexpr uint16_t SMALL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
  const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(E4M3_BIAS << 7));
  const __mmask32 is_small = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_small, size, _mm512_load_si512(SMALL));
  const __m512i sign = _mm512_set1_epi16((int16_t)0x8000);
  return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(x, 8), sign, 0xf8);  // value | (shifted & sign)
}
#elif PD_LEVEL == 1
// 16 bytes as bf16: their bits, without arithmetic.
PD_INLINE __m256i widen_e4m3(const uint8_t *p) {
  const __m256i small_bits = _mm256_broadcastsi128_si256(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
  const __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(E4M3_BIAS << 7));
  // both bytes of word `size`
  const __m256i place = _mm256_add_epi16(_mm256_mullo_epi16(size, _mm256_set1_epi16(0x202)), _mm256_set1_epi16(0x100));
  const __m256i small = _mm256_shuffle_epi8(small_bits, place);
  const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16((int16_t)0x8000));
  return _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign);
}
#endif

// `count` bytes, a multiple of 64; `next`: as many to prefetch.
template <int KIND, class E>
void widen_bytes(const uint8_t *from, int count, E *to, const uint8_t *next) {
  for (int i = 0; i < count; i += 64) {
#if PD_LEVEL >= 2
    if constexpr (KIND == PD_KV_FP8 && sizeof(E) == 2)
      _mm512_storeu_si512(to + i, widen_e4m3(from + i)), _mm512_storeu_si512(to + i + 32, widen_e4m3(from + i + 32));
    else
#elif PD_LEVEL == 1
    if constexpr (KIND == PD_KV_FP8 && sizeof(E) == 2)
      for (int j = i; j < i + 64; j += 16) _mm256_storeu_si256((__m256i *)(to + j), widen_e4m3(from + j));
    else
#endif
      widen_line<KIND>(from + i, to + i);
    prefetch<true>(next + i);
  }
}

// Where rows are so few that bytes are widened once anyhow, that is done in registers, beside the sums.
template <class T, int KIND>
struct InRegisters : T {
  static constexpr bool EXIST = false;
};
#if PD_LEVEL == 3
template <int KIND>
struct InRegisters<OfBytes<Bf16>, KIND> : OfBytes<Bf16> {
  static constexpr bool EXIST = true;
  using M = uint8_t;
  PD_INLINE vec::I load(const M *p) {
    if constexpr (KIND == PD_KV_FP8) return widen_e4m3(p);
    return (__m512i)_mm512_cvtne2ps_pbh(widen_lanes<KIND>(p + vec::W), widen_lanes<KIND>(p));
  }
};
#endif

#if PD_LEVEL == 1
template <int KIND>
struct InRegisters<OfBytes<Bf16>, KIND> : OfBytes<Bf16> {
  static constexpr bool EXIST = true;
  using M = uint8_t;
  PD_INLINE vec::I load(const M *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
  PD_INLINE vec::F part(vec::I raw, int sub) {
    const __m256i high = sub ? _mm256_slli_epi32(raw, 16) : _mm256_slli_epi32(raw, 24);
    return KIND == PD_KV_FP8 ? e4m3_at_top(high) : _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 24));
  }
  PD_INLINE vec::I keep(vec::I raw, int visible) {
    return vec::and_raw(raw, visible == 1 ? 0xffu : visible == 2 ? 0xff00u : ~0u);
  }
};
#endif

// bf16 scales behind a block's bytes.
PD_INLINE void widen_scales(const uint8_t *from, int count, float *to, const uint8_t *next) {
  prefetch<true>(next);
  for (int i = 0; i < count; i++) {
    uint16_t bits;
    memcpy(&bits, from + 2 * i, 2);
    to[i] = vec::from_bf16(bits);
  }
}

}  // namespace pagedec
