// A request's own rules, applied to the logits of its rows: a block a row, one rule after the other, as pd_rules says.
//
// Every rule touches a token's logit by that token's own numbers alone, and of the threads that meet a token one
// touches it, or all write -inf; so the order of threads does not matter. What a rule must know of all tokens (which
// are allowed, which were met, how often) lies in shared memory for a part of the vocabulary at a time: 262,144 tokens
// of one bit, or 8,192 counts. History is read where it lies, through the block table, once for each part. An n-gram
// is compared from its end on, at each place of the history by itself: one token mostly, n where all repeats itself.
#include "cuda/launch.h"
#include "cuda/readout.h"

namespace pagedec {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kWords = 8192, kBits = 32 * kWords;

// The tokens that a row sees, itself last.
struct History {
  const int32_t *table, *plane, *parents;  // parents: of the branch's rows, or NULL
  uint32_t before, chain, length;          // tokens before the branch's rows, before the first node, and in all
  int32_t row;                             // of the branch's
  uint32_t block_size;

  PD_DEVICE int32_t slot(uint32_t place) const {
    return plane[table[place / block_size] * (int64_t)block_size + place % block_size];
  }
  PD_DEVICE int32_t token(uint32_t place) const {
    if (place < chain) return slot(place);
    int32_t node = row;
    for (uint32_t up = length - 1 - place; up; up--) node = parents[node];
    return slot(before + (uint32_t)node);
  }
};

PD_DEVICE History history_of(const pd_process_logits_args &a, int64_t i) {
  const int32_t branch = a.branches[i], first = a.row_indptr[branch];
  const int32_t before = a.kv_len[branch] - (a.row_indptr[branch + 1] - first);
  const int32_t *parents = a.parents ? a.parents + first : nullptr;
  int32_t row = a.query_rows[i] - first, node = row, depth = 0;
  for (; parents && parents[node] >= 0; node = parents[node]) depth++;
  const uint32_t chain = (uint32_t)(before + node + 1);
  return {a.block_table + branch * (int64_t)a.table_stride, a.token_plane, parents,
          (uint32_t)before, chain, chain + (uint32_t)depth, row, (uint32_t)a.block_size};
}

struct Logits {
  float *x;
  uint32_t vocab;

