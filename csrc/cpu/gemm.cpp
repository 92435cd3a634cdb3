// Linear layers: y = epilogue(x W^T + bias) for any number of rows, one packed weight for all of them.
//
// Bits     Every output is one chain of multiply-adds over k = 0, 1, 2, ... (on the matrix unit of lines of k:
//          gemm_amx.h). Tile heights, row blocks, slices of k and the number of threads decide only which chains run
//          side by side and where a chain rests in memory on its way.
// Threads  A thread owns a run of panels: its own stream from memory, k is never split. Where there are too few panels
//          for the threads and rows enough, threads split the rows as well.
// Order    row block > panel > slice of k > tile. A slice of the panel stays in L1/L2 while the tiles of the block pass
//          it, and meanwhile they prefetch the next slice, an equal share each, so that memory is never idle. Few rows
//          of bf16 are one tile, which prefetches as it goes. On the matrix unit: gemm_amx_run.h. Where bf16 are not
//          multiplied, rows of them become fp32 first (gemm_pairs.h).
#include <algorithm>

#include "cpu/gemm_amx_run.h"
#include "cpu/gemm_blocks.h"
#include "cpu/gemm_job.h"

namespace pagedec {
namespace {

// Measured on Zen 4 (1 MB L2, 2 cores, 33-60 GB/s).
// While one tall tile passes a panel the hardware prefetches; doing it too costs up to 30 % below 7 rows, and from
// there to 12 rows between -6 % (one thread, idle machine) and 17 % (memory shared with others). With more tiles memory
// would be idle from the second on. The 512-bit FMA kernel is never so short of memory (prefetching costs it 4-15 %).
// On AVX2 (measured on Zen 3) it gains 2 to 10 % up to 3 rows, and a third at 4 to 6.
// fp32: up to here the first tile is as tall as can be (in bf16, before that streamed, 14 + 2 beat 8 + 8 by 5 %)
constexpr int TALL_ROWS = TILE_ROWS + 2;
constexpr int PREFETCH_MIN_ROWS =
    PD_LEVEL == 1 ? 1 : PD_LEVEL == 2 ? INT32_MAX : PD_LEVEL == 3 ? TALL_ROWS + 1 : 7;
// Up to 16 rows of bf16 are one tile (two of half a panel from 15 on), which prefetches its panels by so many bytes:
// 2 KB are worse than none, 4 KB up to 5 % worse. Measured with weights in huge pages: 8, 12 and 16 rows gain 22, 17
// and 17 %; in small ones, where each prefetch walks the page table, they lose 3, 1 and 7 %.
constexpr int64_t STREAM_AHEAD = 8192, HALF_STREAM_AHEAD = 16384;
constexpr int INT8_PREFETCH_MIN_ROWS = PD_LEVEL == 1 ? 1 : 7;
// Where tile i of a block begins: equal heights, but where hardware prefetching makes one tall tile better.
int tile_begin(bool int8, int i, int tiles, int rows) {
  if (!int8 && PD_LEVEL == 3 && tiles == 2 && rows <= TALL_ROWS) return i == 0 ? 0 : i == 1 ? TILE_ROWS : rows;
  return rows * i / tiles;
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
  t.scales = (const float *)panel, t.begin = begin;
  const TileFn fn = pick_stream(j.bytes, rows);
  fn(t);
  if (rows <= TILE_ROWS) return;
  t.acc += 16, t.panel += j.step_bytes / 2, t.scales += 16;
  t.ahead += j.bytes != WORDS ? (end - begin) * j.step_bytes / 2 : 64;
  fn(t);
}

// A whole panel: what is behind this thread's last one is the next layer's.
void stream_panel(const Job &j, int64_t row, int rows, int64_t p, float *acc) {
  const char *panel = j.panel(p), *end = j.panel(j.panel_end), *next = j.next ? j.next : panel;
  for (int64_t s = 0; s < j.num_slices; s++) {
    const int64_t begin = j.slice_begin(s), stop = j.slice_begin(s + 1), four = 4 * j.step_bytes;
    const int64_t halves = j.bytes != WORDS ? (stop - begin) * j.step_bytes : HALF_STREAM_AHEAD;
    const char *ahead = panel + begin * j.step_bytes + (rows > TILE_ROWS ? halves : STREAM_AHEAD);
    const int64_t turn = std::clamp(begin + (end - ahead) / four * 4, begin, stop);
    if (turn > begin) stream_steps(j, rows, panel, ahead, begin, turn, acc);
    if (turn < stop) stream_steps(j, rows, panel, std::max(ahead, end) - end + next, turn, stop, acc);
  }
  j.finish(j.a, row, rows, p, acc, (const float *)panel);
}

TileFn pick_tile_of(const Job &j, int rows) {
  if (j.int8) return pick_int8_tile(rows, j.vnni);
  return j.as_floats ? pick_tile_of_pairs(j.widens ? WORDS : j.bytes, rows) : pick_tile(j.a.dtype, rows);
}

// One slice of one panel by a block of rows. ahead: what to prefetch meanwhile.
void run_slice(const Job &j, int64_t row, int rows, int64_t p, int64_t s, float *acc, const char *ahead,
               const char *ahead_end) {
  const bool last = s + 1 == j.num_slices;
  const int height = j.tile_rows(), tiles = (rows + height - 1) / height;
  const float *scales = (const float *)j.panel(p);
  const int64_t lines = (ahead_end - ahead) / 64;
  const int64_t lines_read = (j.as_floats && !j.widens ? j.step_bytes : 128) * 4 / 64;  // in four steps
  TileArgs t{};
  t.x_stride = j.rows.stride;
  t.panel = j.first_widens() ? j.steps(p, s) : place_slice(j, p, s), t.wide = j.wide;
  t.scales = scales, t.begin = j.slice_begin(s);
  t.half_step = last && !j.int8 && j.row_bytes % 4, t.first = s == 0;
  t.num_steps = j.slice_begin(s + 1) - j.slice_begin(s) - t.half_step;
  for (int i = 0; i < tiles; i++) {
    const int r0 = tile_begin(j.int8, i, tiles, rows), r1 = tile_begin(j.int8, i + 1, tiles, rows);
    const char *x = j.rows.x + r0 * j.rows.stride;
    const int64_t passes = tiles * num_passes(r1 - r0);
    t.lines_ahead = (int)((lines_read + passes - 1) / passes);
    t.x = x + j.slice_begin(s) * j.x_step_bytes;
    t.heads = x + j.shape.heads + j.slice_begin(s) / GROUP_STEPS * (int64_t)sizeof(GroupHead);
    t.acc = j.num_slices > 1 ? acc + r0 * 32 : acc;  // nothing to keep: stay in L1
    t.ahead = ahead + lines * i / tiles * 64, t.ahead_end = ahead + lines * (i + 1) / tiles * 64;
    if (j.first_widens() && i == 0) pick_widening_tile(j.bytes, r1 - r0)(t), t.panel = j.wide;
    else pick_tile_of(j, r1 - r0)(t);
    if (last) j.finish(j.a, row + r0, r1 - r0, p, t.acc, scales);
  }
}

void run(Job &j) {
  alignas(64) float acc[BLOCK_ROWS * 32];
  const int64_t rows = j.row_end - j.row_begin, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t slice_bytes = j.panel_bytes / j.num_slices / 64 * 64;
  const int prefetch_min_rows = j.int8 ? INT8_PREFETCH_MIN_ROWS : PREFETCH_MIN_ROWS;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t r0 = j.row_begin + rows * b / blocks, r1 = j.row_begin + rows * (b + 1) / blocks;
    place_rows(j, r0, r1 - r0);
    if (j.streams) fetch_rows(j, r1 - r0);
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
        run_slice(j, r0, (int)(r1 - r0), p, s, acc, ahead, end);
      }
  }
}

