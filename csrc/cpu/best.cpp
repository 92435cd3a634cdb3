// The best continuations of rows that are ranked together. Within a row the order is that of its logits, so a group's
// k best are found row by row under a limit that only rises: the worst of the k found so far. Maxima of 64 logits tell
// which of them are worth a look. Threads share the rows; what each has found of a group is merged behind a barrier.
#include <algorithm>
#include <cmath>

#include "common/context.h"
#include "cpu/kept.h"

namespace pagedec {
namespace {

// How a row's logits become scores; the same for one float as for sixteen.
struct Scale {
  float score, lse, temperature;

  template <class F>
  __attribute__((always_inline)) F logprob(F x) const {
    using C = Ints<F>;
    return (x - C::real(lse)) / C::real(temperature);  // a temperature of 1 changes no bit
  }
  template <class F>
  __attribute__((always_inline)) F operator()(F x) const {
    return Ints<F>::real(score) + logprob(x);
  }
};

PD_INLINE float key_of(const BestEntry &e) { return key_value(e.rank); }
PD_INLINE float value_of(const BestEntry &e) { return key_value(e.rank << 32); }

// What one thread finds of a group, at the end of its list.
class Finder {
 public:
  Finder(std::vector<BestEntry> &list, int64_t k) : list_(list), first_(list.size()), k_((size_t)k) {}

  float limit() const { return limit_; }  // a lower key is not among the k best
  void offer(float key, float value, int64_t row, int64_t token) {
    const BestEntry entry{(uint64_t)falling_bits(key) << 32 | falling_bits(value), (uint64_t)row << 32 | token};
    if (!(entry < last_)) return;
    list_.push_back(entry);
    if (list_.size() - first_ >= 2 * k_ + 64) cut();
  }
  void cut() {
    if (list_.size() - first_ <= k_) return;
    const auto begin = list_.begin() + first_;
    std::nth_element(begin, begin + (k_ - 1), list_.end());
    list_.resize(first_ + k_);
    last_ = list_.back();
    limit_ = key_of(last_);
  }

