// A request's own rules, applied to the logits of its rows: bans, biases, penalties for what the row's history holds.
//
// Every rule touches a token's logit by that token's own numbers alone, in the order of pd_rules; so a row's bits
// depend on nothing else. A row costs its history and the tokens touched; only an allowed list needs a pass over the
// vocabulary.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/context.h"
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

}  // namespace

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
