// Linear layers: y = epilogue(x W^T + bias) for any number of rows, one packed weight for all of them.
//
// Bits     Every output is one chain of multiply-adds over k = 0, 1, 2, ... (on the matrix unit of lines of k:
//          gemm_amx.h). Tile heights, row blocks, slices of k and the number of threads decide only which chains run
//          side by side and where a chain rests in memory on its way.
// Threads  A thread owns a run of panels: its own stream from memory, k is never split. Where there are too few panels
//          for the threads and rows enough, threads split the rows as well.
// Order    row block > panel > slice of k > tile. A slice of the panel stays in L1/L2 while the tiles of the block pass
//          it, and meanwhile they prefetch the next slice, an equal share each, so that memory is never idle. Few rows
//          of bf16 are one tile, which prefetches as it goes.
#include <algorithm>

#include "common/context.h"
#include "cpu/gemm_amx.h"
#include "cpu/gemm_blocks.h"
#include "cpu/gemm_finish.h"
#include "cpu/gemm_shares.h"
#include "cpu/gemm_weight_only.h"

namespace pagedec {
namespace {

// Measured on Zen 4 (1 MB L2, 2 cores, 33-60 GB/s).
constexpr int64_t SLICE_STEPS = 1024;    // 128 KB of panel
// While one tall tile passes a panel the hardware prefetches; doing it too costs up to 30 % below 7 rows, and from
// there to 12 rows between -6 % (one thread, idle machine) and 17 % (memory shared with others). With more tiles memory
// would be idle from the second on. The 512-bit FMA kernel is never so short of memory (prefetching costs it 4-15 %).
// fp32: up to here the first tile is as tall as can be (in bf16, before that streamed, 14 + 2 beat 8 + 8 by 5 %)
constexpr int TALL_ROWS = TILE_ROWS + 2;
constexpr int PREFETCH_MIN_ROWS = PD_LEVEL == 3 ? TALL_ROWS + 1 : PD_LEVEL == 2 ? INT32_MAX : 7;
// Up to 16 rows of bf16 are one tile (two of half a panel from 15 on), which prefetches its panels by so many bytes:
// 2 KB are worse than none, 4 KB up to 5 % worse. Measured with weights in huge pages: 8, 12 and 16 rows gain 22, 17
// and 17 %; in small ones, where each prefetch walks the page table, they lose 3, 1 and 7 %.
constexpr int64_t STREAM_AHEAD = 8192, HALF_STREAM_AHEAD = 16384;
constexpr int INT8_PREFETCH_MIN_ROWS = 7;
constexpr bool HAS_AMX = PD_LEVEL >= 4;
constexpr int64_t AMX_SLICE_STEPS = 128;
constexpr int AMX_SLICE_MIN_ROWS = 128;
constexpr int AMX_PREFETCH_MIN_ROWS = 17;
// measured: 16 rows are faster without tiles (6.8 ms against 8), 32 with them (8 against 10.1)
constexpr int INT8_AMX_MIN_ROWS = 24;
// Where tile i of a block begins: equal heights, but where hardware prefetching makes one tall tile better.
int tile_begin(bool int8, int i, int tiles, int rows) {
  if (!int8 && PD_LEVEL == 3 && tiles == 2 && rows <= TALL_ROWS) return i == 0 ? 0 : i == 1 ? TILE_ROWS : rows;
  return rows * i / tiles;
}

// What a thread needs to know of x in the row block in work.
struct Rows {
  const char *x = nullptr;  // a.x itself, a copy, or what became of it
  int64_t stride = 0;
};

struct Job {
  const pd_gemm_args &a;
  const Int8Row shape;  // int8: of a row of x
  bool int8 = false, vnni = false, amx = false;
  bool weight_only = false, widens = false;  // int8 beside x in its dtype; and whether slices are widened before tiles
  bool streams = false;                      // all rows are in one tile
  // a step is a word of x (int8: four values of it) and 128 bytes of a panel, or less where only the weight is int8
  int64_t row_bytes = 0, num_steps = 0, num_slices = 0, step_bytes = 128;
  int64_t header = 0, panel_bytes = 0;                    // of a panel: bytes before its first step, and in all
  int64_t row_begin = 0, row_end = 0, panel_begin = 0, panel_end = 0;     // this thread's share
  FinishFn finish = nullptr;
  const char *next = nullptr, *next_end = nullptr;  // what this thread will read in the following layer, or NULL
  // for copies of this thread's rows; int8: or what all have quantised into
  char *workspace = nullptr;
  char *wide = nullptr;  // for a slice of a panel in x's dtype
  bool shared = false;
  Rows rows{};