 private:
  std::vector<BestEntry> &list_;
  const size_t first_, k_;
  BestEntry last_{~0ull, ~0ull};
  float limit_ = kMinusInf;
};

// visit(first group of sixteen, whose highest score reaches the limit as it is then).
template <class Visit>
PD_INLINE void for_worthy_groups(const float *maxima, int64_t groups, const Scale &scale, const Finder &finder,
                                 Visit visit) {
  for (int64_t g = 0; g < groups; g += 16) {
    const F16 scores = scale(load_some(maxima + g, groups - g, kMinusInf));
    uint32_t mask = mask_bits(less(set16(kMinusInf), scores)) & ~mask_bits(less(scores, set16(finder.limit())));
    if (groups - g < 16) mask &= (1u << (groups - g)) - 1;
    for (; mask; mask &= mask - 1) visit(g + __builtin_ctz(mask));
  }
}

void rank_row(const float *x, int64_t vocab, const float *maxima, const Scale &scale, int64_t row, Finder &finder) {
  for_worthy_groups(maxima, num_groups(vocab), scale, finder, [&](int64_t g) {
    const int64_t end = std::min(g * kGroup + kGroup, vocab);
    for (int64_t i = g * kGroup; i < end; i += 16) {
      const F16 scores = scale(larger(load_some(x + i, end - i, kMinusInf), set16(kMinusInf)));
      uint32_t mask = mask_bits(less(set16(kMinusInf), scores)) & ~mask_bits(less(scores, set16(finder.limit())));
      if (end - i < 16) mask &= (1u << (end - i)) - 1;
      for (; mask; mask &= mask - 1) {
        const int64_t token = i + __builtin_ctz(mask);
        finder.offer(scale(x[token]), x[token], row, token);
      }
    }
  });
}

// As in draw_from_row: who gets past the limit needs 1 - u < exp(limit - score). The allowance is far above what
// rounding does to scores of their size.
float chance_of(float score, float limit) {
  return exp_small(score - (limit - (0.001f + 1e-6f * std::fabs(limit))));
}

void draw_row(const Row &row, const Kept &kept, const NoiseKey &noise, const Scale &scale, int64_t number,
              Finder &finder) {
  auto offer = [&](float x, int64_t token, int32_t word) {
    const float score = scale(x);
    if (score > kMinusInf) finder.offer(score + gumbel_of<float>(word), x, number, token);
  };
  if (kept.listed) {
    for (const uint64_t key : kept.list) {
      const float x = key_value(key);
      if (kept.is_too_far(kept.distance_of(row, x), key) || scale(x) + kMostNoise < finder.limit()) break;
      uint32_t words[4];
      const int32_t token = key_token(key);
      philox(noise, (uint32_t)token / 4, words);
      offer(x, token, (int32_t)(words[token % 4] >> 8));
    }
    return;
  }
  const float lowest = kept.last == ~0ull ? kMinusInf : key_value(kept.last);
  for (int64_t g = 0; g < num_groups(row.vocab); g++) {
    const float chance = chance_of(scale(row.maxima[g]), finder.limit());
    if (!(chance * 16777216.0f > 0.5f) || row.maxima[g] < lowest) continue;
    for_likely_tokens(noise, g, row.vocab, chance, [&](int64_t token, int32_t word) {
      const float x = without_nan(row.x[token]);
      const uint64_t key = order_key(x, token);
      if (!kept.is_too_far(kept.distance_of(row, x), key) && key <= kept.last) offer(x, token, word);
    });
  }
}

}  // namespace

void best_rows_part(pd_context &c, const pd_best_args &a, int thread, int num_threads) {
  ThreadScratch &own = c.scratch[thread];
  own.found.clear(), own.runs.clear();
  const Range rows = share(*a.num_rows, thread, num_threads);
  Row row(own.maxima);
  Kept kept(own.keys, own.values);
  own.maxima.resize(num_groups(a.vocab));
  int32_t g = 0;
  for (int64_t i = rows.begin; i < rows.end;) {
    while (a.groups[g].stop <= i) g++;
    const pd_best_group &group = a.groups[g];
    const int64_t end = std::min(rows.end, (int64_t)group.stop);
    const size_t first = own.found.size();
    Finder finder(own.found, group.k);
    for (; i < end; i++) {
      const pd_best_row &r = a.rows[i];
      const float *x = a.logits + r.row * (int64_t)a.vocab;
      if (!a.has_lse)
        a.lse[i] = maxima_and_lse(x, a.vocab, own.maxima.data());
      else if (!group.is_drawn)
        for (int64_t j = 0; j < num_groups(a.vocab); j++) own.maxima[j] = group_max(x, a.vocab, j);
      const Scale scale{r.score, a.lse[i], group.is_drawn ? group.temperature : 1.0f};
      if (!group.is_drawn) {
        rank_row(x, a.vocab, own.maxima.data(), scale, i, finder);
        continue;
      }
      row.scan(x, a.vocab);
      if (row.top == kMinusInf) continue;
      const pd_draw draw{group.seed, r.stream, r.row, r.position, group.top_k, group.temperature, group.top_p,
                         group.min_p};
      kept.prepare(row, draw, group.min_tokens_to_keep);
      draw_row(row, kept, NoiseKey{draw.seed, draw.stream, draw.position}, scale, i, finder);
    }
    finder.cut();
    own.runs.push_back({g, first, own.found.size()});
  }
}

void best_part(pd_context &c, const pd_best_args &a, int thread, int num_threads) {
  std::vector<BestEntry> &merged = c.scratch[thread].merged;
  const Range groups = share(a.num_groups, thread, num_threads);
  int64_t at = 0;
  for (int64_t g = 0; g < groups.end; at += a.groups[g++].k) {
    if (g < groups.begin) continue;
    const pd_best_group &group = a.groups[g];
    merged.clear();
    for (int t = 0; t < num_threads; t++) {  // of its runs, which ascend, one at most is the group's
      const ThreadScratch &own = c.scratch[t];
      const auto comes_before = [](const BestRun &run, int32_t group) { return run.group < group; };
      const auto run = std::lower_bound(own.runs.begin(), own.runs.end(), g, comes_before);
      if (run == own.runs.end() || run->group != g) continue;
      merged.insert(merged.end(), own.found.begin() + run->first, own.found.begin() + run->stop);
    }
    if ((int64_t)merged.size() > group.k) {
      std::nth_element(merged.begin(), merged.begin() + (group.k - 1), merged.end());
      merged.resize(group.k);
    }
    std::sort(merged.begin(), merged.end());
    a.counts[g] = (int32_t)merged.size();
    for (size_t i = 0; i < merged.size(); i++) {
      const int64_t row = (int64_t)(merged[i].where >> 32);
      const float value = value_of(merged[i]);
      const Scale scale{a.rows[row].score, a.lse[row], group.is_drawn ? group.temperature : 1.0f};
      a.candidates[at + i] = {a.rows[row].place, (int32_t)(uint32_t)merged[i].where, key_of(merged[i]), value,
                              scale(value), scale.logprob(value)};
    }
  }
}

}  // namespace pagedec
