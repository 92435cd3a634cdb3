/* The part of pagedec.h that is about low-rank adapters; include that one. */
#ifndef PAGEDEC_LORA_H
#define PAGEDEC_LORA_H

/* ---- a linear layer's low-rank update, in each row that of its own adapter (Hu et al. 2021; many in a batch: Chen et
 * al. 2023, Punica): y += scale * B (A x), in fp32, of what the layer has read. A row's bits depend on no other row.
 * Layers that are several projections have as many parts, each with its own A, rows of B and scale. */
#define PD_MAX_LORA_PARTS 4
#define PD_MAX_LORA_RANK 1024
typedef struct {
  const int32_t *num_rows;
  const int32_t *adapters;     /* [rows]: each one's place, from 0 on; -1: it has none */
  const void *x;               /* [rows][k] in dtype */
  const void *a;               /* [num_places][num_parts][rank][k] in dtype */
  const void *b;               /* [num_places][rank][n] in dtype: of output j its part's column i, transposed */
  const float *scales;         /* [num_places][num_parts] */
  const int32_t *ranks;        /* [num_places][num_parts]: how many of `rank` count; 0: the part is not changed */
  const int32_t *parts;        /* [ceil(n / 16)]: which part 16 outputs are of */
  float *low;                  /* [rows][num_parts][rank]: A x; not needed afterwards */
  const float *z;              /* gated epilogues: [rows][n], the layer's outputs by PD_STORE; else NULL */
  void *y;                     /* PD_ADD: [rows][n], added to; gated: [rows][n / 2], of all rows */
  int32_t num_places, num_parts, rank, n, k, dtype, y_dtype, epilogue;
} pd_lora_args;
PD_EXPORT int pd_lora(pd_context *, const pd_lora_args *);

#endif
