// Verification by rejection: a drafted token is kept with probability min(1, p / q), else replaced by a draw from
// norm(max(0, p - q)) (Leviathan et al. 2023, Chen et al. 2023). Each is verified by itself, from its own two rows.
#include <algorithm>
#include <cmath>

#include "common/context.h"
#include "cpu/kept.h"

namespace pagedec {
namespace {

constexpr uint64_t kAcceptance = 1ull << 62;  // changes the stream: no noise of a draw has this name

// What one draw is taken from: the tokens kept, by weights over their sum.
struct Distribution {
  Row row;
  Kept kept;
  double total = 1.0;
  bool is_one_hot = false;  // temperature 0, or nothing is above -inf

  Distribution(std::vector<float> &maxima, std::vector<uint64_t> &keys, std::vector<float> &values)
      : row(maxima), kept(keys, values) {}

  void prepare(const float *logits, int64_t vocab, const pd_draw &draw) {
    row.scan(logits, vocab);
    is_one_hot = draw.temperature == 0.0f || row.top == kMinusInf;
    total = 1.0;
    if (is_one_hot) return;
    kept.prepare(row, draw);
    total = mass();
  }

  // Of a token: its probability times `total`. In double from here on: a sum of 49,152 is to be right to 1e-7.
  double weight(int64_t token) const {
    if (is_one_hot) return token == row.argmax;
    if (token < 0 || token >= row.vocab || !(row.x[token] > kMinusInf)) return 0.0;
    const float d = kept.distance_of(row, row.x[token]);
    const uint64_t key = order_key(row.x[token], token);
    return kept.is_too_far(d, key) || key > kept.last ? 0.0 : (double)exp_small(d);
  }
  double probability(int64_t token) const { return weight(token) / total; }

 private:
  double mass() const {
    double sum = 0.0;
    if (kept.listed) {
      for (const uint64_t key : kept.list) sum += weight(key_token(key));
      return sum;
    }
    if (kept.last == ~0ull && kept.least == kMinusInf) {
      for (int64_t begin = 0; begin < row.vocab; begin += kMassChunk) {
        const int64_t n = std::min(row.vocab - begin, kMassChunk);
        sum += (double)mass_of_chunk(row.x + begin, n, row.top, kept.inverse_temperature);
      }
      return sum;
    }
    const float lowest = kept.last == ~0ull ? kMinusInf : key_value(kept.last);
    for (int64_t g = 0; g < num_groups(row.vocab); g++) {
      if (row.maxima[g] < lowest || kept.distance_of(row, row.maxima[g]) < kept.least) continue;
      sum += mass_of_group(g, lowest);
    }
    return sum;
  }

  // Of the tokens above `lowest`, and of those as low that are kept.
  double mass_of_group(int64_t group, float lowest) const {
    const int64_t end = std::min(group * kGroup + kGroup, row.vocab);
    const F16 none = set16(0.0f), limit = set16(lowest);
    F16 sum = none;
    double ties = 0.0;
    for (int64_t i = group * kGroup; i < end; i += 16) {
      const F16 x = larger(load_some(row.x + i, end - i, kMinusInf), set16(kMinusInf));
      const F16 d = distance(x, set16(row.top), set16(kept.inverse_temperature));
      const auto above = less(limit, x);
      sum = sum + select(above, select(less(d, set16(kept.least)), none, exp_small(d)), none);
      uint32_t equal = ~mask_bits(above) & ~mask_bits(less(x, limit)) & 0xffff;
      if (end - i < 16) equal &= (1u << (end - i)) - 1;
      for (; equal; equal &= equal - 1) ties += weight(i + __builtin_ctz(equal));
    }
    return (double)sum_lanes(sum) + ties;
  }
};

double uniform_of(const pd_draw &draw) {
  uint32_t words[4];
  philox(NoiseKey{draw.seed, draw.stream ^ kAcceptance, draw.position}, 0, words);
  const uint64_t bits = ((uint64_t)words[0] << 32 | words[1]) >> 11;  // 53 of them
  return ((double)bits + 0.5) * 0x1p-53;
}

// Gumbel-max over what p has above q. Scores are of weights: log(total of p) more than of probabilities.
class Residual {
 public:
  Residual(const Distribution &p, const Distribution &q, const pd_draw &draw)
      : p_(p), q_(q), noise_{draw.seed, draw.stream, draw.position} {}

  // The token that replaces a rejected one; `rejected` where nothing is left: then p is q, and it was right.
  int32_t draw(int32_t rejected) {
    if (p_.is_one_hot) return p_.row.argmax;
    if (p_.kept.listed)
      from_list();
    else
      from_row();
    return token_ < 0 ? rejected : token_;
  }

 private:
  void from_list() {
    for (const uint64_t key : p_.kept.list) {
      const float d = p_.kept.distance_of(p_.row, key_value(key));
      if (d < p_.kept.least || (double)(d + kMostNoise) < score_) break;
      uint32_t words[4];
      const int32_t token = key_token(key);
      philox(noise_, (uint32_t)token / 4, words);
      offer(token, (int32_t)(words[token % 4] >> 8));
    }
  }

  // As in sampling: only tokens whose noise could be enough, were all of p's weight left.
  void from_row() {
    const Row &row = p_.row;
    const int64_t groups = num_groups(row.vocab), start = row.argmax / kGroup;
    const float lowest = p_.kept.last == ~0ull ? kMinusInf : key_value(p_.kept.last);
    from_group(start, 1.0f);
    for (int64_t g = 0; g < groups; g++) {
      if (g == start || row.maxima[g] < lowest) continue;
      const float d = p_.kept.distance_of(row, row.maxima[g]);
      const float chance = token_ < 0 ? 1.0f : exp_small(d - ((float)score_ - 0.001f));
      if (chance * 16777216.0f > 0.5f) from_group(g, chance);
    }
  }
  void from_group(int64_t group, float chance) {
    for_likely_tokens(noise_, group, p_.row.vocab, chance,
                      [&](int64_t token, int32_t word) { offer((int32_t)token, word); });
  }
  void offer(int32_t token, int32_t word) {
    const double left = p_.weight(token) - q_.probability(token) * p_.total;
    if (!(left > 0.0)) return;
    const double score = std::log(left) + (double)gumbel_of<float>(word);
    if (token_ < 0 || score > score_ || (score == score_ && token < token_)) score_ = score, token_ = token;
  }

  const Distribution &p_, &q_;
  const NoiseKey noise_;
  double score_ = -1e300;
  int32_t token_ = -1;
};

}  // namespace

void verify_part(pd_context &c, const pd_verify_args &a, int thread, int num_threads) {
  ThreadScratch &own = c.scratch[thread];
  Distribution p(own.maxima, own.keys, own.values), q(own.draft_maxima, own.draft_keys, own.values);
  const Range drafts = share(*a.num_drafts, thread, num_threads);
  for (int64_t i = drafts.begin; i < drafts.end; i++) {
    const pd_draw &draw = a.draws[i], &draft = a.drafts[i];
    const int32_t token = a.drafted[i];
    p.prepare(a.logits + draw.row * (int64_t)a.vocab, a.vocab, draw);
    q.prepare(a.draft_logits + draft.row * (int64_t)a.draft_vocab, a.draft_vocab, draft);
    const bool is_kept = uniform_of(draw) * q.probability(token) < p.probability(token);
    a.token_ids[i] = is_kept ? token : Residual(p, q, draw).draw(token);
  }
}

}  // namespace pagedec
