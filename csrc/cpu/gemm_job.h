// One thread's share of a linear layer (gemm.cpp): what it reads, and where it keeps its rows on the way.
#pragma once
#include <algorithm>

#include "common/context.h"
#include "cpu/gemm_amx.h"
#include "cpu/gemm_finish.h"
#include "cpu/gemm_pairs.h"
#include "cpu/gemm_shares.h"
#include "cpu/gemm_weight_only.h"

namespace pagedec {
namespace {  // private to each file that includes it

constexpr int64_t SLICE_STEPS = 1024;    // 128 KB of panel; measured on Zen 4 (1 MB L2, 2 cores, 33-60 GB/s)
// of what does not go through the unit where there is one
constexpr int64_t BESIDE_AMX_SLICE_STEPS = 128;
constexpr int BESIDE_AMX_SLICE_MIN_ROWS = 128;

// Weights alone in bytes: a tile of all rows takes them as they are; of several the first leaves the others what it has
// widened. Where bf16 are multiplied as fp32 each tile takes them as they are, too, which costs 5 % of its time
// (measured on Zen 3) with int8; to widen a slice before takes two rows' time, so that is for many. Rows in fp32 have
// it always, few in the first cache.
constexpr int WIDEN_MIN_ROWS = 48, WIDEN_FP8_MIN_ROWS = PAIRS_TILE_ROWS + 1;
constexpr int64_t WIDE_STEPS = 128;
constexpr int64_t WIDE_ROOM_STEPS = SLICE_STEPS + 2 * GROUP_STEPS;  // slices begin at lines of k

// What a thread needs to know of x in the row block in work.
struct Rows {
  const char *x = nullptr;  // a.x itself, a copy, or what became of it
  int64_t stride = 0;
};

struct Job {
  const pd_gemm_args &a;
  const Int8Row shape;  // int8: of a row of x
  bool int8 = false, vnni = false, amx = false;
  Panel bytes = WORDS;                       // BYTES, FP8: x stays in its dtype
  bool widens = false;                       // bytes become words before tiles
  bool streams = false;                      // all rows are in one tile
  bool as_floats = false;  // x in bf16 becomes fp32, once for all panels; each tile widens what it takes of W
  // a step is a word of x (int8: four values of it) and 128 bytes of a panel, or less where only the weight is bytes
  int64_t row_bytes = 0, num_steps = 0, num_slices = 0, step_bytes = 128;
  int64_t x_step_bytes = 4;  // of a row as tiles take it
  int64_t header = 0, panel_bytes = 0;                    // of a panel: bytes before its first step, and in all
  int64_t row_begin = 0, row_end = 0, panel_begin = 0, panel_end = 0;     // this thread's share
  FinishFn finish = nullptr;
  const char *next = nullptr, *next_end = nullptr;  // what this thread will read in the following layer, or NULL
  // for copies of this thread's rows; int8: or what all have quantised into
  char *workspace = nullptr;
  char *wide = nullptr;  // for a slice of a panel as tiles take it, or all slices
  bool shared = false;
  Rows rows{};

