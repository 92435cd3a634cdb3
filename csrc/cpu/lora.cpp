// Low-rank updates of linear layers, each row's by its own adapter.
//
// Bits     A x: 16 sums a row of A, of every 16th product each, added up in one order. B: products in the order of
//          ranks, from 0 on. Without fused operations: the same bits on every instruction set, whoever stands beside a
//          row.
// Threads  First rows of A, then, behind a barrier, outputs: of four rows at a time, of which neighbours with one
//          adapter share what is loaded of it.
#include <algorithm>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int kRows = 4;        // a tile
constexpr int kRanks = 2;       // rows of A at a time
constexpr int kColumns = 128;   // outputs of a unit: whole groups of gates
constexpr int kGroup = 16;      // outputs that have their part in common

// Neighbours of one tile that share an adapter: rows row .. row + count - 1.
struct Run {
  int64_t row;
  int count;
  int32_t place;
};
template <class Fn>
void each_run(const pd_lora_args &a, int64_t tile, const Fn &fn) {
  const int64_t end = std::min<int64_t>((tile + 1) * kRows, *a.num_rows);
  for (int64_t row = tile * kRows; row < end;) {
    const int32_t place = a.adapters[row];
    int count = 1;
    while (row + count < end && a.adapters[row + count] == place) count++;
    fn(Run{row, count, place});
    row += count;
  }
}
int64_t num_tiles(const pd_lora_args &a) { return ((int64_t)*a.num_rows + kRows - 1) / kRows; }

template <class E, int COUNT, int RANKS>
void low_products(const pd_lora_args &a, int64_t row, const E *rows_of_a, float *low, int64_t stride) {
  const E *x = (const E *)a.x + row * a.k;
  F16 sum[COUNT][RANKS];
  for (auto &own : sum)
    for (F16 &s : own) s = set16(0.0f);
  for (int64_t i = 0; i < a.k; i += 16) {
    F16 w[RANKS];
    for (int j = 0; j < RANKS; j++) w[j] = load_some(rows_of_a + (int64_t)j * a.k + i, a.k - i);
    for (int r = 0; r < COUNT; r++) {
      const F16 v = load_some(x + (int64_t)r * a.k + i, a.k - i);
      for (int j = 0; j < RANKS; j++) sum[r][j] = sum[r][j] + v * w[j];
    }
  }
  for (int r = 0; r < COUNT; r++)
    for (int j = 0; j < RANKS; j++) low[r * stride + j] = sum_lanes(sum[r][j]);
}
template <class E, int COUNT>
void low_of_rows(const pd_lora_args &a, int64_t row, const E *rows_of_a, int ranks, float *low, int64_t stride) {
  if (ranks == kRanks) low_products<E, COUNT, kRanks>(a, row, rows_of_a, low, stride);
  else low_products<E, COUNT, 1>(a, row, rows_of_a, low, stride);
}

// Ranks first .. first + kRanks - 1 of one part, of a tile's rows.
template <class E>
void low_tile(const pd_lora_args &a, int64_t tile, int32_t part, int32_t first) {
  const int64_t stride = (int64_t)a.num_parts * a.rank;
  each_run(a, tile, [&](const Run &run) {
    if (run.place < 0) return;
    const int64_t own = (int64_t)run.place * a.num_parts + part;
    const int ranks = std::min(kRanks, a.ranks[own] - first);
    if (ranks <= 0) return;
    const E *rows_of_a = (const E *)a.a + (own * a.rank + first) * a.k;
    float *low = a.low + run.row * stride + part * a.rank + first;
    if (run.count == 4) low_of_rows<E, 4>(a, run.row, rows_of_a, ranks, low, stride);
    else if (run.count == 3) low_of_rows<E, 3>(a, run.row, rows_of_a, ranks, low, stride);
    else if (run.count == 2) low_of_rows<E, 2>(a, run.row, rows_of_a, ranks, low, stride);
    else low_of_rows<E, 1>(a, run.row, rows_of_a, ranks, low, stride);
  });
}

