// Verification by rejection: a drafted token is kept with probability min(1, p / q), else replaced by a draw from
// norm(max(0, p - q)) (Leviathan et al. 2023, Chen et al. 2023). A block a draft: first q is cut, then p, whose list
// stays for the draw; of q nothing but its cuts is needed then.
#include "cuda/launch.h"
#include "cuda/kept.h"

namespace pagedec {
namespace {

constexpr int kRoom = 2048;
constexpr uint64_t kAcceptance = 1ull << 62;  // changes the stream: no noise of a draw has this name

// What one draw is taken from: the tokens kept, by weights over their sum.
struct Distribution {
  Row row;
  Kept kept;
  double total;
  bool is_one_hot;  // temperature 0, or nothing is above -inf

  // Of a token: its probability times `total`.
  PD_DEVICE double weight(int32_t token) const {
    if (is_one_hot) return token == row.argmax() ? 1.0 : 0.0;
    if (token < 0 || token >= row.vocab) return 0.0;
    const uint64_t key = order_key(row.x[token], token);
    const float d = distance_of(key_value(key), row.top, kept.inverse_temperature);
    return kept.keeps(key, d) ? (double)exp_small(d) : 0.0;
  }
  PD_DEVICE double probability(int32_t token) const { return weight(token) / total; }
};

PD_DEVICE Distribution distribution_of(const float *x, int32_t vocab, const pd_draw &draw, const Room &room) {
  Distribution found{scan_row(x, vocab), {}, 1.0, false};
  found.is_one_hot = draw.temperature == 0.0f || found.row.is_empty();
  if (found.is_one_hot) return found;
  found.kept = keep(found.row, cuts_of(draw), room);
  const Kept &kept = found.kept;
  const Mass mass(found.row.top, kept.inverse_temperature, vocab);
  uint64_t sum = 0;
  const auto add = [&](uint64_t key) {
    const float d = distance_of(key_value(key), found.row.top, kept.inverse_temperature);
    sum += kept.keeps(key, d) ? mass.of(key) : 0;
  };
  if (kept.num_listed < 0) found.row.each(add);
  for (int i = thread_index(); i < kept.num_listed; i += kRowThreads) add(room.list[i]);
  found.total = mass.value(block_total(sum));
  return found;
}

PD_DEVICE double uniform_of(const pd_draw &draw) {
  const Words words = philox({draw.seed, draw.stream ^ kAcceptance, draw.position}, 0);
  const uint64_t bits = ((uint64_t)words.a << 32 | words.b) >> 11;  // 53 of them
  return ((double)bits + 0.5) * 1.1102230246251565e-16;             // 2^-53
}

// Gumbel-max over what p has above q: the token that replaces a rejected one, and that one where nothing is left: then
// p is q, and it was right. Scores are of weights: log(total of p) more than of probabilities.
PD_DEVICE int32_t draw_residual(const Distribution &p, const Distribution &q, const pd_draw &draw, int32_t rejected,
                                const Room &room) {
  if (p.is_one_hot) return p.row.argmax();
  double best = -INFINITY;
  int32_t own = INT32_MAX;
  const auto offer = [&](int32_t token, float, float d, float noise) {
    if ((double)d + (double)noise + 0.001 < best) return;  // were all of p's weight left
    const double left = p.weight(token) - q.probability(token) * p.total;
    if (!(left > 0.0)) return;
    const double score = log(left) + (double)noise;
    if (score > best || (score == best && token < own)) best = score, own = token;
  };
  each_drawn(p.row, p.kept, room, {draw.seed, draw.stream, draw.position}, offer);
  const uint64_t bits = double_bits(best + 0.0);
  const uint64_t falling = bits >> 63 ? bits : 0x7fffffffffffffffull - bits;
  const uint64_t least = block_least(falling);
  const uint64_t token = block_least(falling == least ? (uint64_t)own : kNoKey);
  return token == (uint64_t)INT32_MAX ? rejected : (int32_t)token;
}

PD_KERNEL(kRowThreads) verify_kernel(pd_verify_args a) {
  SHARED_ARRAY(uint64_t, list, kRoom);
  SHARED_ARRAY(uint32_t, low, kBins);
  SHARED_ARRAY(uint32_t, high, kBins);
  const Room room{list, kRoom, {low, high}};
  for (int64_t i = block_index(); i < *a.num_drafts; i += num_grid_blocks()) {
    const int32_t drafted = a.drafted[i];
    Distribution q{}, p{};
    for (int side = 0; side < 2; side++) {  // one place where rows are cut, for both
      const bool is_target = side == 1;
      const pd_draw &draw = is_target ? a.draws[i] : a.drafts[i];
      const int32_t vocab = is_target ? a.vocab : a.draft_vocab;
      const float *x = (is_target ? a.logits : a.draft_logits) + draw.row * (int64_t)vocab;
      const Distribution found = distribution_of(x, vocab, draw, room);
      if (is_target)
        p = found;
      else
        q = found;
    }
    const pd_draw &draw = a.draws[i];
    const bool is_kept = uniform_of(draw) * q.probability(drafted) < p.probability(drafted);
    const int32_t token = is_kept ? drafted : draw_residual(p, q, draw, drafted, room);
    if (thread_index() == 0) a.token_ids[i] = token;
  }
}

}  // namespace

int enqueue_verify(pd_context &c, const pd_verify_args &a) {
  return launch(c, "pd_verify", verify_kernel, kRowThreads, a);
}

}  // namespace pagedec