  int64_t slice_begin(int64_t s) const {  // int8: where a group begins; amx: a line; weight only: a pair of values
    const int64_t step = num_steps * s / num_slices;
    return (int8 || weight_only || HAS_AMX) && s < num_slices ? step / GROUP_STEPS * GROUP_STEPS : step;
  }
  // in the panel; the header goes with the first
  int64_t slice_offset(int64_t s) const { return s ? header + slice_begin(s) * step_bytes : 0; }
  bool first_widens() const { return PD_LEVEL == 3 && widens && a.dtype == PD_BF16; }  // the first tile, not before it
  const char *panel(int64_t p) const { return (const char *)a.packed + p * panel_bytes; }
  const char *steps(int64_t p, int64_t s) const { return panel(p) + header + slice_begin(s) * step_bytes; }
};

// x in int8, in the workspace: rows that are not L1_SET_PERIOD apart.
int64_t int8_stride(const Int8Row &shape) { return shape.bytes % L1_SET_PERIOD ? shape.bytes : shape.bytes + 64; }
int64_t int8_bytes(const Int8Row &shape, int64_t rows) { return rows * int8_stride(shape); }

// A block of rows L1_SET_PERIOD apart is copied, each row a line further than it was (measured, k = 4096 and 14336:
// 1.16-1.2 times faster at 12 and 24 rows, 1.07 at 144).
// below these the copy costs more than it saves
constexpr int COPY_MIN_ROWS = TILE_ROWS > 8 ? 10 : INT32_MAX, COPY_MIN_PANELS = 8;

int64_t row_bytes(const pd_gemm_args &a) { return (int64_t)a.k * (a.dtype == PD_BF16 ? 2 : 4); }
int64_t copy_bytes(const pd_gemm_args &a) {  // for a thread
  const bool copied = row_bytes(a) % L1_SET_PERIOD == 0 && *a.num_rows >= COPY_MIN_ROWS;
  return copied ? own_rows(a) * (row_bytes(a) + 64) : 0;
}

// Weights alone in int8: a tile of all rows takes them as they are; of several the first leaves the others what it has
// widened. Where bf16 are not multiplied a slice is widened before, for few rows in the first cache.
constexpr int64_t WIDE_STEPS = 128;
int64_t wide_bytes(const pd_gemm_args &a) {  // for a thread; slices begin at lines of k
  return a.quantization == PD_INT8_WEIGHT_ONLY ? (SLICE_STEPS + 2 * GROUP_STEPS) * 128 : 0;
}

Job make_job(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  const int64_t rows = *a.num_rows, panels = ((int64_t)a.n + 31) / 32;
  Job j{a, {a.k, c.vnni}};
  j.int8 = a.quantization == PD_INT8, j.vnni = c.vnni;
  j.row_bytes = row_bytes(a);
  j.num_steps = j.int8 ? ((int64_t)a.k + 3) / 4 : (j.row_bytes + 3) / 4;
  if (j.int8) j.header = INT8_HEADER, j.shared = shares_rows(a, num_threads);
  j.panel_bytes = j.header + j.num_steps * 128;
  j.streams = !j.int8 && a.dtype == PD_BF16 && rows <= STREAM_ROWS;
  if (a.quantization == PD_INT8_WEIGHT_ONLY) {
    j.weight_only = true, j.widens = !j.streams;
    j.header = WEIGHT_ONLY_HEADER, j.step_bytes = a.dtype == PD_BF16 ? WEIGHT_ONLY_PAIR : WEIGHT_ONLY_PAIR / 2;
    j.panel_bytes = j.header + ((int64_t)a.k + 1) / 2 * WEIGHT_ONLY_PAIR;
  }
  const bool in_first_cache = j.widens && !j.first_widens() && rows <= 2 * TILE_ROWS;
  const bool short_slices = HAS_AMX ? rows > AMX_SLICE_MIN_ROWS : in_first_cache;
  const int64_t slice = !short_slices ? SLICE_STEPS : HAS_AMX ? AMX_SLICE_STEPS : WIDE_STEPS;
  j.num_slices = (j.num_steps + slice - 1) / slice;
  const int64_t own_bytes = j.int8 ? int8_bytes(j.shape, own_rows(a)) : copy_bytes(a) + wide_bytes(a);
  j.workspace = c.linear.get() + (j.shared ? 0 : thread * own_bytes), j.wide = j.workspace + copy_bytes(a);
  const int groups = num_row_groups(rows, panels, num_threads), columns = num_threads / groups;
  const int column = thread % columns, group = thread / columns;
  j.row_begin = rows * group / groups, j.row_end = rows * (group + 1) / groups;
  j.panel_begin = panels * column / columns, j.panel_end = panels * (column + 1) / columns;
  if constexpr (HAS_AMX) j.amx = j.int8 ? j.vnni && j.row_end - j.row_begin >= INT8_AMX_MIN_ROWS : a.dtype == PD_BF16;
  j.finish = j.int8 || j.weight_only ? pick_finish<true>(a) : pick_finish<false>(a);
  if (a.next_packed) {
    j.next = (const char *)a.next_packed + (a.next_bytes * thread / num_threads & -64);
    j.next_end = (const char *)a.next_packed + a.next_bytes * (thread + 1) / num_threads;
  }
  return j;
}

void place_rows(Job &j, int64_t row, int64_t rows) {
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

// The steps of a slice of a panel, as tiles take them.
const char *place_slice(const Job &j, int64_t p, int64_t s) {
  if (!j.widens) return j.steps(p, s);
  const int64_t num_steps = j.slice_begin(s + 1) - j.slice_begin(s);
  widen_panel(j.steps(p, s), j.a.dtype, j.a.dtype == PD_BF16 ? num_steps : (num_steps + 1) / 2, j.wide);
  return j.wide;
}

// Half of each row was written by the other threads, and may come from far: all lines at once, not row by row and step
// by step while the first panel is multiplied.
void fetch_rows(const Job &j, int64_t rows) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t at = 0; at < j.row_bytes; at += 64) __builtin_prefetch(j.rows.x + r * j.rows.stride + at);
}

// Some steps of a panel by all rows in one tile, which prefetches what lies `ahead` meanwhile.
void stream_steps(const Job &j, int rows, const char *panel, const char *ahead, int64_t begin, int64_t end,
                  float *acc) {
  TileArgs t{};
  t.x = j.rows.x + begin * 4, t.x_stride = j.rows.stride;
  t.panel = panel + j.header + begin * j.step_bytes, t.ahead = ahead, t.acc = acc;
  t.half_step = end == j.num_steps && j.row_bytes % 4, t.first = begin == 0;
  t.num_steps = end - begin - t.half_step;
  const TileFn fn = pick_stream(j.weight_only, rows);
  fn(t);
  if (rows <= TILE_ROWS) return;
  t.acc += 16, t.panel += j.step_bytes / 2, t.ahead += j.weight_only ? (end - begin) * j.step_bytes / 2 : 64;
  fn(t);
}

// A whole panel: what is behind this thread's last one is the next layer's.
void stream_panel(const Job &j, int64_t row, int rows, int64_t p, float *acc) {
  const char *panel = j.panel(p), *end = j.panel(j.panel_end), *next = j.next ? j.next : panel;
  for (int64_t s = 0; s < j.num_slices; s++) {
    const int64_t begin = j.slice_begin(s), stop = j.slice_begin(s + 1), four = 4 * j.step_bytes;
    const int64_t halves = j.weight_only ? (stop - begin) * j.step_bytes : HALF_STREAM_AHEAD;
    const char *ahead = panel + begin * j.step_bytes + (rows > TILE_ROWS ? halves : STREAM_AHEAD);
    const int64_t turn = std::clamp(begin + (end - ahead) / four * 4, begin, stop);
    if (turn > begin) stream_steps(j, rows, panel, ahead, begin, turn, acc);
    if (turn < stop) stream_steps(j, rows, panel, std::max(ahead, end) - end + next, turn, stop, acc);
  }
  j.finish(j.a, row, rows, p, acc, (const float *)panel);
}

// One slice of one panel by a block of rows. ahead: what to prefetch meanwhile.
void run_slice(const Job &j, int64_t row, int rows, int64_t p, int64_t s, float *acc, const char *ahead,
               const char *ahead_end) {
  const bool last = s + 1 == j.num_slices;
  const int height = j.int8 ? INT8_TILE_ROWS : TILE_ROWS, tiles = (rows + height - 1) / height;
  const float *scales = (const float *)j.panel(p);
  const int64_t lines = (ahead_end - ahead) / 64;
  TileArgs t{};
  t.x_stride = j.rows.stride;
  t.panel = j.first_widens() ? j.steps(p, s) : place_slice(j, p, s), t.wide = j.wide;
  t.half_step = last && !j.int8 && j.row_bytes % 4, t.first = s == 0;
  t.num_steps = j.slice_begin(s + 1) - j.slice_begin(s) - t.half_step;
  t.lines_ahead = (8 + tiles - 1) / tiles;
  for (int i = 0; i < tiles; i++) {
    const int r0 = tile_begin(j.int8, i, tiles, rows), r1 = tile_begin(j.int8, i + 1, tiles, rows);
    const char *x = j.rows.x + r0 * j.rows.stride;
    t.x = x + j.slice_begin(s) * (j.int8 ? j.shape.step_bytes : 4);
    t.heads = x + j.shape.heads + j.slice_begin(s) / GROUP_STEPS * (int64_t)sizeof(GroupHead);
    t.acc = j.num_slices > 1 ? acc + r0 * 32 : acc;  // nothing to keep: stay in L1
    t.ahead = ahead + lines * i / tiles * 64, t.ahead_end = ahead + lines * (i + 1) / tiles * 64;
    if (j.first_widens() && i == 0) pick_widening_tile(r1 - r0)(t), t.panel = j.wide;
    else (j.int8 ? pick_int8_tile(r1 - r0, j.vnni) : pick_tile(j.a.dtype, r1 - r0))(t);
    if (last) j.finish(j.a, row + r0, r1 - r0, p, t.acc, scales);
  }
}

// The same on the matrix unit, two tiles of rows at a time. acc holds each tile by itself: rows that two of them have
// are in both.
void run_amx_slice(const Job &j, int64_t row, int rows, int64_t p, int64_t s, float *acc, const char *ahead,
                   const char *ahead_end) {
  const AmxTiles tiles(rows);
  const int pairs = (tiles.count + 1) / 2;
  const int64_t lines = (ahead_end - ahead) / 64, begin = j.slice_begin(s), end = j.slice_begin(s + 1);
  AmxArgs t{};
  t.x_stride = j.rows.stride, t.height = tiles.height;
  t.panel = place_slice(j, p, s);
  t.x_bytes = (j.int8 ? end * 4 : std::min(end * 4, j.row_bytes)) - begin * 4, t.first = s == 0;  // k may be odd
  t.lines_ahead = (32 + pairs - 1) / pairs;
  for (int i = 0; i < tiles.count; i += 2) {
    const int pair = i / 2, count = i + 1 < tiles.count ? 2 : 1;
    const char *x = j.rows.x + tiles.begin(i) * j.rows.stride;
    t.x = x + begin * 4;
    t.second = (tiles.begin(i + count - 1) - tiles.begin(i)) * j.rows.stride;
    t.heads = x + j.shape.heads + begin / GROUP_STEPS * (int64_t)sizeof(GroupHead);
    t.acc = j.num_slices > 1 ? acc + i * AMX_ROWS * 32 : acc;  // nothing to keep: stay in L1
    t.ahead = ahead + lines * pair / pairs * 64, t.ahead_end = ahead + lines * (pair + 1) / pairs * 64;
    amx_tiles(t, count, j.int8);
    for (int k = i; k < i + count && s + 1 == j.num_slices; k++)
      j.finish(j.a, row + tiles.first(k), tiles.end(k) - tiles.first(k), p,
               t.acc + ((k - i) * AMX_ROWS + tiles.first(k) - tiles.begin(k)) * 32, (const float *)j.panel(p));
  }
}

void run(Job &j) {
  alignas(64) float acc[BLOCK_ROWS * 32];
  static_assert(BLOCK_ROWS % AMX_ROWS == 0);
  const int64_t rows = j.row_end - j.row_begin, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t slice_bytes = j.panel_bytes / j.num_slices / 64 * 64;
  const int prefetch_min_rows = j.amx ? AMX_PREFETCH_MIN_ROWS : j.int8 ? INT8_PREFETCH_MIN_ROWS : PREFETCH_MIN_ROWS;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t r0 = j.row_begin + rows * b / blocks, r1 = j.row_begin + rows * (b + 1) / blocks;
    j.int8 ? place_int8_rows(j, r0, r1 - r0) : place_rows(j, r0, r1 - r0);
    if (j.streams) fetch_rows(j, r1 - r0);
    if (j.amx) amx_configure(AmxTiles((int)(r1 - r0)).height);
    for (int64_t p = j.panel_begin; p < j.panel_end && j.streams; p++) stream_panel(j, r0, (int)(r1 - r0), p, acc);
    for (int64_t p = j.panel_begin; p < j.panel_end && !j.streams; p++)
      for (int64_t s = 0; s < j.num_slices; s++) {
        // the next slice, of this panel or of the one behind it; then the next block's first; then the next layer's
        const char *ahead = s + 1 < j.num_slices ? j.panel(p) + j.slice_offset(s + 1) : j.panel(p + 1),
                   *end = ahead + slice_bytes;
        if (p + 1 == j.panel_end && s + 1 == j.num_slices) {
          const bool again = b + 1 < blocks;
          ahead = again ? j.panel(j.panel_begin) : j.next;
          end = again || j.next_end - j.next > slice_bytes ? ahead + slice_bytes : j.next_end;
        }
        if (r1 - r0 < prefetch_min_rows) end = ahead;
        (j.amx ? run_amx_slice : run_slice)(j, r0, (int)(r1 - r0), p, s, acc, ahead, end);
      }
  }
  if (j.amx) amx_release();
}

}  // namespace

