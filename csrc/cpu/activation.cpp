// Gated activations: silu(gate) * up, or with the tanh approximation of GELU.
#include "cpu/check_small.h"
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

PD_INLINE F16 sigmoid_times(F16 x, F16 z) { return x / (set16(1.0f) + exp_small(set16(0.0f) - z)); }  // x * sigmoid(z)
PD_INLINE F16 silu(F16 x) { return sigmoid_times(x, x); }
// 0.5 x (1 + tanh(y)) = x sigmoid(2y), y = sqrt(2 / pi) (x + 0.044715 x^3)
PD_INLINE F16 gelu(F16 x) {
  return sigmoid_times(x, set16(1.5957691216f) * (x + set16(0.044715f) * (x * x * x)));
}

// Threads share columns as well as rows: a decode step has few rows, and they are long.
constexpr int64_t kColumns = 256;

template <class E, bool kGelu>
void activate(const pd_silu_mul_args &a, int thread, int num_threads) {
  const int64_t dim = a.dim, pieces = (dim + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t row = u / pieces, begin = u % pieces * kColumns, end = begin + kColumns < dim ? begin + kColumns : dim;
    const E *gate = (const E *)a.x + row * 2 * dim, *up = gate + dim;
    E *out = (E *)a.out + row * dim;
    for (int64_t i = begin; i < end; i += 16) {
      const F16 g = load_some(gate + i, end - i);
      store_some(out + i, (kGelu ? gelu(g) : silu(g)) * load_some(up + i, end - i), end - i);
    }
  }
}

template <class E>
void activate_as(const pd_silu_mul_args &a, int thread, int num_threads) {
  a.gelu ? activate<E, true>(a, thread, num_threads) : activate<E, false>(a, thread, num_threads);
}

}  // namespace

int check_silu_mul(const pd_silu_mul_args &a) {
  const char *name = "pd_silu_mul";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "x", a.x, a.num_rows) ||
      check_array(name, "out", a.out, a.num_rows) || check_dtype(name, a.dtype) ||
      check_range(name, "dim", a.dim, 1, INT32_MAX / 2) || check_range(name, "gelu", a.gelu, 0, 1))
    return -1;
  return 0;
}

void silu_mul_part(const pd_silu_mul_args &a, int thread, int num_threads) {
  a.dtype == PD_BF16 ? activate_as<bf16>(a, thread, num_threads) : activate_as<float>(a, thread, num_threads);
}

}  // namespace pagedec