void carry_out(Job job) {
  if (HAS_AMX && job.amx) run_amx(job);
  else run(job);
}

}  // namespace

int64_t gemm_workspace_bytes(const pd_context &c, const pd_gemm_args &a, int num_threads) {
  if (a.quantization == PD_BLOCKS) return blocks_workspace_bytes(a, num_threads);
  if (a.quantization != PD_INT8) return num_threads * own_bytes(c, a);
  return std::max(int8_bytes(Int8Row(a.k, c.vnni), *a.num_rows), num_threads * own_bytes(c, a));
}

bool gemm_quantize_part(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  if (a.quantization == PD_BLOCKS) return blocks_quantize_part(c, a, thread, num_threads);
  if (a.quantization != PD_INT8 || *a.num_rows == 0 || !shares_rows(a, num_threads)) return false;
  const Job j = make_job(c, a, share_of(c, a, thread, num_threads));
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
  if (a.quantization == PD_BLOCKS) {
    blocks_part(c, a, thread, num_threads);
  } else {
    carry_out(make_job(c, a, share_of(c, a, thread, num_threads)));
  }
  if (goes_past_caches(a)) fence_past_caches();
}

int64_t experts_workspace_bytes(const pd_context &c, const pd_experts_args &a, int num_threads) {
  return num_threads * (a.gemm.quantization == PD_BLOCKS ? blocks_own_bytes(a.gemm) : own_bytes(c, a.gemm));
}

void experts_part(const pd_context &c, const pd_experts_args &a, int thread, int num_threads) {
  const pd_gemm_args &g = a.gemm;
  if (*g.num_rows == 0) return;
  const bool blocks = g.quantization == PD_BLOCKS;
  const int64_t workspace = thread * (experts_workspace_bytes(c, a, num_threads) / num_threads);
  each_own_expert(a, thread, num_threads, [&](const pd_gemm_args &one, int64_t begin, int64_t end, const char *next) {
    Share s{0, *one.num_rows, begin, end, false, c.linear.get() + workspace, next, next ? next + a.expert_bytes : next};
    if (!next) set_next(s, g, thread, num_threads);
    if (blocks) blocks_share(c, one, s);
    else carry_out(make_job(c, one, s));
  });
  if (goes_past_caches(g)) fence_past_caches();
}

}  // namespace pagedec
