// A request's own rules, applied to the logits of its rows: bans, biases, penalties for what the row's history holds.
//
// Every rule touches a token's logit by that token's own numbers alone, in the order of pd_rules; so a row's bits
// depend on nothing else. A row costs its history and the tokens touched; only an allowed list needs a pass over the
// vocabulary.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/context.h"
#include "cpu/check_small.h"
#include "cpu/row_max.h"

namespace pagedec {
namespace {

struct Row {
  float *logits;
  int64_t vocab;
  const int32_t *history;
  int64_t length;

  bool known(int32_t token) const { return token >= 0 && token < vocab; }
  void ban(int32_t token) const {
    if (known(token)) logits[token] = kMinusInf;
  }
};

// The tokens that the i-th processed row sees, itself last.
void gather(const pd_process_logits_args &a, int64_t i, std::vector<int32_t> &history, std::vector<int32_t> &path) {
  const int32_t branch = a.branches[i], first = a.row_indptr[branch];
  const int32_t before = a.kv_len[branch] - (a.row_indptr[branch + 1] - first);
  const int32_t *table = a.block_table + branch * (int64_t)a.table_stride;
  auto token_at = [&](int32_t place) {
    return a.token_plane[table[place / a.block_size] * (int64_t)a.block_size + place % a.block_size];
  };
  int32_t node = a.query_rows[i] - first;
  path.clear();
  for (; a.parents && a.parents[first + node] >= 0; node = a.parents[first + node]) path.push_back(node);
  const int64_t chain = (int64_t)before + node + 1;
  history.resize(chain + path.size());
  for (int64_t place = 0; place < chain; place += a.block_size) {
    const int32_t *block = a.token_plane + table[place / a.block_size] * (int64_t)a.block_size;
    std::copy_n(block, std::min<int64_t>(a.block_size, chain - place), history.begin() + place);
  }
  for (size_t j = 0; j < path.size(); j++) history[chain + j] = token_at(before + path[path.size() - 1 - j]);
}

void subtract(const Row &row, float lse) {
  for (int64_t i = 0; i < row.vocab; i += 16)
    store_some(row.logits + i, load_some(row.logits + i, row.vocab - i) - set16(lse), row.vocab - i);
}

void ban_all_but(const Row &row, const int32_t *allowed, int64_t n, std::vector<float> &kept) {
  kept.resize(n);
  for (int64_t i = 0; i < n; i++) kept[i] = row.known(allowed[i]) ? row.logits[allowed[i]] : 0.0f;
  std::fill_n(row.logits, row.vocab, kMinusInf);
  for (int64_t i = 0; i < n; i++)
    if (row.known(allowed[i])) row.logits[allowed[i]] = kept[i];
}

void ban_words(const Row &row, const pd_rules &rules) {
  for (int32_t w = 0; w < rules.num_words; w++) {
    const int32_t *word = rules.word_tokens + rules.word_indptr[w];
    const int64_t prefix = rules.word_indptr[w + 1] - rules.word_indptr[w] - 1;
    if (prefix >= 0 && prefix <= row.length && std::equal(word, word + prefix, row.history + row.length - prefix))
      row.ban(word[prefix]);
  }
}

// Bans what follows each earlier place of the last n - 1 tokens (Knuth, Morris & Pratt 1977: linear whatever repeats).
void ban_ngrams(const Row &row, int64_t n, std::vector<int32_t> &border) {
  const int64_t m = n - 1;
  if (row.length < n) return;
  const int32_t *h = row.history, *last = h + row.length - m;
  border.assign(m + 1, 0);  // border[k]: the longest proper prefix of the first k tokens that is also their suffix
  for (int64_t i = 1, k = 0; i < m; i++) {
    while (k && last[i] != last[k]) k = border[k];
    k += last[i] == last[k];
    border[i + 1] = (int32_t)k;
  }
  for (int64_t i = 0, k = 0; i < row.length; i++) {
    if (k == m) {
      row.ban(h[i]);
      k = border[m];
    }
    while (k && h[i] != last[k]) k = border[k];
    if (m) k += h[i] == last[k];
  }
}

void penalize_repetition(const Row &row, float penalty, Met &met) {
  met.begin(row.vocab);
  for (int64_t i = 0; i < row.length; i++) {
    const int32_t token = row.history[i];
    if (!row.known(token) || met.count(token) > 1) continue;
    float &z = row.logits[token];
    z = z > 0.0f ? z / penalty : z * penalty;
  }
}

void penalize_generated(const Row &row, int64_t prompt_length, float frequency, float presence, Met &met) {
  met.begin(row.vocab);
  for (int64_t i = prompt_length; i < row.length; i++)
    if (row.known(row.history[i])) met.count(row.history[i]);
  for (int64_t i = prompt_length; i < row.length; i++) {
    const int32_t token = row.history[i];
    const int32_t times = row.known(token) ? met.take(token) : 0;
    if (times) row.logits[token] = (row.logits[token] - frequency * (float)times) - presence;
  }
}

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
  if (check_range(name, "vocab", a.vocab, 1, INT32_MAX - kGroup) ||
      check_range(name, "block_size", a.block_size, 1, 65536) ||
      check_range(name, "table_stride", a.table_stride, 0, INT32_MAX) ||
      check_range(name, "num_rules", a.num_rules, 0, INT32_MAX) ||
      check_range(name, "num_branches", a.num_branches, 0, INT32_MAX))
    return -1;
  for (int32_t i = 0; i < a.num_rules; i++)
    if (check_rules(a.rules[i], i)) return -1;
  for (int32_t i = 0; i < *a.num_rows; i++)
    if (check_row(a, i)) return -1;
  return 0;
}

void process_logits_part(pd_context &c, const pd_process_logits_args &a, int thread, int num_threads) {
  ThreadScratch &own = c.scratch[thread];
  const Range rows = share(*a.num_rows, thread, num_threads);
  for (int64_t i = rows.begin; i < rows.end; i++) {
    const pd_rules &rules = a.rules[a.rule_ids[i]];
    const bool repetition = rules.repetition_penalty != 1.0f;
    const bool generated = rules.frequency_penalty != 0.0f || rules.presence_penalty != 0.0f;
    own.history.clear();
    if (rules.num_words || rules.no_repeat_ngram_size || repetition || generated) gather(a, i, own.history, own.path);
    const Row row{a.logits + a.rows[i] * (int64_t)a.vocab, a.vocab, own.history.data(), (int64_t)own.history.size()};
    if (a.lse && std::isfinite(a.lse[i])) subtract(row, a.lse[i]);
    if (rules.num_allowed >= 0) ban_all_but(row, rules.allowed, rules.num_allowed, own.values);
    ban_words(row, rules);
    for (int32_t j = 0; j < rules.num_biases; j++)
      if (row.known(rules.bias_tokens[j])) row.logits[rules.bias_tokens[j]] += rules.bias_values[j];
    if (rules.no_repeat_ngram_size) ban_ngrams(row, rules.no_repeat_ngram_size, own.border);
    if (repetition) penalize_repetition(row, rules.repetition_penalty, own.met);
    if (generated)
      penalize_generated(row, a.prompt_lengths[i], rules.frequency_penalty, rules.presence_penalty, own.met);
  }
}

}  // namespace pagedec
