// How a linear layer's rows and panels are shared among threads, whatever its weights are.
#pragma once
#include "common/internal.h"
#include "cpu/amx_tuning.h"

namespace pagedec {
namespace {  // private to each file that includes it

// Measured on Zen 4 (1 MB L2, 2 cores, 33-60 GB/s).
// x of a block and two slices of panel fit L2 up to k = 2048 (x in fp32: 1024); larger blocks gain nothing
constexpr int BLOCK_ROWS = 144;
// g groups of threads that share the rows read the weights g times. That hides behind the arithmetic from some 32 rows
// a group on two threads (measured: 64 rows as 2 x 32 are 3 % faster in a whole step, 32 as 2 x 16 6 % slower), and in
// proportion on more.
constexpr int ROW_SPLIT_MIN_ROWS = PD_LEVEL >= 4 ? AMX_ROW_SPLIT_MIN_ROWS : 16;  // of a group, for each thread there is
// Below so many values of x (rows times k, for each thread that would repeat the work) every thread quantises for
// itself: that costs about 0.1 ns a value, a barrier some us.
constexpr int64_t SHARE_MIN_VALUES = 32768;

// Rows a multiple of 4 KB apart fall into one set of an 8-way L1, which cannot hold a tall tile's.
constexpr int64_t L1_SET_PERIOD = 4096;
// The distance of rows of so many bytes (whole lines) that does not make them fall so.
inline int64_t stride_past_period(int64_t bytes) { return bytes % L1_SET_PERIOD ? bytes : bytes + 64; }

// Into how many groups the threads split the rows; each group's threads split the panels. As many as the weights may be
// read: a thread then finds in its own cache the rows that it wrote in the kernel before, where half of each row would
// come from another core.
inline int num_row_groups(int64_t rows, int64_t panels, int num_threads) {
  int best = 1;
  int64_t best_cost = rows * ((panels + num_threads - 1) / num_threads);
  for (int g = 2; g <= num_threads && rows / g >= (int64_t)ROW_SPLIT_MIN_ROWS * num_threads; g++) {
    const int64_t columns = num_threads / g, cost = (rows + g - 1) / g * ((panels + columns - 1) / columns);
    if (num_threads % g == 0 && cost <= best_cost) best_cost = cost, best = g;
  }
  return best;
}

inline int64_t own_rows(const pd_gemm_args &a) { return *a.num_rows < BLOCK_ROWS ? *a.num_rows : BLOCK_ROWS; }

// Whether the threads of a group quantise its rows together.
inline bool shares_rows(const pd_gemm_args &a, int num_threads) {
  const int groups = num_row_groups(*a.num_rows, ((int64_t)a.n + 31) / 32, num_threads), columns = num_threads / groups;
  return (int64_t)*a.num_rows / groups * a.k * (columns - 1) / columns >= SHARE_MIN_VALUES;
}

}  // namespace
}  // namespace pagedec