  PD_DEVICE bool knows(int32_t token) const { return (uint32_t)token < vocab; }  // a negative one is beyond
  PD_DEVICE void ban(int32_t token) const {
    if (knows(token)) x[token] = -INFINITY;
  }
};

// Of a part of the vocabulary, from `begin` on.
PD_DEVICE uint32_t end_of_part(const Logits &logits, uint32_t begin, uint32_t size) {
  return logits.vocab - begin < size ? logits.vocab : begin + size;
}

PD_DEVICE void clear(const SharedArray<uint32_t> &words) {
  sync_block();  // what was there has been read
  for (uint32_t i = thread_index(); i < kWords; i += kThreads) words[i] = 0;
  sync_block();
}

PD_DEVICE void ban_all_but(const Logits &logits, const int32_t *allowed, uint32_t n, float lse,
                           const SharedArray<uint32_t> &words) {
  for (uint32_t begin = 0; begin < logits.vocab; begin += kBits) {
    clear(words);
    for (uint32_t j = thread_index(); j < n; j += kThreads) {
      const uint32_t bit = (uint32_t)allowed[j] - begin;
      if (logits.knows(allowed[j]) && bit < kBits) atomic_or(words, bit / 32, 1u << bit % 32);
    }
    sync_block();
    const uint32_t end = end_of_part(logits, begin, kBits);
    for (uint32_t t = begin + thread_index(); t < end; t += kThreads) {
      const bool is_allowed = words[(t - begin) / 32] >> (t - begin) % 32 & 1u;
      logits.x[t] = is_allowed ? logits.x[t] - lse : -INFINITY;
    }
  }
}

// Whether the n tokens in front of `place` are the last n of the history.
PD_DEVICE bool ends_alike(const History &history, uint32_t place, uint32_t n) {
  for (uint32_t j = 1; j <= n; j++)
    if (history.token(place - j) != history.token(history.length - j)) return false;
  return true;
}

PD_DEVICE void ban_words(const Logits &logits, const pd_rules &rules, const History &history) {
  for (int32_t w = thread_index(); w < rules.num_words; w += kThreads) {
    const int32_t *word = rules.word_tokens + rules.word_indptr[w];
    const int32_t n = rules.word_indptr[w + 1] - rules.word_indptr[w] - 1;
    bool ends = n >= 0 && (uint32_t)n <= history.length;
    for (int32_t j = 1; ends && j <= n; j++) ends = word[n - j] == history.token(history.length - j);
    if (ends) logits.ban(word[n]);
  }
}

PD_DEVICE void penalize_repetition(const Logits &logits, const History &history, float penalty,
                                   const SharedArray<uint32_t> &words) {
  for (uint32_t begin = 0; begin < logits.vocab; begin += kBits) {
    clear(words);
    for (uint32_t i = thread_index(); i < history.length; i += kThreads) {
      const int32_t token = history.token(i);
      const uint32_t bit = (uint32_t)token - begin;
      if (!logits.knows(token) || bit >= kBits) continue;
      if (atomic_or(words, bit / 32, 1u << bit % 32) >> bit % 32 & 1u) continue;  // someone has met it before
      const float z = logits.x[token];
      logits.x[token] = z > 0.0f ? quotient(z, penalty) : z * penalty;
    }
  }
}

PD_DEVICE void penalize_generated(const Logits &logits, const History &history, uint32_t prompt, float frequency,
                                  float presence, const SharedArray<uint32_t> &words) {
  if (prompt >= history.length) return;
  for (uint32_t begin = 0; begin < logits.vocab; begin += kWords) {
    clear(words);
    for (uint32_t i = prompt + thread_index(); i < history.length; i += kThreads) {
      const int32_t token = history.token(i);
      if (logits.knows(token) && (uint32_t)token - begin < kWords) atomic_add(words, (uint32_t)token - begin, 1u);
    }
    sync_block();
    const uint32_t end = end_of_part(logits, begin, kWords);
    for (uint32_t t = begin + thread_index(); t < end; t += kThreads) {
      const uint32_t times = words[t - begin];
      if (times) logits.x[t] = (logits.x[t] - frequency * (float)times) - presence;
    }
  }
}

PD_KERNEL(kThreads) process_logits_kernel(pd_process_logits_args a) {
  SHARED_ARRAY(uint32_t, words, kWords);
  for (int64_t i = block_index(); i < *a.num_rows; i += num_grid_blocks()) {
    const pd_rules &rules = a.rules[a.rule_ids[i]];
    const Logits logits{a.logits + a.rows[i] * (int64_t)a.vocab, (uint32_t)a.vocab};
    const float given = a.lse ? a.lse[i] : 0.0f;
    const bool is_less = a.lse && given - given == 0.0f;  // finite
    if (rules.num_allowed >= 0)
      ban_all_but(logits, rules.allowed, rules.num_allowed, is_less ? given : 0.0f, words);
    else if (is_less)
      each_logit<kThreads>(logits.x, logits.vocab, [&](int64_t t, float x) { logits.x[t] = x - given; });
    const bool repetition = rules.repetition_penalty != 1.0f;
    const bool generated = rules.frequency_penalty != 0.0f || rules.presence_penalty != 0.0f;
    const uint32_t n = rules.no_repeat_ngram_size;
    History history{};
    if (rules.num_words || n || repetition || generated) history = history_of(a, i);
    sync_block();
    ban_words(logits, rules, history);
    sync_block();
    for (int32_t j = thread_index(); j < rules.num_biases; j += kThreads) {
      const int32_t token = rules.bias_tokens[j];
      if (logits.knows(token)) logits.x[token] = logits.x[token] + rules.bias_values[j];
    }
    sync_block();
    for (uint32_t p = n - 1 + thread_index(); n > 0 && p < history.length; p += kThreads)
      if (ends_alike(history, p, n - 1)) logits.ban(history.token(p));
    sync_block();
    if (repetition) penalize_repetition(logits, history, rules.repetition_penalty, words);
    sync_block();
    if (generated)
      penalize_generated(logits, history, a.prompt_lengths[i], rules.frequency_penalty, rules.presence_penalty, words);
  }
}

}  // namespace

int enqueue_process_logits(pd_context &c, const pd_process_logits_args &a) {
  return launch(c, "pd_process_logits", process_logits_kernel, kThreads, a);
}

}  // namespace pagedec
