// Rows of one array to places in another, in its dtype.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int64_t kColumns = 4096;  // threads share columns as well as rows

template <class S, class D>
void copy_range(const S *from, D *to, int64_t n, float scale) {
  if constexpr (std::is_same_v<S, D>)
    if (scale == 1.0f) return (void)memcpy(to, from, n * sizeof(S));
  const F16 by = set16(scale);
  for (int64_t i = 0; i < n; i += 16) store_some(to + i, load_some(from + i, n - i) * by, n - i);
}

template <class S, class D>
void copy_rows(const pd_copy_rows_args &a, int thread, int num_threads) {
  const int64_t width = a.width, pieces = (width + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t i = u / pieces, begin = u % pieces * kColumns;
    const int64_t from = a.src_rows ? a.src_rows[i] : i, to = a.dst_rows ? a.dst_rows[i] : i;
    if (to < 0) continue;
    copy_range((const S *)a.src + from * a.src_stride + begin, (D *)a.dst + to * a.dst_stride + begin,
               std::min(kColumns, width - begin), a.scale);
  }
}

template <class S>
void copy_rows_of(const pd_copy_rows_args &a, int thread, int num_threads) {
  a.dst_dtype == PD_BF16 ? copy_rows<S, bf16>(a, thread, num_threads) : copy_rows<S, float>(a, thread, num_threads);
}

}  // namespace

void copy_rows_part(const pd_copy_rows_args &a, int thread, int num_threads) {
  a.src_dtype == PD_BF16 ? copy_rows_of<bf16>(a, thread, num_threads) : copy_rows_of<float>(a, thread, num_threads);
}

}  // namespace pagedec
