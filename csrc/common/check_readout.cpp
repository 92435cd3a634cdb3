// What can be wrong with the records of kernels that read logits.
#include <cmath>

#include "common/check.h"

namespace pagedec {
namespace {

constexpr int64_t kMostTokens = INT32_MAX - 64;  // of a vocabulary
constexpr int64_t kMostStride = INT32_MAX;       // from row to row: no place overflows

// What `field`[i] says of a draw.
int check_draw(const char *name, const char *field, int32_t i, const pd_draw &d) {
  if (d.row < 0) return fail("%s: %s[%d].row is %d; it must be 0 or more", name, field, i, d.row);
  if (d.top_k < 0) return fail("%s: %s[%d].top_k is %d; it must be 0 or more", name, field, i, d.top_k);
  if (!(d.temperature >= 0.0f) || !std::isfinite(d.temperature))
    return fail("%s: %s[%d].temperature is %g; it must be 0 or more", name, field, i, (double)d.temperature);
  if (!(d.top_p > 0.0f && d.top_p <= 1.0f))
    return fail("%s: %s[%d].top_p is %g; it must be above 0 and at most 1", name, field, i, (double)d.top_p);
  if (!(d.min_p >= 0.0f && d.min_p <= 1.0f))
    return fail("%s: %s[%d].min_p is %g; it must be 0 to 1", name, field, i, (double)d.min_p);
  if (d.rank < 0 || d.rank > PD_MAX_RANK)
    return fail("%s: %s[%d].rank is %d; it must be 0 to %d", name, field, i, d.rank, PD_MAX_RANK);
  return 0;
}
int check_draws(const char *name, const char *field, const pd_draw *draws, const int32_t *count) {
  for (int32_t i = 0; kReadsRecords && i < *count; i++)
    if (check_draw(name, field, i, draws[i])) return -1;
  return 0;
}

int check_group(const pd_best_args &a, int32_t g, int32_t begin) {
  const char *name = "pd_best";
  const pd_best_group &group = a.groups[g];
  if (group.first != begin)
    return fail("%s: groups[%d].first is %d; it must be %d, where the group before it stops", name, g, group.first,
                begin);
  if (group.stop < group.first || group.stop > *a.num_rows)
    return fail("%s: groups[%d].stop is %d; it must be %d to %d", name, g, group.stop, group.first, *a.num_rows);
  if (group.k < 1) return fail("%s: groups[%d].k is %d; it must be 1 or more", name, g, group.k);
  if (group.top_k < 0) return fail("%s: groups[%d].top_k is %d; it must be 0 or more", name, g, group.top_k);
  if (group.min_tokens_to_keep < 1)
    return fail("%s: groups[%d].min_tokens_to_keep is %d; it must be 1 or more", name, g, group.min_tokens_to_keep);
  if (!(group.temperature > 0.0f) || !std::isfinite(group.temperature))
    return fail("%s: groups[%d].temperature is %g; it must be above 0", name, g, (double)group.temperature);
  if (!(group.top_p > 0.0f && group.top_p <= 1.0f))
    return fail("%s: groups[%d].top_p is %g; it must be above 0 and at most 1", name, g, (double)group.top_p);
  if (!(group.min_p >= 0.0f && group.min_p <= 1.0f))
    return fail("%s: groups[%d].min_p is %g; it must be 0 to 1", name, g, (double)group.min_p);
  return 0;
}

// Each of an array's numbers, where it can be looked at.
int check_each(const char *name, const char *field, const int32_t *values, const int32_t *count, int64_t low,
               int64_t high) {
  for (int32_t i = 0; kReadsRecords && i < *count; i++)
    if (values[i] < low || values[i] > high)
      return fail("%s: %s[%d] is %d; it must be %lld to %lld", name, field, i, values[i], (long long)low,
                  (long long)high);
  return 0;
}

}  // namespace

int check_restrict_logits(const pd_restrict_logits_args &a) {
  const char *name = "pd_restrict_logits";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "logits", a.logits, a.num_rows) ||
      check_range(name, "vocab", a.vocab, 1, kMostTokens) || check_range(name, "num_drawn", a.num_drawn, 0, a.vocab) ||
      check_range(name, "num_words", a.num_words, 0, INT32_MAX))
    return -1;
  if (a.num_words && check_pointer(name, "words", a.words)) return -1;
  if (check_optional(name, "places", a.places)) return -1;
  if (a.places && check_each(name, "places", a.places, a.num_rows, -1, (int64_t)a.num_words - 1)) return -1;
  if (!a.num_banned) return 0;
  if (check_count(name, "num_banned", a.num_banned) ||
      check_array(name, "banned_rows", a.banned_rows, a.num_banned) ||
      check_array(name, "banned_tokens", a.banned_tokens, a.num_banned))
    return -1;
  if (!kReadsRecords) return 0;
  if (check_each(name, "banned_rows", a.banned_rows, a.num_banned, 0, (int64_t)*a.num_rows - 1)) return -1;
  return check_each(name, "banned_tokens", a.banned_tokens, a.num_banned, 0, (int64_t)a.vocab - 1);
}

