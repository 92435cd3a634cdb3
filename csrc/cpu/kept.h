// The tokens of a row that may be drawn: what top_k, top_p and min_p leave of it is a beginning of the row's order, so
// it is one order key (the last one kept) and one distance; a short beginning is also kept as a list. Nothing sorts the
// vocabulary.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cpu/philox.h"
#include "cpu/softmax_mass.h"
#include "cpu/topk.h"

namespace pagedec {
namespace {

constexpr int64_t kFirstTry = 256;     // a nucleus is rarely larger; if it is, the histogram finds its end
constexpr size_t kLongestList = 1024;  // from here on sweeping the row beats one Philox call for each token
constexpr int kBins = 1024;
// No noise exceeds -log(-log(1 - 2^-25)) = 17.33.
constexpr float kMostNoise = 17.4f;
constexpr float kBinsPerNat = 32.0f;   // 32 nats: what lies below weighs less than 4e-9 of a row of 262,144 tokens

struct Row {
  const float *x = nullptr;
  int64_t vocab = 0;
  float top = 0.0f;     // the largest logit, at most the largest float
  int32_t argmax = 0;
  std::vector<float> &maxima;

  explicit Row(std::vector<float> &own) : maxima(own) {}
  void scan(const float *logits, int64_t num_tokens) {
    x = logits, vocab = num_tokens;
    const int64_t groups = num_groups(vocab);
    maxima.resize(groups);
    float best = kMinusInf;
    int64_t group = 0;
    for (int64_t g = 0; g < groups; g++) {
      maxima[g] = group_max(x, vocab, g);
      if (maxima[g] > best) best = maxima[g], group = g;
    }
    argmax = first_equal(x, vocab, group, best);
    top = smaller(best, kLargest);
  }
};

// The tokens of a row that may be drawn under some parameters.
struct Kept {
  float inverse_temperature = 0.0f, least = 0.0f;  // least distance (min_p)
  uint64_t last = ~0ull;                           // the last key kept
  uint64_t sure = 0;                               // up to this key they are kept however far they lie
  bool listed = false;
  std::vector<uint64_t> &list;
  std::vector<float> &scratch;

  Kept(std::vector<uint64_t> &keys, std::vector<float> &values) : list(keys), scratch(values) {}
  float distance_of(const Row &row, float x) const { return distance(x, row.top, inverse_temperature); }
  double mass_of(const Row &row, uint64_t key) const { return exp_small(distance_of(row, key_value(key))); }

  bool is_too_far(float distance, uint64_t key) const { return distance < least && key > sure; }

  // Cuts the sorted list behind the key that reaches `wanted`, and not before `always` keys; false if none does.
  bool cut(const Row &row, double wanted, int64_t always = 1) {
    double sum = 0.0;
    for (size_t i = 0; i < list.size(); i++) {
      sum += mass_of(row, list[i]);
      if (sum >= wanted) {
        list.resize(std::max(i + 1, std::min((size_t)always, list.size())));
        return true;
      }
    }
    return false;
  }

  void keep_mass(const Row &row, float top_p, int64_t always) {
    double total = 0.0;
    for (int64_t begin = 0; begin < row.vocab; begin += kMassChunk) {
      const int64_t n = row.vocab - begin < kMassChunk ? row.vocab - begin : kMassChunk;
      total += (double)mass_of_chunk(row.x + begin, n, row.top, inverse_temperature);
    }
    const int64_t count = std::min(std::max(kFirstTry, always), row.vocab);
    select_largest(row.x, row.vocab, row.maxima.data(), count, scratch, list);
    listed = cut(row, (double)top_p * total, always) || (int64_t)list.size() == row.vocab;
    if (listed)
      last = list.back();
    else
      keep_mass_by_histogram(row, top_p);
  }

