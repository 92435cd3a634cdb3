// Gumbel-max draws, the best or one behind it.
#include <algorithm>

#include "common/context.h"
#include "cpu/kept.h"

namespace pagedec {
namespace {

// A score and its token: the best of a row, or of those that come behind another.
struct Scored {
  float score;
  int32_t token;

  bool is_before(float other, int32_t id) const { return score > other || (score == other && token < id); }
};
constexpr Scored kBeforeAll{INFINITY, -1}, kNone{kMinusInf, -1};

struct Winner {
  Scored best, before;
  void offer(float score, int32_t id) {
    if (!best.is_before(score, id) && before.is_before(score, id)) best = {score, id};
  }
};

Scored draw_from_list(const Row &row, const Kept &kept, const NoiseKey &noise, Scored before) {
  Winner winner{kNone, before};
  for (const uint64_t key : kept.list) {
    const float d = kept.distance_of(row, key_value(key));
    if (d < kept.least || d + kMostNoise < winner.best.score) break;  // and so do all that follow
    uint32_t words[4];
    const int32_t token = key_token(key);
    philox(noise, (uint32_t)token / 4, words);
    winner.offer(d + gumbel_of<float>((int32_t)(words[token % 4] >> 8)), token);
  }
  return winner.best;
}

// Offers the tokens of a group whose noise could be enough: those with 1 - u below `chance`.
void draw_from_group(const Row &row, const Kept &kept, const NoiseKey &noise, int64_t group, float chance,
                     Winner &winner) {
  for_likely_tokens(noise, group, row.vocab, chance, [&](int64_t token, int32_t word) {
    const float d = kept.distance_of(row, row.x[token]);
    const uint64_t key = order_key(row.x[token], token);
    if (kept.is_too_far(d, key) || key > kept.last) return;
    winner.offer(d + gumbel_of<float>(word), (int32_t)token);
  });
}

// Every token that could win: G <= -log(1 - u), so d + G > best needs 1 - u < exp(d - best), and d is at most the
// group's. The noise of a group is made only if some word could pass. The allowance of 0.1 % is far above the rounding
// of d, G, exp.
Scored draw_from_row(const Row &row, const Kept &kept, const NoiseKey &noise, Scored before) {
  Winner winner{kNone, before};
  const int64_t groups = num_groups(row.vocab), start = row.argmax / kGroup;
  const float lowest = kept.last == ~0ull ? kMinusInf : key_value(kept.last);
  draw_from_group(row, kept, noise, start, 1.0f, winner);  // a good score to begin with
  for (int64_t g = 0; g < groups; g += 16) {
    float chances[16];
    const F16 maxima = load_some(row.maxima.data() + g, groups - g, kMinusInf);
    const F16 d = distance(maxima, set16(row.top), set16(kept.inverse_temperature));
    store16(chances, exp_small(d - set16(winner.best.score - 0.001f)));
    for (int64_t i = 0; i < 16 && g + i < groups; i++)
      if (chances[i] * 16777216.0f > 0.5f && row.maxima[g + i] >= lowest && g + i != start)
        draw_from_group(row, kept, noise, g + i, chances[i], winner);
  }
  return winner.best;
}

// The largest logit behind `before`.
Scored largest(const Row &row, Scored before) {
  Winner winner{kNone, before};
  for (int64_t g = 0; g < num_groups(row.vocab); g++) {
    if (row.maxima[g] <= winner.best.score) continue;  // equals come later
    const int64_t end = std::min(g * kGroup + kGroup, row.vocab);
    for (int64_t t = g * kGroup; t < end; t++) winner.offer(row.x[t], (int32_t)t);  // no NaN is before or behind any
  }
  return winner.best;
}

bool same_set(const pd_draw &a, const pd_draw &b) {
  return a.temperature == b.temperature && a.top_k == b.top_k && a.top_p == b.top_p && a.min_p == b.min_p;
}
// They find the same, but for a rank.
bool are_alike(const pd_draw &a, const pd_draw &b) {
  return a.row == b.row && a.seed == b.seed && a.stream == b.stream && a.position == b.position && same_set(a, b);
}

}  // namespace

void sample_part(pd_context &c, const pd_sample_args &a, int thread, int num_threads) {
  ThreadScratch &own = c.scratch[thread];
  Row row(own.maxima);
  Kept kept(own.keys, own.values);
  const Range draws = share(*a.num_draws, thread, num_threads);
  const pd_draw *prepared = nullptr;
  Scored first = kNone, last = kNone;  // of the draw before: of rank 0, and of its own
  for (int64_t i = draws.begin; i < draws.end; i++) {
    const pd_draw &draw = a.draws[i], *const before = i > draws.begin ? &draw - 1 : nullptr;
    if (!before || draw.row != before->row) {
      row.scan(a.logits + draw.row * (int64_t)a.vocab, a.vocab);
      prepared = nullptr;
    }
    a.token_ids[i] = row.argmax;
    if (row.top == kMinusInf) continue;
    const bool is_plain = draw.temperature == 0.0f;
    if (!is_plain && (!prepared || !same_set(*prepared, draw))) kept.prepare(row, draw), prepared = &draw;
    const NoiseKey noise{draw.seed, draw.stream, draw.position};
    const auto next = [&](Scored behind) {
      if (is_plain) return largest(row, behind);
      return kept.listed ? draw_from_list(row, kept, noise, behind) : draw_from_row(row, kept, noise, behind);
    };
    int32_t rank = 0;  // of last
    if (before && draw.rank > 0 && draw.rank == before->rank + 1 && are_alike(*before, draw))
      rank = before->rank;
    else
      first = last = is_plain ? Scored{row.x[row.argmax], row.argmax} : next(kBeforeAll);
    for (; rank < draw.rank && last.token >= 0; rank++) last = next(last);
    const Scored found = last.token >= 0 ? last : first;
    if (found.token >= 0) a.token_ids[i] = found.token;
  }
}

}  // namespace pagedec
