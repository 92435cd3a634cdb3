// RMS norm and layer norm of rows of the residual stream. A row's sums have one order: 16 lanes, then a tree over the
// lanes.
#include <cmath>

#include "common/check.h"
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

template <class E, bool kAdd>
void norm_row(const pd_rms_norm_args &a, const float *x, E *out) {
  const int64_t dim = a.dim;
  if (!a.weight) {
    for (int64_t i = 0; i < dim; i += 16) store_some(out + i, load_some(x + i, dim - i), dim - i);
    return;
  }
  F16 sum = set16(0.0f);
  for (int64_t i = 0; i < dim; i += 16) {
    const F16 v = load_some(x + i, dim - i);
    sum = sum + v * v;
  }
  const F16 scale = set16(1.0f / std::sqrt(sum_lanes(sum) / (float)dim + a.eps));
  for (int64_t i = 0; i < dim; i += 16) {
    F16 y = load_some(x + i, dim - i) * scale * load_some(a.weight + i, dim - i);
    if constexpr (kAdd) y = load_some(out + i, dim - i) + y;
    store_some(out + i, y, dim - i);
  }
}

template <class E, bool kAdd = false>
void norm_rows(const pd_rms_norm_args &a, int thread, int num_threads) {
  const Range rows = share(*a.num_rows, thread, num_threads);
  for (int64_t r = rows.begin; r < rows.end; r++)
    norm_row<E, kAdd>(a, a.x + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.dim, (E *)a.out + r * a.dim);
}

// The mean is subtracted before squares are summed: no cancellation where it is large.
template <class E>
void layer_norm_row(const pd_layer_norm_args &a, const float *x, E *out) {
  const int64_t dim = a.dim;
  F16 sum = set16(0.0f), squares = set16(0.0f);
  for (int64_t i = 0; i < dim; i += 16) sum = sum + load_some(x + i, dim - i);
  const float mean_value = sum_lanes(sum) / (float)dim;
  const F16 mean = set16(mean_value);
  for (int64_t i = 0; i < dim; i += 16) {
    const F16 v = load_some(x + i, dim - i, mean_value) - mean;  // the lanes behind the end add nothing
    squares = squares + v * v;
  }
  const F16 scale = set16(1.0f / std::sqrt(sum_lanes(squares) / (float)dim + a.eps));
  for (int64_t i = 0; i < dim; i += 16) {
    F16 y = (load_some(x + i, dim - i) - mean) * scale * load_some(a.weight + i, dim - i);
    if (a.bias) y = y + load_some(a.bias + i, dim - i);
    store_some(out + i, y, dim - i);
  }
}

template <class E>
void layer_norm_rows(const pd_layer_norm_args &a, int thread, int num_threads) {
  const Range rows = share(*a.num_rows, thread, num_threads);
  for (int64_t r = rows.begin; r < rows.end; r++)
    layer_norm_row(a, a.x + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.dim, (E *)a.out + r * a.dim);
}

}  // namespace

void rms_norm_part(const pd_rms_norm_args &a, int thread, int num_threads) {
  if (a.add) return norm_rows<float, true>(a, thread, num_threads);
  a.dtype == PD_BF16 ? norm_rows<bf16>(a, thread, num_threads) : norm_rows<float>(a, thread, num_threads);
}

void layer_norm_part(const pd_layer_norm_args &a, int thread, int num_threads) {
  a.dtype == PD_BF16 ? layer_norm_rows<bf16>(a, thread, num_threads) : layer_norm_rows<float>(a, thread, num_threads);
}

}  // namespace pagedec
