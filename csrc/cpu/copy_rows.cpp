// Rows of one array to places in another.
#include <algorithm>
#include <cstring>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int64_t kColumns = 4096;  // threads share columns as well as rows

}  // namespace

void copy_rows_part(const pd_copy_rows_args &a, int thread, int num_threads) {
  const int64_t width = a.width, pieces = (width + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t i = u / pieces, begin = u % pieces * kColumns, size = std::min(kColumns, width - begin);
    memcpy(a.dst + a.dst_rows[i] * width + begin, a.src + a.src_rows[i] * width + begin, size * sizeof(float));
  }
}

}  // namespace pagedec