// to[r * stride + i] = from[r * stride + i] + scale * B (A x), of up to 16 outputs from `column` on.
template <class E, class Y, class Z>
void add_outputs(const pd_lora_args &a, const Run &run, int64_t column, const Z *from, Y *to, int64_t stride) {
  const int64_t left = std::min<int64_t>(a.n - column, kGroup), low_stride = (int64_t)a.num_parts * a.rank;
  const int32_t part = a.parts[column / kGroup];
  const int64_t own = (int64_t)run.place * a.num_parts + part;
  const int32_t ranks = run.place < 0 ? 0 : a.ranks[own];
  const E *b = (const E *)a.b + ((int64_t)run.place * a.rank) * a.n + column;
  const float *low = a.low + run.row * low_stride + part * a.rank;
  F16 sum[kRows];
  for (F16 &s : sum) s = set16(0.0f);
  for (int32_t i = 0; i < ranks; i++) {
    const F16 w = load_some(b + (int64_t)i * a.n, left);
    for (int r = 0; r < run.count; r++) sum[r] = sum[r] + set16(low[r * low_stride + i]) * w;
  }
  const F16 scale = set16(ranks ? a.scales[own] : 0.0f);
  for (int r = 0; r < run.count; r++) {
    const F16 before = load_some(from + r * stride, left);
    store_some(to + r * stride, ranks ? before + scale * sum[r] : before, left);
  }
}

template <class E, class Y>
void add_tile(const pd_lora_args &a, int64_t tile, int64_t first, int64_t end) {
  each_run(a, tile, [&](const Run &run) {
    if (run.place < 0) return;
    for (int64_t column = first; column < end; column += kGroup) {
      Y *y = (Y *)a.y + run.row * a.n + column;
      add_outputs<E>(a, run, column, y, y, a.n);
    }
  });
}

template <class E>
void gate_tile(const pd_lora_args &a, int64_t tile, int64_t first, int64_t end) {
  const int64_t bytes = a.y_dtype == PD_F32 ? 4 : 2;
  float sums[kRows][kColumns];
  each_run(a, tile, [&](const Run &run) {
    for (int r = 0; r < run.count; r++) {
      const float *z = a.z + (run.row + r) * a.n;
      std::copy(z + first, z + end, sums[r]);
    }
    for (int64_t column = first; run.place >= 0 && column < end; column += kGroup)
      add_outputs<E>(a, run, column, &sums[0][column - first], &sums[0][column - first], kColumns);
    for (int r = 0; r < run.count; r++) {
      char *y = (char *)a.y + ((run.row + r) * (a.n / 2) + first / 2) * bytes;
      gate_outputs(a.epilogue, a.y_dtype, sums[r], (end - first) / 32, y);
    }
  });
}

bool is_asked(const pd_lora_args &a) {
  return std::any_of(a.adapters, a.adapters + *a.num_rows, [](int32_t place) { return place >= 0; });
}

template <class E>
void low_part(const pd_lora_args &a, int thread, int num_threads) {
  const int64_t pieces = (a.rank + kRanks - 1) / kRanks, each = pieces * a.num_parts;
  const Range units = share(num_tiles(a) * each, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++)
    low_tile<E>(a, u / each, (int32_t)(u % each / pieces), (int32_t)(u % pieces) * kRanks);
}
template <class E>
void outputs_part(const pd_lora_args &a, int thread, int num_threads) {
  const int64_t pieces = (a.n + kColumns - 1) / kColumns;
  const Range units = share(num_tiles(a) * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t tile = u / pieces, first = u % pieces * kColumns, end = std::min<int64_t>(first + kColumns, a.n);
    if (a.epilogue != PD_ADD) gate_tile<E>(a, tile, first, end);
    else if (a.y_dtype == PD_F32) add_tile<E, float>(a, tile, first, end);
    else add_tile<E, E>(a, tile, first, end);
  }
}

}  // namespace

bool lora_low_part(const pd_lora_args &a, int thread, int num_threads) {
  if (!is_asked(a)) return false;
  if (a.dtype == PD_F32) low_part<float>(a, thread, num_threads);
  else low_part<bf16>(a, thread, num_threads);
  return true;
}

void lora_part(const pd_lora_args &a, int thread, int num_threads) {
  if (a.epilogue == PD_ADD && !is_asked(a)) return;
  if (a.dtype == PD_F32) outputs_part<float>(a, thread, num_threads);
  else outputs_part<bf16>(a, thread, num_threads);
}

}  // namespace pagedec
