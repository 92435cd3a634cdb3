// Low-rank updates of linear layers, each row's by its own adapter.
//
// Bits     A x: 16 sums a row of A, added up in one order, of every 16th product each, in bf16 of two neighbours in
//          each 32. B: products in the order of ranks, from 0 on, without fused operations. Sums are the same bits on
//          every instruction set, whoever stands beside a row; gates are those of the instruction set's linear layers.
// Threads  First rows of A, then, behind a barrier, outputs: of four rows at a time, of which neighbours with one
//          adapter share what is loaded of it. Units go to threads by turns: those with nothing to do stand together.
#include <algorithm>
#include <type_traits>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr int kRows = 4;       // a tile
constexpr int kColumns = 128;  // outputs of a unit: whole groups of gates
constexpr int kGroup = 16;     // outputs that have their part in common
// Rows, and rows of A, whose sums are in registers together: of which there are 32, or 16 of half the width.
constexpr int kLowRows = PD_LEVEL >= 2 ? kRows : 2, kRanks = PD_LEVEL >= 2 ? 4 : 2;

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

// Of the last ones of a row; seldom taken, and elsewhere written out many times.
template <class E>
[[gnu::noinline]] F16 load_last(const E *p, int64_t n) {
  return load_tail(p, n);
}
template <class E>
[[gnu::noinline]] void store_last(E *p, F16 a, int64_t n) {
  store_tail(p, a, n);
}

// fn(integral_constant) of count, 1 to MOST.
template <int MOST, class Fn>
void of_count(int count, const Fn &fn) {
  if constexpr (MOST > 1) {
    if (count < MOST) return of_count<MOST - 1>(count, fn);
  }
  fn(std::integral_constant<int, MOST>());
}

// Neighbours in k that are added up at a time: what a lane has of them, in this order, and how it adds them.
template <class E>
constexpr int kSpan = sizeof(E) == 2 ? 32 : 16;
PD_INLINE void load_span(const float *p, F16 (&v)[1]) { v[0] = load16(p); }
PD_INLINE void load_span(const bf16 *p, F16 (&v)[2]) { load_pairs(p, v[0], v[1]); }
PD_INLINE F16 add_product(F16 sum, F16 a, F16 b, float) { return sum + a * b; }
PD_INLINE F16 add_product(F16 sum, F16 a, F16 b, bf16) { return add_exact(sum, a, b); }
// The last ones of a row, and zeros.
template <class E>
struct Last {
  E values[kSpan<E>] = {};
  Last(const E *p, int64_t n) { memcpy(values, p, n * sizeof(E)); }
};

template <class E, int COUNT, int RANKS>
void low_products(const pd_lora_args &a, int64_t row, const E *rows_of_a, float *low, int64_t stride) {
  constexpr int EACH = kSpan<E> / 16;
  const E *x = (const E *)a.x + row * a.k;
  F16 sum[COUNT][RANKS];
  for (auto &own : sum)
    for (F16 &s : own) s = set16(0.0f);
  const auto step = [&](const auto &load) {
    F16 w[RANKS][EACH], v[EACH];
#pragma GCC unroll 4
    for (int j = 0; j < RANKS; j++) load(rows_of_a + (int64_t)j * a.k, w[j]);
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; r++) {
      load(x + (int64_t)r * a.k, v);
#pragma GCC unroll 2
      for (int e = 0; e < EACH; e++)
#pragma GCC unroll 4
        for (int j = 0; j < RANKS; j++) sum[r][j] = add_product(sum[r][j], v[e], w[j][e], E());
    }
  };
  int64_t i = 0;
  for (; i + kSpan<E> <= a.k; i += kSpan<E>) step([&](const E *p, auto &to) { load_span(p + i, to); });
  if (i < a.k) step([&](const E *p, auto &to) { load_span(Last<E>(p + i, a.k - i).values, to); });
#pragma GCC unroll 4
  for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 4
    for (int j = 0; j < RANKS; j++) low[r * stride + j] = sum_lanes(sum[r][j]);
}

// Ranks first .. first + number - 1 of one part, of a tile's rows.
template <class E>
void low_tile(const pd_lora_args &a, int64_t tile, int32_t part, int32_t first, int32_t number) {
  const int64_t stride = (int64_t)a.num_parts * a.rank;
  each_run(a, tile, [&](const Run &run) {
    if (run.place < 0) return;
    const int64_t own = (int64_t)run.place * a.num_parts + part;
    const int ranks = std::min(number, a.ranks[own] - first);
    if (ranks <= 0) return;
    const E *rows_of_a = (const E *)a.a + (own * a.rank + first) * a.k;
    for (int r = 0; r < run.count; r += kLowRows) {
      const int64_t row = run.row + r;
      float *low = a.low + row * stride + part * a.rank + first;
      of_count<kLowRows>(run.count - r, [&](auto count) {
        constexpr int COUNT = decltype(count)::value;
        if (ranks == kRanks) return low_products<E, COUNT, kRanks>(a, row, rows_of_a, low, stride);
        for (int64_t j = 0; j < ranks; j++) low_products<E, COUNT, 1>(a, row, rows_of_a + j * a.k, low + j, stride);
      });
    }
  });
}