int check_copy_rows(const pd_copy_rows_args &a) {
  const char *name = "pd_copy_rows";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "src", a.src, a.num_rows) ||
      check_array(name, "dst", a.dst, a.num_rows) || check_optional(name, "src_rows", a.src_rows) ||
      check_optional(name, "dst_rows", a.dst_rows) || check_range(name, "width", a.width, 1, INT32_MAX) ||
      check_range(name, "src_stride", a.src_stride, a.width, kMostStride) ||
      check_range(name, "dst_stride", a.dst_stride, a.width, kMostStride) ||
      check_dtype(name, a.src_dtype, "src_dtype") || check_dtype(name, a.dst_dtype, "dst_dtype"))
    return -1;
  if (a.src && a.src == a.dst) return fail("%s: dst is src; they must be two arrays", name);
  if (!std::isfinite(a.scale)) return fail("%s: scale is %g; it must be finite", name, (double)a.scale);
  if (a.dst_rows && check_each(name, "dst_rows", a.dst_rows, a.num_rows, -1, INT32_MAX)) return -1;
  for (int32_t i = 0; kReadsRecords && a.src_rows && i < *a.num_rows; i++)
    if (a.src_rows[i] < 0 && !(a.dst_rows && a.dst_rows[i] < 0))
      return fail("%s: src_rows[%d] is %d; it must be 0 to %d", name, i, a.src_rows[i], INT32_MAX);
  return 0;
}

int check_spread_logits(const pd_spread_logits_args &a) {
  const char *name = "pd_spread_logits";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "src", a.src, a.num_rows) ||
      check_array(name, "dst", a.dst, a.num_rows) || check_pointer(name, "places", a.places) ||
      check_range(name, "vocab", a.vocab, 1, kMostTokens) ||
      check_range(name, "draft_vocab", a.draft_vocab, 1, kMostTokens))
    return -1;
  if (a.src && a.src == a.dst) return fail("%s: dst is src; they must be two arrays", name);
  if (!kReadsRecords) return 0;
  uint32_t wrong = 0;  // its highest bit: a quick look at all of a vocabulary
  for (int32_t v = 0; v < a.vocab; v++)
    wrong |= ((uint32_t)a.places[v] + 1) | ((uint32_t)a.draft_vocab - 1 - (uint32_t)a.places[v]);
  return wrong >> 31 ? check_each(name, "places", a.places, &a.vocab, -1, (int64_t)a.draft_vocab - 1) : 0;
}

int check_pick_logits(const pd_pick_logits_args &a) {
  const char *name = "pd_pick_logits";
  if (check_count(name, "num_entries", a.num_entries) || check_array(name, "logits", a.logits, a.num_entries) ||
      check_array(name, "rows", a.rows, a.num_entries) || check_array(name, "tokens", a.tokens, a.num_entries) ||
      check_array(name, "values", a.values, a.num_entries) || check_range(name, "vocab", a.vocab, 1, kMostTokens))
    return -1;
  if (check_each(name, "rows", a.rows, a.num_entries, 0, INT32_MAX)) return -1;
  return check_each(name, "tokens", a.tokens, a.num_entries, 0, (int64_t)a.vocab - 1);
}

