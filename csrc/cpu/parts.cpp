// What the ranks that share a model have computed: sums in the order of ranks, and columns side by side.
#include <cstring>

#include "common/check.h"
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

// Threads share columns as well as rows: a decode step may have one row.
constexpr int64_t kColumns = 256;

}  // namespace

void add_parts_part(const pd_add_parts_args &a, int thread, int num_threads) {
  const int64_t pieces = (a.dim + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t begin = u % pieces * kColumns, end = begin + kColumns < a.dim ? begin + kColumns : a.dim;
    const float *first = a.parts + u / pieces * a.dim;
    float *out = a.out + u / pieces * a.dim;
    for (int64_t i = begin; i < end; i += 16) {
      F16 sum = load_some(first + i, end - i);
      for (int64_t p = 1; p < a.num_parts; p++) sum = sum + load_some(first + p * a.part_stride + i, end - i);
      store_some(out + i, a.add ? load_some(out + i, end - i) + sum : sum, end - i);
    }
  }
}

void join_parts_part(const pd_join_parts_args &a, int thread, int num_threads) {
  int64_t first = 0;
  for (int32_t p = 0; p < a.num_parts; first += a.widths[p], p++) {
    const Range rows = share(*a.num_rows, thread, num_threads);
    for (int64_t r = rows.begin; r < rows.end; r++)
      memcpy(a.out + r * a.dim + first, a.parts + p * a.part_stride + r * a.widths[p], a.widths[p] * sizeof(float));
  }
}

}  // namespace pagedec
