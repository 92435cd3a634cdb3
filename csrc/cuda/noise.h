// Counter-based noise: Philox4x32-10 (Salmon et al. 2011) and the Gumbel variable made of one word: the bits that
// csrc/cpu/philox.h has.
#pragma once
#include "cuda/readout.h"

namespace pagedec {

constexpr float kMostNoise = 17.4f;  // none exceeds -log(-log(1 - 2^-25)) = 17.33

// Everything of the counter but the token.
struct NoiseKey {
  uint64_t seed, stream;
  int32_t position;
};
struct Words {  // of four tokens
  uint32_t a, b, c, d;
  PD_DEVICE uint32_t of(int32_t token) const {
    return token & 2 ? (token & 1 ? d : c) : (token & 1 ? b : a);
  }
};

PD_DEVICE Words philox(const NoiseKey &key, uint32_t counter) {
  uint32_t c0 = (uint32_t)key.stream, c1 = (uint32_t)(key.stream >> 32), c2 = (uint32_t)key.position, c3 = counter;
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
  for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
  }
  return {c0, c1, c2, c3};
}

// -log(-log(u)) for u = (n + 0.5) * 2^-24, n = word >> 8. In fp32 u >= 1/2 is not exact, but 1 - u is, and so is what
// the logarithm needs.
PD_DEVICE float gumbel_of(uint32_t word) {
  const int32_t n = (int32_t)(word >> 8);
  const bool is_low = n < 1 << 23;
  const float x = ((float)(is_low ? n : (1 << 24) - 1 - n) + 0.5f) * 5.9604644775390625e-8f;  // u below 1/2, else 1 - u
  const int32_t bits = (int32_t)float_bits(x), exponent = (bits - 0x3f3504f3) >> 23;
  const bool is_near = x < 0.29289321881f;  // u > sqrt(1/2)
  const float f_high = is_near ? 0.0f - x : 1.0f - (x + x), e_high = is_near ? 0.0f : -1.0f;
  const float f_low = bits_float((uint32_t)bits - ((uint32_t)exponent << 23)) - 1.0f;
  const float e = 0.0f - log_parts(is_low ? f_low : f_high, is_low ? (float)exponent : e_high);
  return 0.0f - log_small(e);
}

}  // namespace pagedec
