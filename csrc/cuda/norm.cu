// RMS norm and layer norm of rows of the residual stream: a block a row, whose sums have one order for each width.
#include "cuda/launch.h"

namespace pagedec {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kAhead = 16;  // values that a thread loads before it writes

// put(i, value(i)) of each of this thread's. What is written may be what is read next, for all a compiler knows: one
// value after another would wait for memory as often.
template <class Value, class Put>
PD_DEVICE void each_value(int dim, const Value &value, const Put &put) {
  for (int first = thread_index(); first < dim; first += kAhead * kThreads) {
    float y[kAhead];
    PD_UNROLL for (int j = 0; j < kAhead; j++) {
      const int i = first + j * kThreads;
      y[j] = i < dim ? value(i) : 0.0f;
    }
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (first + j * kThreads < dim) put(first + j * kThreads, y[j]);
  }
}

// Of a row whose values threads keep: the sums are those of a longer one.
template <class E>
PD_DEVICE void rms_norm_kept(const pd_rms_norm_args &a) {
  float weight[kAhead], kept[kAhead];
  const auto each = [&](const auto &visit) {
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (thread_index() + j * kThreads < a.dim) visit(j, thread_index() + j * kThreads);
  };
  each([&](int j, int i) { weight[j] = a.weight[i]; });  // which no kernel writes
  await_kernels();
  for (int64_t r = block_index(); r < *a.num_rows; r += num_grid_blocks()) {
    const float *x = a.x + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.dim;
    float sum = 0.0f;
    each([&](int j, int i) { kept[j] = x[i]; });
    each([&](int j, int) { sum = sum + kept[j] * kept[j]; });
    const float scale = quotient(1.0f, square_root(quotient(block_sum<kWarps>(sum), (float)a.dim) + a.eps));
    E *out = (E *)a.out + r * a.dim;
    each([&](int j, int i) {
      const float y = kept[j] * scale * weight[j];
      kept[j] = a.add ? to_float(out[i]) + y : y;
    });
    each([&](int j, int i) { out[i] = from_float<E>(kept[j]); });
  }
}

// Rows as they are, in E.
template <class E>
PD_DEVICE void copied(const pd_rms_norm_args &a) {
  for (int64_t r = block_index(); r < *a.num_rows; r += num_grid_blocks()) {
    const float *x = a.x + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.dim;
    E *out = (E *)a.out + r * a.dim;
    each_value(a.dim, [&](int i) { return x[i]; }, [&](int i, float y) { out[i] = from_float<E>(y); });
  }
}

template <class E>
PD_KERNEL(kThreads) rms_norm_kernel(pd_rms_norm_args a) {
  let_next_begin();
  if (!a.weight) {
    await_kernels();
    return copied<E>(a);
  }
  if (a.dim <= kAhead * kThreads) return rms_norm_kept<E>(a);
  await_kernels();
  for (int64_t r = block_index(); r < *a.num_rows; r += num_grid_blocks()) {
    const float *x = a.x + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.dim;
    float sum = 0.0f;
    for (int i = thread_index(); i < a.dim; i += kThreads) sum = sum + x[i] * x[i];
    const float scale = quotient(1.0f, square_root(quotient(block_sum<kWarps>(sum), (float)a.dim) + a.eps));
    E *out = (E *)a.out + r * a.dim;
    const auto value = [&](int i) {
      const float y = x[i] * scale * a.weight[i];
      return a.add ? to_float(out[i]) + y : y;
    };
    each_value(a.dim, value, [&](int i, float y) { out[i] = from_float<E>(y); });
  }
}

// The mean is subtracted before squares are summed: no cancellation where it is large.
template <class E>
PD_KERNEL(kThreads) layer_norm_kernel(pd_layer_norm_args a) {
  let_next_begin();
  await_kernels();
  for (int64_t r = block_index(); r < *a.num_rows; r += num_grid_blocks()) {
    const float *x = a.x + (a.row_ids ? a.row_ids[r] : r) * (int64_t)a.dim;
    float sum = 0.0f, squares = 0.0f;
    for (int i = thread_index(); i < a.dim; i += kThreads) sum = sum + x[i];
    const float mean = quotient(block_sum<kWarps>(sum), (float)a.dim);
    for (int i = thread_index(); i < a.dim; i += kThreads) squares = squares + (x[i] - mean) * (x[i] - mean);
    const float scale = quotient(1.0f, square_root(quotient(block_sum<kWarps>(squares), (float)a.dim) + a.eps));
    E *out = (E *)a.out + r * a.dim;
    const auto value = [&](int i) {
      const float y = (x[i] - mean) * scale * a.weight[i];
      return a.bias ? y + a.bias[i] : y;
    };
    each_value(a.dim, value, [&](int i, float y) { out[i] = from_float<E>(y); });
  }
}

}  // namespace

int enqueue_rms_norm(pd_context &c, const pd_rms_norm_args &a) {
  const auto kernel = of_dtype(a.dtype, [](auto e) { return rms_norm_kernel<decltype(e)>; });
  return launch_early(c, "pd_rms_norm", kernel, grid_of_rows(c, kThreads), a);
}
int enqueue_layer_norm(pd_context &c, const pd_layer_norm_args &a) {
  const auto kernel = of_dtype(a.dtype, [](auto e) { return layer_norm_kernel<decltype(e)>; });
  return launch_early(c, "pd_layer_norm", kernel, grid_of_rows(c, kThreads), a);
}

}  // namespace pagedec
