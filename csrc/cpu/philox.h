// Counter-based noise: Philox4x32-10 (Salmon et al. 2011) and the Gumbel variable made of one word. The integers are
// the same on every instruction set by definition, the floats because only exact operations are used (vec_small.h).
#pragma once
#include <cstdint>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

// Everything of the counter but the token.
struct NoiseKey {
  uint64_t seed, stream;
  int32_t position;
};

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

PD_INLINE void philox(const NoiseKey &key, uint32_t counter, uint32_t words[4]) {
  uint32_t c0 = (uint32_t)key.stream, c1 = (uint32_t)(key.stream >> 32), c2 = (uint32_t)key.position, c3 = counter;
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
  for (int i = 0; i < kRounds; i++, k0 += kWeyl0, k1 += kWeyl1) {
    const uint64_t p0 = (uint64_t)kMultiplier0 * c0, p1 = (uint64_t)kMultiplier1 * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The words of the 64 tokens of counters first .. first + 15, in token order.
#if PD_LEVEL == 0
PD_INLINE void philox_group(const NoiseKey &key, uint32_t first, uint32_t words[64]) {
  for (uint32_t i = 0; i < 16; i++) philox(key, first + i, words + 4 * i);
}
#else
// A counter word takes 64 bits, of which vpmuludq reads the low half: what is left in the high half does no harm.
#if PD_LEVEL >= 2
using Wide = __m512i;
constexpr int kWide = 8;
PD_INLINE Wide wide(uint64_t x) { return _mm512_set1_epi64((int64_t)x); }
PD_INLINE Wide wide_counters(uint32_t c) {  // in the order that unpacking puts right
  return _mm512_add_epi64(wide(c), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
}
PD_INLINE Wide product(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
PD_INLINE Wide high(Wide a) { return _mm512_srli_epi64(a, 32); }
PD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
PD_INLINE Wide join(Wide low, Wide high) { return _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32)); }
PD_INLINE void store_words(uint32_t *out, Wide w01, Wide w23) {
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(w01, w23));
  _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(w01, w23));
}
#else
using Wide = __m256i;
constexpr int kWide = 4;
PD_INLINE Wide wide(uint64_t x) { return _mm256_set1_epi64x((int64_t)x); }
PD_INLINE Wide wide_counters(uint32_t c) { return _mm256_add_epi64(wide(c), _mm256_setr_epi64x(0, 2, 1, 3)); }
PD_INLINE Wide product(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
PD_INLINE Wide high(Wide a) { return _mm256_srli_epi64(a, 32); }
PD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
PD_INLINE Wide join(Wide low, Wide high) { return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xaa); }
PD_INLINE void store_words(uint32_t *out, Wide w01, Wide w23) {
  _mm256_storeu_si256((__m256i *)out, _mm256_unpacklo_epi64(w01, w23));
  _mm256_storeu_si256((__m256i *)(out + 8), _mm256_unpackhi_epi64(w01, w23));
}
#endif
PD_INLINE void philox_group(const NoiseKey &key, uint32_t first, uint32_t words[64]) {
  constexpr int kSets = 16 / kWide;  // interleaved: a round's latency is three times its throughput
  Wide c0[kSets], c1[kSets], c2[kSets], c3[kSets];
  for (int s = 0; s < kSets; s++) {
    c0[s] = wide((uint32_t)key.stream), c1[s] = wide(key.stream >> 32), c2[s] = wide((uint32_t)key.position);
    c3[s] = wide_counters(first + s * kWide);
  }
  const Wide m0 = wide(kMultiplier0), m1 = wide(kMultiplier1);
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
#pragma GCC unroll 10
  for (int i = 0; i < kRounds; i++, k0 += kWeyl0, k1 += kWeyl1) {
    const Wide key0 = wide(k0), key1 = wide(k1);
    for (int s = 0; s < kSets; s++) {
      const Wide p0 = product(c0[s], m0), p1 = product(c2[s], m1);
      c0[s] = xor3(high(p1), c1[s], key0);
      c1[s] = p1;
      c2[s] = xor3(high(p0), c3[s], key1);
      c3[s] = p0;
    }
  }
  for (int s = 0; s < kSets; s++) store_words(words + s * kWide * 4, join(c0[s], c1[s]), join(c2[s], c3[s]));
}
#endif

// -log(-log(u)) for u = (n + 0.5) * 2^-24, n = word >> 8. In fp32 u >= 1/2 is not exact, but 1 - u is, and so is what
// the logarithm needs.
template <class F, class I>
PD_INLINE F gumbel_of(I n) {
  using C = Ints<F>;
  const F scale = C::real(5.9604644775390625e-8f), one = C::real(1.0f);
  const auto low = less(n, C::integer(1 << 23));
  const I mirrored = select(low, n, C::integer((1 << 24) - 1) - n);
  const F x = (to_float(mirrored) + C::real(0.5f)) * scale;  // u below 1/2, else 1 - u: exact
  const I bits = as_int(x), exponent = shift_right(bits - C::integer(0x3f3504f3), 23);
  const auto near = less(x, C::real(0.29289321881f));  // u > sqrt(1/2)
  const F f_high = select(near, C::real(0.0f) - x, one - (x + x));
  const F e_high = select(near, C::real(0.0f), C::real(-1.0f));
  const F f_low = as_float(bits - shift_left(exponent, 23)) - one;
  const F e = C::real(0.0f) - log_parts(select(low, f_low, f_high), select(low, to_float(exponent), e_high));
  return C::real(0.0f) - log_small(e);
}

}  // namespace
}  // namespace pagedec