  int tile_rows() const {
    return int8 ? INT8_TILE_ROWS : as_floats ? PAIRS_TILE_ROWS : TILE_ROWS;
  }
  int64_t num_lines() const { return (num_steps + AMX_STEPS - 1) / AMX_STEPS; }
  // int8: where a group begins; amx: a line; weight only: a pair of values. No slice is empty.
  int64_t slice_begin(int64_t s) const {
    static_assert(AMX_STEPS == GROUP_STEPS);
    if (!int8 && bytes == WORDS && !HAS_AMX) return num_steps * s / num_slices;
    return std::min(num_lines() * s / num_slices * AMX_STEPS, num_steps);
  }
  // in the panel; the header goes with the first
  int64_t slice_offset(int64_t s) const { return s ? header + slice_begin(s) * step_bytes : 0; }
  bool first_widens() const { return PD_LEVEL == 3 && widens && a.dtype == PD_BF16; }  // the first tile, not before it
  bool keeps_wide() const { return amx && num_steps <= WIDE_ROOM_STEPS; }  // all slices of a panel, for rows to come
  const char *panel(int64_t p) const { return (const char *)a.packed + p * panel_bytes; }
  const char *steps(int64_t p, int64_t s) const { return panel(p) + header + slice_begin(s) * step_bytes; }
};

// x in int8, in the workspace: rows that are not L1_SET_PERIOD apart.
int64_t int8_stride(const Int8Row &shape) { return stride_past_period(shape.bytes); }
int64_t int8_bytes(const Int8Row &shape, int64_t rows) { return rows * int8_stride(shape); }

// Rows of x, so many bytes each, that a thread keeps at once.
int64_t kept_rows(const pd_gemm_args &a, int64_t bytes) {
  return HAS_AMX ? std::max(own_rows(a), std::min((int64_t)*a.num_rows, amx_block_rows(bytes))) : own_rows(a);
}

// A block of rows L1_SET_PERIOD apart is copied, each row a line further than it was (measured, k = 4096 and 14336:
// 1.16-1.2 times faster at 12 and 24 rows, 1.07 at 144).
// below these the copy costs more than it saves
constexpr int COPY_MIN_ROWS = TILE_ROWS > 8 ? 10 : INT32_MAX, COPY_MIN_PANELS = 8;

int64_t row_bytes(const pd_gemm_args &a) { return (int64_t)a.k * (a.dtype == PD_BF16 ? 2 : 4); }
int64_t floats_stride(int64_t k) { return stride_past_period((k * 4 + 63) & -64); }
bool goes_as_floats(const pd_gemm_args &a) {
  return PD_LEVEL <= 2 && a.dtype == PD_BF16 && a.quantization != PD_INT8;
}
int64_t copy_bytes(const pd_gemm_args &a) {  // for a thread
  if (goes_as_floats(a)) return own_rows(a) * floats_stride(a.k);
  const bool copied = row_bytes(a) % L1_SET_PERIOD == 0 && *a.num_rows >= COPY_MIN_ROWS;
  return copied ? kept_rows(a, row_bytes(a)) * (row_bytes(a) + 64) : 0;
}

int64_t wide_bytes(const pd_gemm_args &a) {  // for a thread
  return a.quantization == PD_INT8_WEIGHT_ONLY || a.quantization == PD_FP8 ? WIDE_ROOM_STEPS * 128 : 0;
}

int64_t num_slices(const Job &j) {
  const int64_t rows = *j.a.num_rows;
  const bool in_first_cache = j.widens && !j.first_widens() && rows <= 2 * TILE_ROWS;
  const bool is_short = HAS_AMX ? !j.amx && rows > BESIDE_AMX_SLICE_MIN_ROWS : in_first_cache;
  const int64_t slice = !is_short ? SLICE_STEPS : HAS_AMX ? BESIDE_AMX_SLICE_STEPS : WIDE_STEPS;
  // two tiles of rows have a panel once: nothing of it would be found in the first cache again
  if (j.amx && j.row_end - j.row_begin > 2 * AMX_ROWS) return (j.num_lines() + AMX_PART_LINES - 1) / AMX_PART_LINES;
  return (j.num_steps + slice - 1) / slice;
}

// Bytes of workspace that a thread has for itself.
int64_t own_bytes(const pd_context &c, const pd_gemm_args &a) {
  const Int8Row shape(a.k, c.vnni);
  return a.quantization == PD_INT8 ? int8_bytes(shape, kept_rows(a, shape.bytes)) : copy_bytes(a) + wide_bytes(a);
}

Share share_of(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  const int64_t rows = *a.num_rows, panels = ((int64_t)a.n + 31) / 32;
  const int groups = num_row_groups(rows, panels, num_threads), columns = num_threads / groups;
  const int column = thread % columns, group = thread / columns;
  Share s{};
  s.row_begin = rows * group / groups, s.row_end = rows * (group + 1) / groups;
  s.panel_begin = panels * column / columns, s.panel_end = panels * (column + 1) / columns;
  s.quantized = a.quantization == PD_INT8 && shares_rows(a, num_threads);
  s.workspace = c.linear.get() + (s.quantized ? 0 : thread * own_bytes(c, a));
  set_next(s, a, thread, num_threads);
  return s;
}

Job make_job(const pd_context &c, const pd_gemm_args &a, const Share &share) {
  const int64_t rows = *a.num_rows;
  Job j{a, {a.k, c.vnni}};
  j.int8 = a.quantization == PD_INT8, j.vnni = c.vnni;
  j.row_bytes = row_bytes(a);
  j.as_floats = goes_as_floats(a), j.x_step_bytes = j.int8 ? j.shape.step_bytes : j.as_floats ? 8 : 4;
  j.num_steps = j.int8 ? ((int64_t)a.k + 3) / 4 : (j.row_bytes + 3) / 4;
  if (j.int8) j.header = INT8_HEADER;
  j.panel_bytes = j.header + j.num_steps * 128;
  j.streams = !j.int8 && a.dtype == PD_BF16 && rows <= STREAM_ROWS;
  if (a.quantization == PD_INT8_WEIGHT_ONLY) j.bytes = BYTES, j.header = WEIGHT_ONLY_HEADER;
  if (a.quantization == PD_FP8) j.bytes = FP8, j.header = fp8_header(a.k);
  if (j.bytes != WORDS) {
    static_assert(WEIGHT_ONLY_PAIR == FP8_PAIR);
    j.step_bytes = a.dtype == PD_BF16 ? FP8_PAIR : FP8_PAIR / 2;
    j.panel_bytes = j.header + ((int64_t)a.k + 1) / 2 * FP8_PAIR;
  }
  j.shared = share.quantized, j.workspace = share.workspace, j.wide = j.workspace + copy_bytes(a);
  j.row_begin = share.row_begin, j.row_end = share.row_end;
  j.panel_begin = share.panel_begin, j.panel_end = share.panel_end;
  j.next = share.next, j.next_end = share.next_end;
  if constexpr (HAS_AMX) j.amx = j.int8 ? j.vnni && j.row_end - j.row_begin >= INT8_AMX_MIN_ROWS : a.dtype == PD_BF16;
  const int widen_min_rows = !j.as_floats ? 0 : j.bytes == FP8 ? WIDEN_FP8_MIN_ROWS : WIDEN_MIN_ROWS;
  j.widens = j.bytes != WORDS && !j.streams && j.row_end - j.row_begin >= widen_min_rows;
  j.num_slices = num_slices(j);
  j.finish = j.int8 || j.bytes == BYTES ? pick_finish<true>(a) : pick_finish<false>(a);
  return j;
}

void place_plain_rows(Job &j, int64_t row, int64_t rows) {
  const int64_t row_bytes = j.row_bytes;
  j.rows = {(const char *)j.a.x + row * row_bytes, row_bytes};
  if (row_bytes % L1_SET_PERIOD || rows < COPY_MIN_ROWS || j.panel_end - j.panel_begin < COPY_MIN_PANELS) return;
  const int64_t stride = row_bytes + 64;
  for (int64_t i = 0; i < rows; i++) memcpy(j.workspace + i * stride, j.rows.x + i * row_bytes, row_bytes);
  j.rows = {j.workspace, stride};
}

// Rows begin .. end of x, one behind the other.
void quantize_rows(const Job &j, int64_t begin, int64_t end, char *to) {
  for (int64_t r = begin; r < end; r++, to += int8_stride(j.shape))
    quantize_row((const char *)j.a.x + r * j.row_bytes, j.a.dtype, j.a.k, j.shape, to);
}
void place_int8_rows(Job &j, int64_t row, int64_t rows) {
  if (!j.shared) quantize_rows(j, row, row + rows, j.workspace);
  j.rows = {j.workspace + (j.shared ? int8_bytes(j.shape, row) : 0), int8_stride(j.shape)};
}
// By each thread of a group for itself.
void place_floats(Job &j, int64_t row, int64_t rows) {
  j.rows = {j.workspace, floats_stride(j.a.k)};
  for (int64_t i = 0; i < rows; i++)
    floats_of_row((const uint16_t *)j.a.x + (row + i) * j.a.k, j.a.k, (float *)(j.workspace + i * j.rows.stride));
}
void place_rows(Job &j, int64_t row, int64_t rows) {
  if (j.as_floats) place_floats(j, row, rows);
  else j.int8 ? place_int8_rows(j, row, rows) : place_plain_rows(j, row, rows);
}

// The steps of a slice of a panel, as tiles take them. again: other rows had this slice, and the whole panel, before.
const char *place_slice(const Job &j, int64_t p, int64_t s, bool again = false) {
  if (!j.widens) return j.steps(p, s);
  const int64_t num_steps = j.slice_begin(s + 1) - j.slice_begin(s);
  char *wide = j.wide + (j.keeps_wide() ? j.slice_begin(s) * 128 : 0);
  if (again && j.keeps_wide()) return wide;
  const bool in_pairs = j.a.dtype == PD_BF16;
  const int64_t begin = in_pairs ? j.slice_begin(s) : j.slice_begin(s) / 2;
  const int64_t pairs = in_pairs ? num_steps : (num_steps + 1) / 2;
  if (j.bytes == BYTES) widen_panel(j.steps(p, s), j.a.dtype, pairs, wide);
  else widen_fp8_panel(j.steps(p, s), (const float *)j.panel(p), j.a.dtype, begin, pairs, wide);
  return wide;
}

}  // namespace
}  // namespace pagedec
