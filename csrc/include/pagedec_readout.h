/* The part of pagedec.h that is about logits; include that one. */
#ifndef PAGEDEC_READOUT_H
#define PAGEDEC_READOUT_H

/* ---- read-out. logits [rows][vocab] fp32. Ties go to the lower token id, everywhere. */
typedef struct { /* x = cap * tanh(x / cap), in place */
  const int32_t *num_rows;
  float *x;                    /* [rows][n] */
  int32_t n;
  float cap;
} pd_soft_cap_args;
PD_EXPORT int pd_soft_cap(pd_context *, const pd_soft_cap_args *);

/* Rules of a request, carried out in the order of the steps on each of its rows. A row's history is the tokens that it
 * sees, itself included, as pd_attn_batch says; all arithmetic is fp32. Token ids outside the vocabulary are passed
 * over.
 *   0. where an lse is given, the row's logits become log-probabilities: rules may be meant for those
 *   1. logits of all tokens that are not allowed become -inf
 *   2. where the history ends with all but the last token of a word, the last becomes -inf
 *   3. biases are added, each token once
 *   4. where a token would repeat an n-gram of the history, it becomes -inf
 *   5. of every token in the history, z > 0 becomes z / repetition_penalty, another z * repetition_penalty
 *   6. of a token that stands c > 0 times behind the prompt, z becomes (z - frequency_penalty * c) - presence_penalty
 */
typedef struct {
  const int32_t *allowed;      /* [num_allowed] */
  /* [num_words + 1]: word w is word_tokens[word_indptr[w]] .. word_tokens[word_indptr[w + 1] - 1] */
  const int32_t *word_indptr;
  const int32_t *word_tokens;
  const int32_t *bias_tokens;  /* [num_biases] */
  const float *bias_values;    /* [num_biases] */
  int32_t num_allowed;         /* -1: all tokens are allowed */
  int32_t num_words, num_biases, no_repeat_ngram_size; /* 0: no such rule */
  float repetition_penalty, frequency_penalty, presence_penalty; /* 1, 0, 0: no such rule */
  int32_t reserved;
} pd_rules;
typedef struct {
  const int32_t *num_rows;     /* rows to process */
  float *logits;               /* [*][vocab] */
  const int32_t *rows;         /* [num_rows] ascending: rows of logits */
  const int32_t *rule_ids;     /* [num_rows], into rules */
  const pd_rules *rules;       /* [num_rules] */
  const int32_t *prompt_lengths; /* [num_rows]: tokens of the history that were not generated */
  const int32_t *branches;     /* [num_rows] */
  const int32_t *query_rows;   /* [num_rows]: rows of the forward, each of its branch */
  /* of the forward, as in pd_attn_batch; parents may be NULL */
  const int32_t *row_indptr, *kv_len, *block_table, *parents;
  const int32_t *token_plane;
  const float *lse;            /* [num_rows]: subtracted from the row first, if finite; or NULL: nothing is */
  int32_t num_rules, num_branches, table_stride, block_size, vocab, reserved;
} pd_process_logits_args;
PD_EXPORT int pd_process_logits(pd_context *, const pd_process_logits_args *);

/* What may not be drawn becomes -inf, in place: in a row with a place in words, what has no bit there; in any row,
 * tokens from num_drawn on; and single logits. */
typedef struct {
  const int32_t *num_rows;
  float *logits;               /* [rows][vocab] */
  const int32_t *places;       /* [rows], -1: all tokens are allowed; NULL: in all rows */
  const uint32_t *words;       /* [num_words][ceil(vocab / 32)]: a bit for each token, the lowest first */
  const int32_t *num_banned;   /* NULL: 0 */
  const int32_t *banned_rows, *banned_tokens; /* [num_banned] */
  int32_t vocab, num_words, num_drawn, reserved; /* num_drawn: 0 to vocab */
} pd_restrict_logits_args;
PD_EXPORT int pd_restrict_logits(pd_context *, const pd_restrict_logits_args *);

/* dst[dst_rows[i]] = src[src_rows[i]] * scale, in fp32, then rounded to dst_dtype; of one dtype and with scale 1 the
 * bits as they are. Two arrays, or columns of one, and no row of dst twice. */
typedef struct {
  const int32_t *num_rows;
  const void *src;             /* [*][width] in src_dtype, a row every src_stride elements */
  void *dst;                   /* [*][width] in dst_dtype, a row every dst_stride elements */
  const int32_t *src_rows;     /* [num_rows], or NULL: i itself */
  const int32_t *dst_rows;     /* likewise; -1: row i is left out */
  int64_t src_stride, dst_stride;
  int32_t width, src_dtype, dst_dtype;
  float scale;
} pd_copy_rows_args;
PD_EXPORT int pd_copy_rows(pd_context *, const pd_copy_rows_args *);

/* dst[r][v] = src[r][places[v]], and -inf where that is -1: logits of a model that knows draft_vocab tokens of vocab */
typedef struct {
  const int32_t *num_rows;
  const float *src;            /* [rows][draft_vocab] */
  const int32_t *places;       /* [vocab] */
  float *dst;                  /* [rows][vocab] */
  int32_t vocab, draft_vocab;
} pd_spread_logits_args;
PD_EXPORT int pd_spread_logits(pd_context *, const pd_spread_logits_args *);

/* Single logits, and how many of their row are greater: than a NaN nothing, and a NaN than nothing. Fastest where a
 * row's entries stand side by side. */
typedef struct {
  const int32_t *num_entries;
  const float *logits;
  const int32_t *rows, *tokens; /* [num_entries]: of logits */
  float *values;               /* [num_entries] */
  int32_t *ranks;              /* [num_entries]: 1 + that number; or NULL */
  int32_t vocab, reserved;
} pd_pick_logits_args;
PD_EXPORT int pd_pick_logits(pd_context *, const pd_pick_logits_args *);

