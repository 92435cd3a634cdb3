// How a linear layer's rows and panels are shared among threads, whatever its weights are.
#pragma once
#include <algorithm>

#include "common/internal.h"
#include "cpu/amx_tuning.h"

namespace pagedec {

// What a thread has of a linear layer.
struct Share {
  int64_t row_begin, row_end, panel_begin, panel_end;
  bool quantized;                 // rows were quantised by all threads, into one workspace
  char *workspace;                // this thread's, or theirs
  const char *next, *next_end;    // what this thread will read next, or NULL
};

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

// What of the next layer's weight a thread begins to fetch.
inline void set_next(Share &share, const pd_gemm_args &a, int thread, int num_threads) {
  const char *next = (const char *)a.next_packed;
  share.next = next ? next + (a.next_bytes * thread / num_threads & -64) : nullptr;
  share.next_end = next ? next + a.next_bytes * (thread + 1) / num_threads : nullptr;
}

// An expert's panel is not worth less than that of so many rows: it is read for one, too.
constexpr int64_t EXPERT_MIN_ROWS = 4;

// Calls run(gemm, panel_begin, panel_end, next) for each expert of which a thread has panels, with a record of its rows
// alone; `next`: the expert's weight that this thread has after it, or NULL. Threads share all experts' panels, by what
// they cost; each multiplies all of an expert's rows, so that nobody reads a panel twice.
template <class Run>
void each_own_expert(const pd_experts_args &a, int thread, int num_threads, Run &&run) {
  const pd_gemm_args &g = a.gemm;
  const int64_t panels = ((int64_t)g.n + 31) / 32, gated = is_gated(g.epilogue);
  const int64_t x_bytes = (int64_t)g.k * (g.dtype == PD_F32 ? 4 : 2);
  const int64_t y_bytes = (gated ? g.n / 2 : g.n) * (int64_t)(g.y_dtype == PD_F32 ? 4 : 2);
  const auto cost = [&](int32_t e) -> int64_t {
    const int64_t rows = a.first[e + 1] - a.first[e];
    return rows ? (rows < EXPERT_MIN_ROWS ? EXPERT_MIN_ROWS : rows) : 0;
  };
  int64_t total = 0, at = 0;
  for (int32_t e = 0; e < a.num_experts; e++) total += cost(e) * panels;
  const int64_t begin = total * thread / num_threads, end = total * (thread + 1) / num_threads;
  int32_t rows = 0, last = -1;
  int64_t last_begin = 0, last_end = 0;
  const auto finish = [&](const char *next) {
    if (last < 0) return;
    pd_gemm_args one = g;
    rows = a.first[last + 1] - a.first[last], one.num_rows = &rows;
    one.x = (const char *)g.x + a.first[last] * x_bytes, one.y = (char *)g.y + a.first[last] * y_bytes;
    one.packed = (const char *)g.packed + last * a.expert_bytes;
    if (g.bias) one.bias = g.bias + (int64_t)last * g.n;
    run(one, last_begin, last_end, next);
  };
  for (int32_t e = 0; e < a.num_experts && at < end; e++) {
    const int64_t own = cost(e);
    if (own == 0) continue;
    const auto panel = [&](int64_t where) { return std::clamp<int64_t>((where - at + own - 1) / own, 0, panels); };
    const int64_t p0 = panel(begin), p1 = panel(end);
    if (p0 < p1) {
      finish((const char *)g.packed + e * a.expert_bytes);
      last = e, last_begin = p0, last_end = p1;
    }
    at += own * panels;
  }
  finish(nullptr);
}

}  // namespace
}  // namespace pagedec
