// Gumbel-max draws. What top_k, top_p and min_p keep is a beginning of the row's order, so it is one order key (the
// last one kept) and one distance; a short beginning is also kept as a list. Nothing sorts the vocabulary.
#include <algorithm>
#include <array>
#include <cmath>

#include "common/context.h"
#include "cpu/check_small.h"
#include "cpu/philox.h"
#include "cpu/softmax_mass.h"
#include "cpu/topk.h"

namespace pagedec {
namespace {

constexpr int64_t kFirstTry = 256;     // a nucleus is rarely larger; if it is, the histogram finds its end
constexpr size_t kLongestList = 1024;  // from here on sweeping the row beats one Philox call for each token
constexpr int kBins = 1024;
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
  bool listed = false;
  std::vector<uint64_t> &list;
  std::vector<float> &scratch;

  Kept(std::vector<uint64_t> &keys, std::vector<float> &values) : list(keys), scratch(values) {}
  float distance_of(const Row &row, float x) const { return distance(x, row.top, inverse_temperature); }
  double mass_of(const Row &row, uint64_t key) const { return exp_small(distance_of(row, key_value(key))); }

  // Cuts the sorted list behind the key that reaches `wanted`; false if none does.
  bool cut(const Row &row, double wanted) {
    double sum = 0.0;
    for (size_t i = 0; i < list.size(); i++) {
      sum += mass_of(row, list[i]);
      if (sum >= wanted) {
        list.resize(i + 1);
        return true;
      }
    }
    return false;
  }

  void keep_mass(const Row &row, float top_p) {
    double total = 0.0;
    for (int64_t begin = 0; begin < row.vocab; begin += kMassChunk) {
      const int64_t n = row.vocab - begin < kMassChunk ? row.vocab - begin : kMassChunk;
      total += (double)mass_of_chunk(row.x + begin, n, row.top, inverse_temperature);
    }
    select_largest(row.x, row.vocab, row.maxima.data(), std::min(kFirstTry, row.vocab), scratch, list);
    listed = cut(row, (double)top_p * total) || (int64_t)list.size() == row.vocab;
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

  void prepare(const Row &row, const pd_draw &draw) {
    inverse_temperature = smaller(1.0f / draw.temperature, kLargest);
    least = draw.min_p > 0.0f ? std::log(draw.min_p) : kMinusInf;
    last = ~0ull, listed = false;
    if (draw.top_k > 0 && draw.top_k < row.vocab) {
      select_largest(row.x, row.vocab, row.maxima.data(), draw.top_k, scratch, list);
      if (draw.top_p < 1.0f) {
        double total = 0.0;
        for (const uint64_t key : list) total += mass_of(row, key);
        cut(row, (double)draw.top_p * total);
      }
      last = list.back(), listed = true;
    } else if (draw.top_p < 1.0f) {
      keep_mass(row, draw.top_p);
    }
    listed = listed && list.size() <= kLongestList;
  }
};

// No noise exceeds -log(-log(1 - 2^-25)) = 17.33.
constexpr float kMostNoise = 17.4f;

struct Winner {
  float score;
  int32_t token;