int64_t gemm_workspace_bytes(const pd_context &c, const pd_gemm_args &a, int num_threads) {
  if (a.quantization == PD_BLOCKS) return blocks_workspace_bytes(a, num_threads);
  if (a.quantization != PD_INT8) return num_threads * (copy_bytes(a) + wide_bytes(a));
  const Int8Row shape(a.k, c.vnni);
  return std::max(int8_bytes(shape, *a.num_rows), num_threads * int8_bytes(shape, own_rows(a)));
}

bool gemm_quantize_part(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  if (a.quantization == PD_BLOCKS) return blocks_quantize_part(c, a, thread, num_threads);
  if (a.quantization != PD_INT8 || *a.num_rows == 0 || !shares_rows(a, num_threads)) return false;
  const Job j = make_job(c, a, thread, num_threads);
  // this thread's share of its group's rows: it finds those that it wrote in its own cache
  const int64_t rows = j.row_end - j.row_begin,
                columns = num_threads / num_row_groups(*a.num_rows, ((int64_t)a.n + 31) / 32, num_threads);
  const int64_t column = thread % columns, begin = j.row_begin + rows * column / columns,
                end = j.row_begin + rows * (column + 1) / columns;
  quantize_rows(j, begin, end, j.workspace + int8_bytes(j.shape, begin));
  return true;
}

void gemm_part(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  if (*a.num_rows == 0) return;
  if (a.quantization == PD_BLOCKS) return blocks_part(c, a, thread, num_threads);
  Job job = make_job(c, a, thread, num_threads);
  run(job);
}

}  // namespace pagedec
