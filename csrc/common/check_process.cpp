// What can be wrong with a record of rules and of the rows that they change.
#include <cmath>

#include "common/check.h"

namespace pagedec {
namespace {

constexpr int64_t kMostTokens = INT32_MAX - 64;  // of a vocabulary

int check_rules(const pd_rules &r, int32_t i) {
  const char *name = "pd_process_logits";
  auto bad = [&](const char *field, double value, const char *limit) {
    return fail("%s: rules[%d].%s is %g; it must be %s", name, i, field, value, limit);
  };
  if (r.num_allowed < -1) return bad("num_allowed", r.num_allowed, "-1 or more");
  if (r.num_words < 0) return bad("num_words", r.num_words, "0 or more");
  if (r.num_biases < 0) return bad("num_biases", r.num_biases, "0 or more");
  if (r.no_repeat_ngram_size < 0) return bad("no_repeat_ngram_size", r.no_repeat_ngram_size, "0 or more");
  if (!(r.repetition_penalty > 0.0f) || !std::isfinite(r.repetition_penalty))
    return bad("repetition_penalty", r.repetition_penalty, "above 0 and finite");
  if (!std::isfinite(r.frequency_penalty)) return bad("frequency_penalty", r.frequency_penalty, "finite");
  if (!std::isfinite(r.presence_penalty)) return bad("presence_penalty", r.presence_penalty, "finite");
  if (r.num_allowed > 0 && check_pointer(name, "rules[].allowed", r.allowed)) return -1;
  if (r.num_words && (check_pointer(name, "rules[].word_indptr", r.word_indptr) ||
                      check_pointer(name, "rules[].word_tokens", r.word_tokens)))
    return -1;
  if (r.num_biases && (check_pointer(name, "rules[].bias_tokens", r.bias_tokens) ||
                       check_pointer(name, "rules[].bias_values", r.bias_values)))
    return -1;
  return 0;
}

// Where the i-th processed row stands: what gather reads must lie in the arrays.
int check_row(const pd_process_logits_args &a, int32_t i) {
  const char *name = "pd_process_logits";
  if (a.rows[i] < 0 || (i && a.rows[i] <= a.rows[i - 1]))
    return fail("%s: rows[%d] is %d; it must be 0 or more and above the row before it", name, i, a.rows[i]);
  if (check_range(name, "rule_ids[]", a.rule_ids[i], 0, (int64_t)a.num_rules - 1) ||
      check_range(name, "branches[]", a.branches[i], 0, (int64_t)a.num_branches - 1) ||
      check_range(name, "prompt_lengths[]", a.prompt_lengths[i], 0, INT32_MAX))
    return -1;
  const int32_t branch = a.branches[i], first = a.row_indptr[branch], end = a.row_indptr[branch + 1];
  if (check_range(name, "query_rows[]", a.query_rows[i], first, (int64_t)end - 1) ||
      check_range(name, "kv_len[]", a.kv_len[branch], (int64_t)end - first, (int64_t)a.table_stride * a.block_size))
    return -1;
  if (!a.parents) return 0;
  for (int32_t node = a.query_rows[i] - first, parent; (parent = a.parents[first + node]) >= 0; node = parent)
    if (parent >= node)
      return fail("%s: parents[%d] is %d; a parent stands before its node", name, first + node, parent);
  return 0;
}

}  // namespace

int check_process_logits(const pd_process_logits_args &a) {
  const char *name = "pd_process_logits";
  const void *const arrays[] = {a.logits, a.rows, a.rule_ids, a.rules, a.prompt_lengths, a.branches,
                                a.query_rows, a.row_indptr, a.kv_len, a.block_table, a.token_plane};
  const char *const names[] = {"logits", "rows", "rule_ids", "rules", "prompt_lengths", "branches",
                               "query_rows", "row_indptr", "kv_len", "block_table", "token_plane"};
  if (check_count(name, "num_rows", a.num_rows)) return -1;
  for (int i = 0; i < (int)(sizeof arrays / sizeof *arrays); i++)
    if (check_array(name, names[i], arrays[i], a.num_rows)) return -1;
  if (check_optional(name, "parents", a.parents) || check_range(name, "vocab", a.vocab, 1, kMostTokens) ||
      check_range(name, "block_size", a.block_size, 1, 65536) ||
      check_range(name, "table_stride", a.table_stride, 0, INT32_MAX) ||
      check_range(name, "num_rules", a.num_rules, 0, INT32_MAX) ||
      check_range(name, "num_branches", a.num_branches, 0, INT32_MAX))
    return -1;
  if (!kReadsRecords) return 0;
  for (int32_t i = 0; i < a.num_rules; i++)
    if (check_rules(a.rules[i], i)) return -1;
  for (int32_t i = 0; i < *a.num_rows; i++)
    if (check_row(a, i)) return -1;
  return 0;
}

}  // namespace pagedec
