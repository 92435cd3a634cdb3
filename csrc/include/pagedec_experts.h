/* The part of pagedec.h that is about mixtures of experts; include that one. */
#ifndef PAGEDEC_EXPERTS_H
#define PAGEDEC_EXPERTS_H

/* ---- layers of which a row takes some parts alone, its experts (Shazeer et al. 2017; Fedus et al. 2022). pd_route
 * chooses them and puts the rows in the order of experts, pd_experts multiplies each expert's rows by its weight, and
 * pd_combine brings them back. A row's bits depend on no other row: its products are those of pd_gemm, and its sum has
 * the order of its own experts. */
#define PD_MAX_EXPERTS 1024
typedef enum {
  PD_SOFTMAX = 0,          /* over all experts */
  PD_SOFTMAX_CHOSEN = 1,   /* over those that are chosen */
  PD_SIGMOID = 2
} pd_expert_score;

/* Each row's num_chosen experts with the greatest logit, or with a bias with the greatest score + bias (PD_SIGMOID's
 * score, else PD_SOFTMAX's); of equal ones those of lower number; NaN is below all. A weight is the expert's score,
 * with `normalize` divided by (the sum of the row's + 1e-20), times `scale`. Where a row's logits have a NaN, or
 * infinities that leave no score, its weights are NaN; its experts are some that there are. */
typedef struct {
  const int32_t *num_rows;
  const float *logits;         /* [rows][num_experts] */
  const float *bias;           /* [num_experts], for the choice alone; or NULL */
  const void *x;               /* [rows][dim] in dtype */
  void *sorted;                /* [rows * num_chosen][dim]: rows of x, expert after expert, each one's in order */
  int32_t *first;              /* [num_experts + 1]: where each expert's rows begin in sorted */
  int32_t *chosen;             /* [rows][num_chosen], ascending */
  int32_t *places;             /* [rows][num_chosen]: of the row in sorted, for each of its experts */
  float *weights;              /* [rows][num_chosen] */
  int32_t dim, dtype, num_experts, num_chosen;
  int32_t score, normalize;    /* pd_expert_score; 1 or 0 */
  float scale;
  int32_t reserved;
} pd_route_args;
PD_EXPORT int pd_route(pd_context *, const pd_route_args *);

/* pd_gemm of the rows first[e] .. first[e + 1] - 1 of x and y with weight e, for every expert e. In `gemm` num_rows is
 * that of pd_route, packed the first expert's, whose others follow expert_bytes apart, and bias [num_experts][n] or
 * NULL. Not with PD_ADD; in blocks of one segment; of gated weights n is a multiple of 32. */
typedef struct {
  pd_gemm_args gemm;
  const int32_t *first;        /* [num_experts + 1] */
  int64_t expert_bytes;        /* a multiple of 64 */
  int32_t num_experts, num_chosen;
} pd_experts_args;
PD_EXPORT int pd_experts(pd_context *, const pd_experts_args *);

/* out[r] = (add ? out[r] : 0) + ((w0 y0 + w1 y1) + w2 y2 ...) + sigmoid(gates[r]) * shared[r], where wi = weights[r][i]
 * and yi = y[places[r][i]]; without `shared` the last term is left out. */
typedef struct {
  const int32_t *num_rows;
  const float *y;              /* [*][dim] */
  const int32_t *places;       /* [rows][num_chosen] */
  const float *weights;        /* [rows][num_chosen] */
  const float *shared;         /* [rows][dim]: of an expert that all rows take; or NULL */
  const float *gates;          /* [rows]; given together with shared or both NULL */
  float *out;                  /* [rows][dim] */
  int32_t dim, num_chosen, add, reserved;
} pd_combine_args;
PD_EXPORT int pd_combine(pd_context *, const pd_combine_args *);

#endif