typedef struct {
  const int32_t *num_rows;
  const float *logits;
  int32_t *token_ids;          /* [rows] */
  int32_t vocab, reserved;
} pd_argmax_args;
PD_EXPORT int pd_argmax(pd_context *, const pd_argmax_args *);

typedef struct { /* the k largest logits of each row in descending order, and log(sum(exp(logits))) */
  const int32_t *num_rows;
  const float *logits;
  const int32_t *row_ids;      /* [rows]: which rows of logits, or NULL */
  int32_t *token_ids;          /* [rows][k] */
  float *values;               /* [rows][k] logits (not log-probabilities) */
  float *lse;                  /* [rows] */
  int32_t vocab, k;            /* 0 <= k <= vocab */
} pd_topk_lse_args;
PD_EXPORT int pd_topk_lse(pd_context *, const pd_topk_lse_args *);

/* One draw: Gumbel-max over the processed distribution of one row. z = logits / temperature; keep the top_k largest (0:
 * all); of these the smallest set whose softmax mass reaches top_p; of these every token with p >= min_p * max p; then
 * argmax(log p + G(seed, stream, position, token)). temperature 0: the plain argmax. rank r: not the first by that sum,
 * or by the logit, but what comes r places behind it, the lower token of equals first; that one where no more are left.
 */
typedef struct {
  uint64_t seed, stream;
  int32_t row, position, top_k;
  float temperature, top_p, min_p;
  int32_t rank;                /* 0 to PD_MAX_RANK */
  int32_t reserved;
} pd_draw;
#define PD_MAX_RANK 15
typedef struct {
  const int32_t *num_draws;
  const pd_draw *draws;
  const float *logits;
  int32_t *token_ids;          /* [draws] */
  int32_t vocab, reserved;
} pd_sample_args;
PD_EXPORT int pd_sample(pd_context *, const pd_sample_args *);
/* Verification by rejection, each draft by itself. p is what draws[i] is taken from, of logits; q what drafts[i] was,
 * of draft_logits, when drafted[i] was drawn, whatever their ranks; a token that a vocabulary lacks has probability 0.
 * drafted[i] is kept where u q(drafted[i]) < p(drafted[i]), else replaced by a draw from norm(max(0, p - q)), with the
 * noise of draws[i]; where nothing is left of that, p is q and it is kept. u is made of the first two words of Philox
 * with stream ^ 2^62 for the stream of draws[i] and token 0: ((word 0 << 32 | word 1) >> 11) + 0.5, times 2^-53. Exact
 * if drafts[i] was drawn with the noise of another stream than these two. */
typedef struct {
  const int32_t *num_drafts;
  const pd_draw *draws;        /* [num_drafts]: of the target; row counts those of logits */
  const pd_draw *drafts;       /* [num_drafts]: row counts those of draft_logits; no noise is read */
  const int32_t *drafted;      /* [num_drafts] tokens, below draft_vocab */
  const float *logits, *draft_logits; /* [*][vocab] and [*][draft_vocab] */
  int32_t *token_ids;          /* [num_drafts] */
  int32_t vocab, draft_vocab;
} pd_verify_args;
PD_EXPORT int pd_verify(pd_context *, const pd_verify_args *);
/* The best continuations of rows that are ranked together (the beams of a search). Of a row, a token's log-probability
 * is (logit - lse) / temperature and its score the row's score plus that, all in fp32. A group's k best come in order
 * of their key, which is the score; then of their logits; then of the earlier row and the lower token id. What scores
 * -inf or NaN is no candidate. is_drawn 1: only tokens that top_k, top_p and min_p keep of the row count, as in
 * pd_draw, at least min_tokens_to_keep after each of them; and a key is the score plus G(seed, stream, position,
 * token): a draw without replacement from softmax(score) over all rows of the group. is_drawn 0: temperature and cuts
 * are not read. */
typedef struct {
  uint64_t stream;
  int32_t row, place, position; /* place: anything, given back */
  float score;
} pd_best_row;
typedef struct {
  uint64_t seed;
  int32_t first, stop;         /* its rows; a group begins where the one before it stops */
  int32_t k, top_k;
  float temperature, top_p, min_p;
  int32_t min_tokens_to_keep, is_drawn, reserved;
} pd_best_group;
typedef struct {
  int32_t place, token;
  float key, value, score, logprob; /* value: the logit */
} pd_candidate;
typedef struct {
  const int32_t *num_rows;
  const float *logits;
  float *lse;                  /* [num_rows] what is subtracted; has_lse 0: written, log(sum(exp(logits))) */
  const pd_best_row *rows;     /* [num_rows] */
  const pd_best_group *groups; /* [num_groups] */
  pd_candidate *candidates;    /* [sum of k]: room for k of each group */
  int32_t *counts;             /* [num_groups]: how many there are of each */
  int32_t num_groups, vocab, has_lse, reserved;
} pd_best_args;
PD_EXPORT int pd_best(pd_context *, const pd_best_args *);
/* The noise itself: out[t] = G(seed, stream, position, first_token + t). Philox4x32-10 (Salmon et al. 2011), key =
 * seed, counter = (stream low, stream high, position, token / 4), word token % 4; u = ((word >> 8) + 0.5) * 2^-24; G =
 * -log(-log(u)). */
PD_EXPORT int pd_gumbel(pd_context *, uint64_t seed, uint64_t stream, int32_t position, int32_t first_token,
                        int32_t num_tokens, float *out);

#endif
