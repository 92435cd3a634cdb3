// What kernels that read logits have in common: a row's order, exp and log, and what a block of threads finds together.
//
// The order of a row is that of 64-bit keys: the logit turned into an integer that grows as the logit falls, then the
// token's id. A block of kRowThreads threads has a row at a time. What threads give one another are minima and sums of
// integers, which have no order; so neither who comes first nor how many blocks there are changes a bit.
#pragma once
#include "cuda/device.h"

namespace pagedec {

constexpr int kRowWarps = 16, kRowThreads = kRowWarps * kWarp;
constexpr float kMinusInf = -INFINITY;
constexpr float kLargest = 3.4028234663852886e38f;
constexpr uint64_t kNoKey = ~0ull;  // behind all others

PD_DEVICE uint32_t falling_bits(float x) {  // of no NaN; 0 and -0 are equal
  const uint32_t u = float_bits(x + 0.0f);
  return u & 0x80000000u ? u : 0x7fffffffu - u;
}
PD_DEVICE float rising_float(uint32_t u) { return bits_float(u & 0x80000000u ? u : 0x7fffffffu - u); }
PD_DEVICE float without_nan(float x) { return x == x ? x : kMinusInf; }
PD_DEVICE uint64_t order_key(float x, int64_t token) {
  return (uint64_t)falling_bits(without_nan(x)) << 32 | (uint64_t)token;
}
PD_DEVICE int32_t key_token(uint64_t key) { return (int32_t)(uint32_t)key; }
PD_DEVICE float key_value(uint64_t key) { return rising_float((uint32_t)(key >> 32)); }

// exp and log as on processors, from operations that are exact by definition (csrc/cpu/vec_small.h): the same bits.
PD_DEVICE float exp_small(float x) {
  x = -104.0f > x ? -104.0f : x;
  x = 89.0f < x ? 89.0f : x;
  const float magic = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the low bits are round(x log2 e)
  const float n = magic - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * (r * r) + r) + 1.0f;
  const int32_t exponent = (int32_t)float_bits(magic) - 0x4b400000, half = exponent >> 1;
  y = y * bits_float((uint32_t)(half + 127) << 23);
  return y * bits_float((uint32_t)(exponent - half + 127) << 23);
}
// log(2^e (1 + f)) for 1 + f in [sqrt(1/2), sqrt(2)).
PD_DEVICE float log_parts(float f, float e) {
  const float z = f * f;
  float y = 7.0376836292e-2f;
  y = y * f + -1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f + -1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f + -1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f + -2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  y = (y * f) * z;
  y = y + e * -2.12194440e-4f;
  y = y - z * 0.5f;
  return (f + y) + e * 0.693359375f;
}
PD_DEVICE float log_small(float x) {  // of a positive normal number
  const int32_t bits = (int32_t)float_bits(x), e = (bits - 0x3f3504f3) >> 23;
  return log_parts(bits_float((uint32_t)bits - ((uint32_t)e << 23)) - 1.0f, (float)e);
}