// sum[r] = B (A x) of up to 16 outputs, of as many rows.
template <class E, int COUNT>
PD_INLINE void multiply_ranks(const E *b, int64_t n, int64_t left, const float *low, int64_t stride, int32_t ranks,
                              F16 (&sum)[COUNT]) {
  F16 own[COUNT];  // in registers: what is read could be what a reference leads to
  for (F16 &s : own) s = set16(0.0f);
  const auto each = [&](const auto &load) {
    for (int32_t i = 0; i < ranks; i++) {
      const F16 w = load(b + (int64_t)i * n);
#pragma GCC unroll 4
      for (int r = 0; r < COUNT; r++) own[r] = own[r] + set16(low[r * stride + i]) * w;
    }
  };
  if (left >= kGroup) each([](const E *p) { return load16(p); });
  else each([&](const E *p) { return load_last(p, left); });
#pragma GCC unroll 4
  for (int r = 0; r < COUNT; r++) sum[r] = own[r];
}

// What a run's outputs from `column` on, up to 16, are in `from`, and with what is added to them in `to`.
template <class Y, class Z>
struct Columns {
  const Z *from;
  Y *to;
  int64_t from_stride, to_stride;
};
template <class E, class Y, class Z>
void add_outputs(const pd_lora_args &a, const Run &run, int64_t column, const Columns<Y, Z> &columns) {
  const int64_t left = std::min<int64_t>(a.n - column, kGroup);
  const int32_t part = a.parts[column / kGroup];
  const int64_t own = (int64_t)run.place * a.num_parts + part;
  const int32_t ranks = a.ranks[own];
  const E *b = (const E *)a.b + (int64_t)run.place * a.rank * a.n + column;
  const float *low = a.low + (run.row * a.num_parts + part) * a.rank;
  of_count<kRows>(run.count, [&](auto count) {
    constexpr int COUNT = decltype(count)::value;
    F16 sum[COUNT];
    multiply_ranks(b, a.n, left, low, (int64_t)a.num_parts * a.rank, ranks, sum);
    const F16 scale = set16(a.scales[own]);
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; r++) {
      const Z *from = columns.from + r * columns.from_stride;
      Y *to = columns.to + r * columns.to_stride;
      const F16 before = left < kGroup ? load_last(from, left) : load16(from);
      const F16 after = ranks ? before + scale * sum[r] : before;
      left < kGroup ? store_last(to, after, left) : store16(to, after);
    }
  });
}

template <class E, class Y>
void add_tile(const pd_lora_args &a, int64_t tile, int64_t first, int64_t end) {
  each_run(a, tile, [&](const Run &run) {
    if (run.place < 0) return;
    for (int64_t column = first; column < end; column += kGroup) {
      Y *y = (Y *)a.y + run.row * a.n + column;
      add_outputs<E>(a, run, column, Columns<Y, Y>{y, y, a.n, a.n});
    }
  });
}

template <class E>
void gate_tile(const pd_lora_args &a, int64_t tile, int64_t first, int64_t end) {
  const int64_t bytes = a.y_dtype == PD_F32 ? 4 : 2;
  float sums[kRows][kColumns];
  each_run(a, tile, [&](const Run &run) {
    const float *z = a.z + run.row * a.n;
    for (int64_t column = first; run.place >= 0 && column < end; column += kGroup)
      add_outputs<E>(a, run, column, Columns<float, float>{z + column, &sums[0][column - first], a.n, kColumns});
    for (int r = 0; r < run.count; r++) {
      char *y = (char *)a.y + ((run.row + r) * (a.n / 2) + first / 2) * bytes;
      gate_outputs(a.epilogue, a.y_dtype, run.place < 0 ? z + r * a.n + first : sums[r], (end - first) / 32, y);
    }
  });
}

bool is_asked(const pd_lora_args &a) {
  return std::any_of(a.adapters, a.adapters + *a.num_rows, [](int32_t place) { return place >= 0; });
}

template <class E>
void low_part(const pd_lora_args &a, int thread, int num_threads) {
  const int64_t parts = num_tiles(a) * a.num_parts;
  const int32_t each = parts * (a.rank / kRanks) < num_threads ? 1 : kRanks;  // ranks of a unit: few are all threads'
  const int64_t pieces = (a.rank + each - 1) / each;
  for (int64_t u = thread; u < parts * pieces; u += num_threads) {
    const int64_t of = u / pieces;
    low_tile<E>(a, of / a.num_parts, (int32_t)(of % a.num_parts), (int32_t)(u % pieces) * each, each);
  }
}
template <class E>
void outputs_part(const pd_lora_args &a, int thread, int num_threads) {
  const int64_t pieces = (a.n + kColumns - 1) / kColumns;
  for (int64_t u = thread; u < num_tiles(a) * pieces; u += num_threads) {
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