  // The mass in each thirty-second of a nat below the top finds the bin where top_p is reached; only that bin is
  // sorted.
  void keep_mass_by_histogram(const Row &row, float top_p) {
    std::array<double, kBins + 1> bins{};  // the last: what lies too low to count
    for_near_vectors(row, [&](int64_t, int64_t n, F16 bin, F16 d) {
      int32_t bins_of[16];
      float masses[16];
      store16i(bins_of, truncate(bin));
      store16(masses, exp_small(d));
      for (int64_t j = 0; j < n; j++) bins[bins_of[j]] += (double)masses[j];
    });
    double total = 0.0, before = 0.0;
    for (int bin = 0; bin < kBins; bin++) total += bins[bin];
    const double wanted = (double)top_p * total;
    int end = 0;
    while (end < kBins && before + bins[end] < wanted) before += bins[end++];
    if (end == kBins) return;  // only rounding keeps the sum below: everything is kept
    list.clear();
    for_near_vectors(row, [&](int64_t first, int64_t n, F16 bin, F16) {
      const I16 number = truncate(bin);
      uint32_t mask = mask_bits(less(number, set16i(end + 1))) & ~mask_bits(less(number, set16i(end)));
      for (mask &= (1u << n) - 1; mask; mask &= mask - 1) {
        const int64_t token = first + __builtin_ctz(mask);
        list.push_back(order_key(row.x[token], token));
      }
    });
    if (!std::is_sorted(list.begin(), list.end())) std::sort(list.begin(), list.end());
    cut(row, wanted - before);
    last = list.back();
  }

  // visit(first token, number of tokens, bins as floats, distances) for sixteen at a time, where some may be near the
  // top.
  template <class Visit>
  void for_near_vectors(const Row &row, Visit visit) const {
    for (int64_t g = 0; g < num_groups(row.vocab); g++) {
      if (!(distance_of(row, row.maxima[g]) * -kBinsPerNat < (float)kBins)) continue;
      const int64_t end = std::min(g * kGroup + kGroup, row.vocab);
      for (int64_t i = g * kGroup; i < end; i += 16) {
        const F16 logits = load_some(row.x + i, end - i, kMinusInf);
        const F16 d = distance(logits, set16(row.top), set16(inverse_temperature));
        visit(i, std::min<int64_t>(end - i, 16), smaller(d * set16(-kBinsPerNat), set16((float)kBins)), d);
      }
    }
  }

  // `always`: so many tokens are kept at each cut, however little they weigh.
  void prepare(const Row &row, const pd_draw &draw, int64_t always = 1) {
    inverse_temperature = smaller(1.0f / draw.temperature, kLargest);
    least = draw.min_p > 0.0f ? std::log(draw.min_p) : kMinusInf;
    last = ~0ull, sure = 0, listed = false;
    always = std::min(always, row.vocab);
    if (always > 1 && draw.min_p > 0.0f) {
      select_largest(row.x, row.vocab, row.maxima.data(), always, scratch, list);
      sure = list.back();
    }
    const int64_t top_k = draw.top_k > 0 ? std::max((int64_t)draw.top_k, always) : 0;
    if (top_k > 0 && top_k < row.vocab) {
      select_largest(row.x, row.vocab, row.maxima.data(), top_k, scratch, list);
      if (draw.top_p < 1.0f) {
        double total = 0.0;
        for (const uint64_t key : list) total += mass_of(row, key);
        cut(row, (double)draw.top_p * total, always);
      }
      last = list.back(), listed = true;
    } else if (draw.top_p < 1.0f) {
      keep_mass(row, draw.top_p, always);
    }
    listed = listed && list.size() <= kLongestList;
  }
};

// visit(token, word >> 8) of the tokens of a group whose noise could be enough: those with 1 - u below `chance`.
template <class Visit>
PD_INLINE void for_likely_tokens(const NoiseKey &noise, int64_t group, int64_t vocab, float chance, Visit visit) {
  uint32_t words[64];
  philox_group(noise, (uint32_t)(group * 16), words);
  const int32_t margin = chance < 1.0f ? (int32_t)(chance * 16777216.0f) + 1 : 1 << 24;
  const int32_t first = margin < 1 << 24 ? (1 << 24) - 1 - margin : 0;  // the least word >> 8 that is looked at
  const I16 flip = set16i(INT32_MIN), limit = set16i((int32_t)((uint32_t)first << 8)) + flip;
  for (int i = 0; i < 64; i += 16) {
    uint32_t mask = mask_bits(less(load16i((const int32_t *)words + i) + flip, limit)) ^ 0xffff;
    for (; mask; mask &= mask - 1) {
      const int lane = i + __builtin_ctz(mask);
      if (group * kGroup + lane >= vocab) break;
      visit(group * kGroup + lane, (int32_t)(words[lane] >> 8));
    }
  }
}

}  // namespace
}  // namespace pagedec