// A minimum or a sum over the block, to all its threads, which call it alike.
template <class Join>
PD_DEVICE uint64_t block_join(uint64_t x, Join join) {
  SHARED_ARRAY(uint64_t, of_warps, kRowWarps);
  for (int mask = kWarp / 2; mask; mask /= 2) x = join(x, shuffle_xor(x, mask));
  sync_block();  // of the call before
  if (thread_index() % kWarp == 0) of_warps[thread_index() / kWarp] = x;
  sync_block();
  uint64_t all = of_warps[0];
  for (int w = 1; w < kRowWarps; w++) all = join(all, of_warps[w]);
  return all;
}
PD_DEVICE uint64_t block_least(uint64_t x) {
  return block_join(x, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
}
PD_DEVICE uint64_t block_total(uint64_t x) {
  return block_join(x, [](uint64_t a, uint64_t b) { return a + b; });
}

// visit(token, logit) of each of this thread's tokens, of which some are under way at a time: one row is one block's,
// and a multiprocessor gets no more of memory than it has asked for.
constexpr int kAhead = 8;
template <int kThreads = kRowThreads, class Visit>
PD_DEVICE void each_logit(const float *x, int64_t vocab, const Visit &visit) {
  for (int64_t first = thread_index(); first < vocab; first += kAhead * kThreads) {
    float ahead[kAhead];
    PD_UNROLL for (int j = 0; j < kAhead; j++) {
      const int64_t t = first + j * kThreads;
      ahead[j] = t < vocab ? x[t] : 0.0f;
    }
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (first + j * kThreads < vocab) visit(first + j * kThreads, ahead[j]);
  }
}

// The same where what is done with a value is short: four at a time, so that a row's end is sooner there than by
// any number of loads of one value.
template <int kThreads = kRowThreads, class Visit>
PD_DEVICE void each_logit_of_four(const float *x, int64_t vocab, const Visit &visit) {
  struct alignas(16) Four {
    float values[4];
  };
  const int64_t before = lower<int64_t>((16 - (int64_t)((uintptr_t)x % 16)) / 4 % 4, vocab);
  const int64_t num_fours = (vocab - before) / 4, behind = before + 4 * num_fours;
  if (thread_index() < before) visit(thread_index(), x[thread_index()]);
  for (int64_t first = thread_index(); first < num_fours; first += kAhead * kThreads) {
    Four ahead[kAhead];
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (first + j * kThreads < num_fours) ahead[j] = load_whole<Four>(x + before + 4 * (first + j * kThreads));
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (first + j * kThreads < num_fours)
        PD_UNROLL for (int i = 0; i < 4; i++) visit(before + 4 * (first + j * kThreads) + i, ahead[j].values[i]);
  }
  if (thread_index() < vocab - behind) visit(behind + thread_index(), x[behind + thread_index()]);
}

struct Row {
  const float *x;
  int64_t vocab;
  uint64_t own, first;  // the first key of this thread's tokens, and of all
  float top;            // the largest logit, at most the largest float

  PD_DEVICE int32_t argmax() const { return key_token(first); }
  PD_DEVICE bool is_empty() const { return top == kMinusInf; }
  // visit(key) of each of this thread's tokens.
  template <class Visit>
  PD_DEVICE void each(Visit visit) const {
    each_logit(x, vocab, [&](int64_t t, float value) { visit(order_key(value, t)); });
  }
};
PD_DEVICE Row scan_row(const float *x, int64_t vocab) {
  Row row{x, vocab, kNoKey, 0, 0.0f};
  row.each([&](uint64_t key) { row.own = key < row.own ? key : row.own; });
  row.first = block_least(row.own);
  const float best = key_value(row.first);
  row.top = best < kLargest ? best : kLargest;
  return row;
}

// A logit's distance from the row's largest, over the temperature.
PD_DEVICE float distance_of(float x, float top, float inverse_temperature) {
  return ((x < kLargest ? x : kLargest) - top) * inverse_temperature;
}

// What tokens weigh: exp(distance), in units of 2^-places. Integers, whose sum is exact in any order: places are as
// many as a vocabulary of ones leaves room for (46 of 65,536 tokens), so cutting off what is below costs a row's sum
// less than its terms' own rounding does, up to some millions of tokens.
struct Mass {
  float top, inverse_temperature;
  int places;

  static constexpr bool kAlike = false;  // of select.h
  PD_DEVICE Mass(float top, float inverse_temperature, int64_t vocab)
      : top(top), inverse_temperature(inverse_temperature), places(62) {
    while ((int64_t)1 << (62 - places) < vocab) places--;
  }
  PD_DEVICE uint64_t of(uint64_t key) const {
    const float weight = exp_small(distance_of(key_value(key), top, inverse_temperature));
    return (uint64_t)(weight * bits_float((uint32_t)(127 + places) << 23));
  }
  PD_DEVICE double value(uint64_t sum) const { return (double)sum / (double)((uint64_t)1 << places); }
};

// log(sum(exp)) of a row.
PD_DEVICE float log_sum_exp(const Row &row) {
  const float best = key_value(row.first);
  if (best == kMinusInf || best > kLargest) return best;  // the whole block
  const Mass mass(row.top, 1.0f, row.vocab);
  uint64_t sum = 0;
  row.each([&](uint64_t key) { sum += mass.of(key); });
  return (float)((double)row.top + log(mass.value(block_total(sum))));
}

}  // namespace pagedec