  void offer(float other, int32_t id) {
    if (other > score || (other == score && id < token)) score = other, token = id;
  }
};

int32_t draw_from_list(const Row &row, const Kept &kept, const NoiseKey &noise) {
  Winner winner{kMinusInf, row.argmax};
  for (const uint64_t key : kept.list) {
    const float d = kept.distance_of(row, key_value(key));
    if (d < kept.least || d + kMostNoise < winner.score) break;  // and so do all that follow
    uint32_t words[4];
    const int32_t token = key_token(key);
    philox(noise, (uint32_t)token / 4, words);
    winner.offer(d + gumbel_of<float>((int32_t)(words[token % 4] >> 8)), token);
  }
  return winner.token;
}

// Offers the tokens of a group whose noise could be enough: those with 1 - u below `chance`.
void draw_from_group(const Row &row, const Kept &kept, const NoiseKey &noise, int64_t group, float chance,
                     Winner &winner) {
  uint32_t words[64];
  philox_group(noise, (uint32_t)(group * 16), words);
  const int32_t margin = chance < 1.0f ? (int32_t)(chance * 16777216.0f) + 1 : 1 << 24;
  const int32_t first = margin < 1 << 24 ? (1 << 24) - 1 - margin : 0;  // the least word >> 8 that is looked at
  const I16 flip = set16i(INT32_MIN), limit = set16i((int32_t)((uint32_t)first << 8)) + flip;
  for (int i = 0; i < 64; i += 16) {
    uint32_t mask = mask_bits(less(load16i((const int32_t *)words + i) + flip, limit)) ^ 0xffff;
    for (; mask; mask &= mask - 1) {
      const int lane = i + __builtin_ctz(mask);
      const int64_t token = group * kGroup + lane;
      if (token >= row.vocab) break;
      const float d = kept.distance_of(row, row.x[token]);
      if (d < kept.least || order_key(row.x[token], token) > kept.last) continue;
      winner.offer(d + gumbel_of<float>((int32_t)(words[lane] >> 8)), (int32_t)token);
    }
  }
}

// Every token that could win: G <= -log(1 - u), so d + G > best needs 1 - u < exp(d - best), and d is at most the
// group's. The noise of a group is made only if some word could pass. The allowance of 0.1 % is far above the rounding
// of d, G, exp.
int32_t draw_from_row(const Row &row, const Kept &kept, const NoiseKey &noise) {
  Winner winner{kMinusInf, row.argmax};
  const int64_t groups = num_groups(row.vocab), start = row.argmax / kGroup;
  const float lowest = kept.last == ~0ull ? kMinusInf : key_value(kept.last);
  draw_from_group(row, kept, noise, start, 1.0f, winner);  // a good score to begin with
  for (int64_t g = 0; g < groups; g += 16) {
    float chances[16];
    const F16 maxima = load_some(row.maxima.data() + g, groups - g, kMinusInf);
    const F16 d = distance(maxima, set16(row.top), set16(kept.inverse_temperature));
    store16(chances, exp_small(d - set16(winner.score - 0.001f)));
    for (int64_t i = 0; i < 16 && g + i < groups; i++)
      if (chances[i] * 16777216.0f > 0.5f && row.maxima[g + i] >= lowest && g + i != start)
        draw_from_group(row, kept, noise, g + i, chances[i], winner);
  }
  return winner.token;
}

bool same_set(const pd_draw &a, const pd_draw &b) {
  return a.temperature == b.temperature && a.top_k == b.top_k && a.top_p == b.top_p && a.min_p == b.min_p;
}

}  // namespace

int check_sample(const pd_sample_args &a) {
  const char *name = "pd_sample";
  if (check_count(name, "num_draws", a.num_draws) || check_array(name, "draws", a.draws, a.num_draws) ||
      check_array(name, "logits", a.logits, a.num_draws) || check_array(name, "token_ids", a.token_ids, a.num_draws) ||
      check_range(name, "vocab", a.vocab, 1, INT32_MAX - kGroup))
    return -1;
  for (int32_t i = 0; i < *a.num_draws; i++) {
    const pd_draw &d = a.draws[i];
    if (d.row < 0) return fail("%s: draws[%d].row is %d; it must be 0 or more", name, i, d.row);
    if (d.top_k < 0) return fail("%s: draws[%d].top_k is %d; it must be 0 or more", name, i, d.top_k);
    if (!(d.temperature >= 0.0f) || !std::isfinite(d.temperature))
      return fail("%s: draws[%d].temperature is %g; it must be 0 or more", name, i, (double)d.temperature);
    if (!(d.top_p > 0.0f && d.top_p <= 1.0f))
      return fail("%s: draws[%d].top_p is %g; it must be above 0 and at most 1", name, i, (double)d.top_p);
    if (!(d.min_p >= 0.0f && d.min_p <= 1.0f))
      return fail("%s: draws[%d].min_p is %g; it must be 0 to 1", name, i, (double)d.min_p);
  }
  return 0;
}

void sample_part(pd_context &c, const pd_sample_args &a, int thread, int num_threads) {
  ThreadScratch &own = c.scratch[thread];
  Row row(own.maxima);
  Kept kept(own.keys, own.values);
  const Range draws = share(*a.num_draws, thread, num_threads);
  const pd_draw *prepared = nullptr;
  for (int64_t i = draws.begin; i < draws.end; i++) {
    const pd_draw &draw = a.draws[i];
    if (i == draws.begin || draw.row != a.draws[i - 1].row) {
      row.scan(a.logits + draw.row * (int64_t)a.vocab, a.vocab);
      prepared = nullptr;
    }
    a.token_ids[i] = row.argmax;
    if (draw.temperature == 0.0f || row.top == kMinusInf) continue;
    if (!prepared || !same_set(*prepared, draw)) kept.prepare(row, draw), prepared = &draw;
    const NoiseKey noise{draw.seed, draw.stream, draw.position};
    a.token_ids[i] = kept.listed ? draw_from_list(row, kept, noise) : draw_from_row(row, kept, noise);
  }
}

}  // namespace pagedec