int check_argmax(const pd_argmax_args &a) {
  const char *name = "pd_argmax";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "logits", a.logits, a.num_rows) ||
      check_array(name, "token_ids", a.token_ids, a.num_rows) || check_range(name, "vocab", a.vocab, 1, kMostTokens))
    return -1;
  return 0;
}

int check_topk_lse(const pd_topk_lse_args &a) {
  const char *name = "pd_topk_lse";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "logits", a.logits, a.num_rows) ||
      check_array(name, "lse", a.lse, a.num_rows) || check_range(name, "vocab", a.vocab, 1, kMostTokens) ||
      check_range(name, "k", a.k, 0, a.vocab))
    return -1;
  if (a.k && (check_array(name, "token_ids", a.token_ids, a.num_rows) ||
              check_array(name, "values", a.values, a.num_rows)))
    return -1;
  return 0;
}

int check_sample(const pd_sample_args &a) {
  const char *name = "pd_sample";
  if (check_count(name, "num_draws", a.num_draws) || check_array(name, "draws", a.draws, a.num_draws) ||
      check_array(name, "logits", a.logits, a.num_draws) || check_array(name, "token_ids", a.token_ids, a.num_draws) ||
      check_range(name, "vocab", a.vocab, 1, kMostTokens))
    return -1;
  return check_draws(name, "draws", a.draws, a.num_draws);
}

int check_verify(const pd_verify_args &a) {
  const char *name = "pd_verify";
  if (check_count(name, "num_drafts", a.num_drafts) || check_array(name, "draws", a.draws, a.num_drafts) ||
      check_array(name, "drafts", a.drafts, a.num_drafts) || check_array(name, "drafted", a.drafted, a.num_drafts) ||
      check_array(name, "logits", a.logits, a.num_drafts) ||
      check_array(name, "draft_logits", a.draft_logits, a.num_drafts) ||
      check_array(name, "token_ids", a.token_ids, a.num_drafts) ||
      check_range(name, "vocab", a.vocab, 1, kMostTokens) ||
      check_range(name, "draft_vocab", a.draft_vocab, 1, kMostTokens))
    return -1;
  for (int32_t i = 0; kReadsRecords && i < *a.num_drafts; i++)
    if (a.drafted[i] < 0 || a.drafted[i] >= a.draft_vocab)
      return fail("%s: drafted[%d] is %d; it must be 0 to %d", name, i, a.drafted[i], a.draft_vocab - 1);
  if (check_draws(name, "draws", a.draws, a.num_drafts)) return -1;
  return check_draws(name, "drafts", a.drafts, a.num_drafts);
}

int check_best(const pd_best_args &a) {
  const char *name = "pd_best";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "logits", a.logits, a.num_rows) ||
      check_array(name, "lse", a.lse, a.num_rows) || check_array(name, "rows", a.rows, a.num_rows) ||
      check_range(name, "vocab", a.vocab, 1, kMostTokens) ||
      check_range(name, "num_groups", a.num_groups, 0, INT32_MAX))
    return -1;
  if (a.num_groups && (check_pointer(name, "groups", a.groups) || check_pointer(name, "counts", a.counts) ||
                       check_pointer(name, "candidates", a.candidates)))
    return -1;
  if (!kReadsRecords) return 0;
  int32_t begin = 0;
  for (int32_t g = 0; g < a.num_groups; begin = a.groups[g++].stop)
    if (check_group(a, g, begin)) return -1;
  if (begin != *a.num_rows) return fail("%s: the groups end with row %d of %d", name, begin, *a.num_rows);
  for (int32_t i = 0; i < *a.num_rows; i++)
    if (a.rows[i].row < 0) return fail("%s: rows[%d].row is %d; it must be 0 or more", name, i, a.rows[i].row);
  return 0;
}

int check_gumbel(const pd_context *context, int32_t first_token, int32_t num_tokens, const float *out) {
  const char *name = "pd_gumbel";
  if (check_pointer(name, "context", context)) return -1;
  if (check_range(name, "first_token", first_token, 0, INT32_MAX) ||
      check_range(name, "num_tokens", num_tokens, 0, (int64_t)INT32_MAX - first_token))
    return -1;
  return num_tokens ? check_pointer(name, "out", out) : 0;
}

}  // namespace pagedec
