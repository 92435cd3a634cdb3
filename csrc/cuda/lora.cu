// Low-rank updates of linear layers, each row's by its own adapter.
//
// Work     A x: a warp has a few rows of one A and a row of x at a time. Outputs: a thread each, or each gate with what
//          it multiplies. Grids go through all rows, however many there are.
// Bits     A lane adds up the products of eight neighbours in each 256 of k, from the first on, and lanes are added by
//          a tree; outputs add up ranks in order. Who stands beside a row changes nothing.
#include "cuda/gemm.h"

namespace pagedec {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kRanks = 4;  // rows of A that a warp has at a time
constexpr int kLane = 8;   // neighbours in k that a lane has

// values[i] = p[i], 0 where i is num_left or more.
PD_DEVICE void load_lane(const float *p, int64_t num_left, bool, float (&values)[kLane]) {
  PD_UNROLL for (int i = 0; i < kLane; i++) values[i] = i < num_left ? p[i] : 0.0f;
}
template <class E>
PD_DEVICE void load_lane(const E *p, int64_t num_left, bool is_aligned, float (&values)[kLane]) {
  const gemm::Eight eight = gemm::load_some(p, num_left, is_aligned);
  PD_UNROLL for (int i = 0; i < kLane; i++)
    values[i] = to_float(E{(uint16_t)(eight.pairs[i / 2] >> (i % 2 * 16))});
}

template <class E>
PD_KERNEL(kThreads) lora_low_kernel(pd_lora_args a, bool is_aligned) {
  const int lane = thread_index() % kWarp;
  const int pieces = (a.rank + kRanks - 1) / kRanks, each = pieces * a.num_parts;
  const int64_t num_warps = (int64_t)num_grid_blocks() * kWarps;
  const int64_t end = *a.num_rows * (int64_t)each;
  for (int64_t u = (int64_t)block_index() * kWarps + thread_index() / kWarp; u < end; u += num_warps) {
    const int64_t row = u / each;
    const int part = (int)(u % each / pieces), first = (int)(u % pieces) * kRanks;
    const int place = a.adapters[row];
    if (place < 0) continue;
    const int64_t own = (int64_t)place * a.num_parts + part;
    const int ranks = lower(kRanks, a.ranks[own] - first);
    if (ranks <= 0) continue;
    const E *x = (const E *)a.x + row * a.k, *w = (const E *)a.a + (own * a.rank + first) * a.k;
    float sum[kRanks] = {};
    for (int64_t i = lane * kLane; i < a.k; i += kWarp * kLane) {
      float values[kLane], weights[kLane];
      load_lane(x + i, a.k - i, is_aligned, values);
      PD_UNROLL for (int j = 0; j < kRanks; j++) {
        if (j >= ranks) continue;
        load_lane(w + (int64_t)j * a.k + i, a.k - i, is_aligned, weights);
        PD_UNROLL for (int v = 0; v < kLane; v++) sum[j] = sum[j] + values[v] * weights[v];
      }
    }
    PD_UNROLL for (int j = 0; j < kRanks; j++) {
      for (int mask = kWarp / 2; mask; mask /= 2) sum[j] = sum[j] + shuffle_xor(sum[j], mask);
      if (lane == 0 && j < ranks) a.low[(row * a.num_parts + part) * a.rank + first + j] = sum[j];
    }
  }
}

// before + scale * B (A x) of one output.
template <class E>
PD_DEVICE float updated(const pd_lora_args &a, int64_t row, int place, int64_t column, float before) {
  if (place < 0) return before;
  const int part = a.parts[column / 16];
  const int64_t own = (int64_t)place * a.num_parts + part;
  const int ranks = a.ranks[own];
  if (!ranks) return before;
  const E *b = (const E *)a.b + (int64_t)place * a.rank * a.n + column;
  const float *low = a.low + (row * a.num_parts + part) * a.rank;
  float sum = 0.0f;
  for (int i = 0; i < ranks; i++) sum = sum + low[i] * to_float(b[(int64_t)i * a.n]);
  return before + a.scales[own] * sum;
}

template <class E, class Y>
PD_KERNEL(kThreads) lora_add_kernel(pd_lora_args a) {
  const int64_t num_threads = (int64_t)num_grid_blocks() * kThreads, end = *a.num_rows * (int64_t)a.n;
  for (int64_t i = (int64_t)block_index() * kThreads + thread_index(); i < end; i += num_threads) {
    const int64_t row = i / a.n;
    const int place = a.adapters[row];
    if (place < 0) continue;
    Y *y = (Y *)a.y + i;
    *y = from_float<Y>(updated<E>(a, row, place, i % a.n, to_float(*y)));
  }
}

template <class E, class Y>
PD_KERNEL(kThreads) lora_gate_kernel(pd_lora_args a) {
  const int64_t width = a.n / 2;
  const int64_t num_threads = (int64_t)num_grid_blocks() * kThreads, end = *a.num_rows * width;
  for (int64_t i = (int64_t)block_index() * kThreads + thread_index(); i < end; i += num_threads) {
    // groups of 16 gates, each before the 16 that they multiply
    const int64_t row = i / width, column = i % width / 16 * 32 + i % 16;
    const int place = a.adapters[row];
    const float *z = a.z + row * a.n + column;
    const float gate = updated<E>(a, row, place, column, z[0]), up = updated<E>(a, row, place, column + 16, z[16]);
    ((Y *)a.y)[i] = from_float<Y>(gemm::activated(a.epilogue, gate, up));
  }
}

template <class E, class Y>
int enqueue_outputs(pd_context &c, const pd_lora_args &a) {
  const auto kernel = a.epilogue == PD_ADD ? lora_add_kernel<E, Y> : lora_gate_kernel<E, Y>;
  return launch(c, "pd_lora", kernel, grid_of_rows(c, kThreads), a);
}

}  // namespace

int enqueue_lora(pd_context &c, const pd_lora_args &a) {
  const bool is_aligned = gemm::is_aligned(a.x, a.k) && gemm::is_aligned(a.a, a.k);
  return of_dtype(a.dtype, [&](auto e) {
    using E = decltype(e);
    if (launch(c, "pd_lora", lora_low_kernel<E>, grid_of_rows(c, kThreads), a, is_aligned)) return -1;
    return a.y_dtype == PD_F32 ? enqueue_outputs<E, float>(c, a) : enqueue_outputs<E, E>(c, a);
  });
}

}  // namespace pagedec
