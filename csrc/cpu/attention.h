// Between the loop over a plan's work (attention_loop.h) and the tile kernels (attention_tile.h).
#pragma once
#include <cstdint>

#include "cpu/vec.h"
#include "plan/plan.h"

namespace pagedec {

constexpr int ROWS_TILE = PD_LEVEL ? 6 : 2;  // rows of a register tile

template <class Q>
struct RowArgs {
  const Q *q;
  float *o, *l, *m;
  const int32_t *lo, *hi;  // of each row, lanes
  int64_t k_stride;  // elements from one step of dimensions to the next
  int32_t head_dim, block_size;  // tokens of a block of V in a tile
  bool ahead;                   // prefetch (a masked tile's V; elsewhere the template says it)
  float scale;                  // of the logits as softmax meets them, times log2(e)
  float soft_cap, inner_scale;  // soft_cap > 0: logit = soft_cap * tanh(inner_scale * q.k)
  const float *k_scale, *v_scale;  // of a cache of bytes: by lane
};
template <class T>
struct TileArgs : RowArgs<typename T::Q> {
  const typename T::M *k[TILE / vec::W], *v[MAX_TILE_BLOCKS];            // vectors of K by lane; blocks of V
  const typename T::M *next_k[TILE / vec::W], *next_v[MAX_TILE_BLOCKS];  // to prefetch
};

// From one row of q, or of o, to the next, in elements. It is the same for every head size, so that the tile kernels
// exist once, and more than the largest: rows 256 apart would share the sets of L1.
constexpr int ROW = MAX_HEAD_DIM + 32;

// The workspace: a state for each thread, then the partial results [num_split_partials][q_heads][head_dim + 2] (o, m,
// l).
size_t bf16_state_bytes();
size_t bf16_of_bytes_state_bytes();
size_t fp32_state_bytes();
size_t fp32_of_bytes_state_bytes();
void attention_bf16(const pd_attention_args &, char *workspace, int thread, int num_threads);
void attention_bf16_of_bytes(const pd_attention_args &, char *workspace, int thread, int num_threads);
void attention_fp32(const pd_attention_args &, char *workspace, int thread, int num_threads);
void attention_fp32_of_bytes(const pd_attention_args &, char *workspace, int thread, int num_threads);

}  // namespace pagedec
