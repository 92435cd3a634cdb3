// Linear layers: y = epilogue(x W^T + bias) for any number of rows, one packed weight for all of them.
//
// Bits     Every output is one chain of multiply-adds over k = 0, 1, 2, ... Tile heights, row blocks, slices of k and the number
//          of threads decide only which chains run side by side and where a chain rests in memory on its way.
// Threads  A thread owns a run of panels: its own stream from memory, k is never split. Where there are too few panels for the
//          threads and rows enough, threads split the rows as well.
// Order    row block > panel > slice of k > tile. A slice of the panel stays in L1/L2 while the tiles of the block pass it, and
//          meanwhile they prefetch the next slice, an equal share each, so that memory is never idle.
#include <cstdlib>
#include <memory>

#include "cpu/gemm_tile.h"

namespace pagedec {
namespace {

// Measured on Zen 4 (1 MB L2, 2 cores, 33-60 GB/s).
constexpr int BLOCK_ROWS = 144;          // x of a block and two slices of panel fit L2 up to k = 2048; larger blocks gain nothing
constexpr int64_t SLICE_STEPS = 1024;    // 128 KB of panel
// g groups of threads that share the rows read the weights g times. That hides behind the arithmetic from some 32 rows a group on two
// threads (measured: 64 rows as 2 x 32 are 3 % faster in a whole step, 32 as 2 x 16 6 % slower), and in proportion on more.
constexpr int ROW_SPLIT_MIN_ROWS = 16;  // of a group, for each thread there is
// While one tall tile passes a panel the hardware prefetches; doing it too costs up to 30 % below 7 rows, and from there to 12
// rows between -6 % (one thread, idle machine) and 17 % (memory shared with others). With more tiles memory would be idle from
// the second on. The 512-bit FMA kernel is never so short of memory (prefetching costs it 4-15 %).
constexpr int TALL_ROWS = TILE_ROWS + 2;  // up to here the first tile is as tall as can be: 16 rows are 14 + 2, 5 % faster than 8 + 8
constexpr int PREFETCH_MIN_ROWS = PD_LEVEL == 3 ? TALL_ROWS + 1 : PD_LEVEL == 2 ? INT32_MAX : 7;

// Where tile i of a block begins: equal heights, but where hardware prefetching makes one tall tile better.
int tile_begin(int i, int tiles, int rows) {
  if (PD_LEVEL == 3 && tiles == 2 && rows <= TALL_ROWS) return i == 0 ? 0 : i == 1 ? TILE_ROWS : rows;
  return rows * i / tiles;
}

// acc [rows][32] of panel p becomes rows row, row + 1, ... of y.
template <int EPILOGUE, int Y_DTYPE>
void finish(const pd_gemm_args &a, int64_t row, int rows, int64_t p, const float *acc) {
  constexpr bool gated = EPILOGUE == PD_SILU_MUL || EPILOGUE == PD_GELU_MUL;
  const int64_t width = gated ? a.n / 2 : a.n, column = gated ? p * 16 : p * 32;
  const int left = width - column < 32 ? (int)(width - column) : 32;
  F16 bias[2] = {zero16(), zero16()};
  for (int j = 0; a.bias && j < 2; j++)
    bias[j] = gated ? load16(a.bias + p * 32 + j * 16) : load16_part(a.bias + column + j * 16, left > j * 16 ? left - j * 16 : 0);
  for (int i = 0; i < rows; i++) {
    F16 r[2] = {load16(acc + i * 32), load16(acc + i * 32 + 16)};
    if (a.bias) r[0] = add16(r[0], bias[0]), r[1] = add16(r[1], bias[1]);
    if constexpr (gated) r[0] = mul16(EPILOGUE == PD_SILU_MUL ? silu16(r[0]) : gelu16(r[0]), r[1]);
    if constexpr (EPILOGUE == PD_GELU) r[0] = gelu16(r[0]), r[1] = gelu16(r[1]);
    const int64_t at = (row + i) * width + column;
    for (int j = 0; j < (gated ? 1 : 2) && left > j * 16; j++) {
      float *y = (float *)a.y + at + j * 16;
      if constexpr (EPILOGUE == PD_ADD) r[j] = add16(load16_part(y, left - j * 16), r[j]);
      if constexpr (Y_DTYPE == PD_F32) store16_part(y, r[j], left - j * 16);
      else store16_bf16((uint16_t *)a.y + at + j * 16, r[j], left - j * 16);
    }
  }
}

using FinishFn = void (*)(const pd_gemm_args &, int64_t, int, int64_t, const float *);
FinishFn pick_finish(const pd_gemm_args &a) {
  static constexpr FinishFn fn[5][2] = {{finish<PD_STORE, PD_F32>, finish<PD_STORE, PD_BF16>},
                                        {finish<PD_ADD, PD_F32>, nullptr},
                                        {finish<PD_SILU_MUL, PD_F32>, finish<PD_SILU_MUL, PD_BF16>},
                                        {finish<PD_GELU_MUL, PD_F32>, finish<PD_GELU_MUL, PD_BF16>},
                                        {finish<PD_GELU, PD_F32>, finish<PD_GELU, PD_BF16>}};
  return fn[a.epilogue][a.y_dtype];
}

struct Job {
  const pd_gemm_args &a;
  int64_t row_bytes = 0, num_steps = 0, num_slices = 0, panel_bytes = 0;  // a step is a word of x and 128 bytes of a panel
  int64_t row_begin = 0, row_end = 0, panel_begin = 0, panel_end = 0;     // this thread's share
  FinishFn finish = nullptr;
  const char *next = nullptr, *next_end = nullptr;  // what this thread will read in the following layer, or NULL
  const char *x = nullptr;                          // of the row block in work: a.x itself, or a copy
  int64_t x_stride = 0;

  int64_t slice_begin(int64_t s) const { return num_steps * s / num_slices; }
  const char *panel(int64_t p) const { return (const char *)a.packed + p * panel_bytes; }
};

// Into how many groups the threads split the rows; each group's threads split the panels. As many as the weights may be read: a thread
// then finds in its own cache the rows that it wrote in the kernel before, where half of each row would come from another core.
int num_row_groups(int64_t rows, int64_t panels, int num_threads) {
  int best = 1;
  int64_t best_cost = rows * ((panels + num_threads - 1) / num_threads);
  for (int g = 2; g <= num_threads && rows / g >= (int64_t)ROW_SPLIT_MIN_ROWS * num_threads; g++) {
    const int64_t columns = num_threads / g, cost = (rows + g - 1) / g * ((panels + columns - 1) / columns);
    if (num_threads % g == 0 && cost <= best_cost) best_cost = cost, best = g;
  }
  return best;
}

Job make_job(const pd_gemm_args &a, int thread, int num_threads) {
  const int64_t rows = *a.num_rows, panels = ((int64_t)a.n + 31) / 32;
  Job j{a};
  j.row_bytes = (int64_t)a.k * (a.dtype == PD_BF16 ? 2 : 4);
  j.num_steps = (j.row_bytes + 3) / 4, j.num_slices = (j.num_steps + SLICE_STEPS - 1) / SLICE_STEPS;
  j.panel_bytes = j.num_steps * 128;
  const int groups = num_row_groups(rows, panels, num_threads), columns = num_threads / groups;
  const int column = thread % columns, group = thread / columns;
  j.row_begin = rows * group / groups, j.row_end = rows * (group + 1) / groups;
  j.panel_begin = panels * column / columns, j.panel_end = panels * (column + 1) / columns;
  j.finish = pick_finish(a);
  if (a.next_packed) {
    j.next = (const char *)a.next_packed + (a.next_bytes * thread / num_threads & -64);
    j.next_end = (const char *)a.next_packed + a.next_bytes * (thread + 1) / num_threads;
  }
  return j;
}

// Rows a multiple of 4 KB apart fall into one set of an 8-way L1, which cannot hold a tall tile's. A block of such rows is copied,
// each row a line further than it was (measured, k = 4096 and 14336: 1.16-1.2 times faster at 12 and 24 rows, 1.07 at 144).
constexpr int64_t L1_SET_PERIOD = 4096;
constexpr int COPY_MIN_ROWS = TILE_ROWS > 8 ? 10 : INT32_MAX, COPY_MIN_PANELS = 8;  // below these the copy costs more than it saves

void place_rows(Job &j, int64_t row, int64_t rows) {
  struct Free {
    void operator()(char *p) const { free(p); }
  };
  static thread_local std::unique_ptr<char, Free> scratch;
  static thread_local int64_t scratch_bytes = 0;
  const int64_t row_bytes = j.row_bytes;
  j.x = (const char *)j.a.x + row * row_bytes, j.x_stride = row_bytes;
  if (row_bytes % L1_SET_PERIOD || rows < COPY_MIN_ROWS || j.panel_end - j.panel_begin < COPY_MIN_PANELS) return;
  const int64_t stride = row_bytes + 64;
  if (rows * stride > scratch_bytes) {
    scratch.reset((char *)aligned_alloc(64, rows * stride));
    scratch_bytes = scratch ? rows * stride : 0;
    if (!scratch) return;  // only slower
  }
  for (int64_t i = 0; i < rows; i++) memcpy(scratch.get() + i * stride, j.x + i * row_bytes, row_bytes);
  j.x = scratch.get(), j.x_stride = stride;
}

// One slice of one panel by a block of rows. ahead: what to prefetch meanwhile.
void run_slice(const Job &j, int64_t row, int rows, int64_t p, int64_t s, float *acc, const char *ahead, const char *ahead_end) {
  const bool last = s + 1 == j.num_slices;
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t lines = (ahead_end - ahead) / 64;
  TileArgs t{};
  t.x_stride = j.x_stride;
  t.panel = j.panel(p) + j.slice_begin(s) * 128;
  t.half_step = last && j.row_bytes % 4, t.first = s == 0;
  t.num_steps = j.slice_begin(s + 1) - j.slice_begin(s) - t.half_step;
  t.lines_ahead = (8 + tiles - 1) / tiles;
  for (int i = 0; i < tiles; i++) {
    const int r0 = tile_begin(i, tiles, rows), r1 = tile_begin(i + 1, tiles, rows);
    t.x = j.x + r0 * j.x_stride + j.slice_begin(s) * 4;
    t.acc = j.num_slices > 1 ? acc + r0 * 32 : acc;  // nothing to keep: stay in L1
    t.ahead = ahead + lines * i / tiles * 64, t.ahead_end = ahead + lines * (i + 1) / tiles * 64;
    pick_tile(j.a.dtype, r1 - r0)(t);
    if (last) j.finish(j.a, row + r0, r1 - r0, p, t.acc);
  }
}

void run(Job &j) {
  alignas(64) float acc[BLOCK_ROWS * 32];
  const int64_t rows = j.row_end - j.row_begin, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t slice_bytes = j.num_steps / j.num_slices * 128;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t r0 = j.row_begin + rows * b / blocks, r1 = j.row_begin + rows * (b + 1) / blocks;
    place_rows(j, r0, r1 - r0);
    for (int64_t p = j.panel_begin; p < j.panel_end; p++)
      for (int64_t s = 0; s < j.num_slices; s++) {
        // the next slice, of this panel or of the one behind it; then the next block's first; then the next layer's
        const char *ahead = j.panel(p) + j.slice_begin(s + 1) * 128, *end = ahead + slice_bytes;
        if (p + 1 == j.panel_end && s + 1 == j.num_slices) {
          const bool again = b + 1 < blocks;
          ahead = again ? j.panel(j.panel_begin) : j.next;
          end = again || j.next_end - j.next > slice_bytes ? ahead + slice_bytes : j.next_end;
        }
        if (r1 - r0 < PREFETCH_MIN_ROWS) end = ahead;
        run_slice(j, r0, (int)(r1 - r0), p, s, acc, ahead, end);
      }
  }
}

}  // namespace

int check_gemm(const pd_gemm_args &a) {
  if (!a.num_rows) return fail("pd_gemm: num_rows is NULL");
  const int rows = *a.num_rows;
  if (rows < 0) return fail("pd_gemm: num_rows is %d; it must be 0 or more", rows);
  if (a.n < 1) return fail("pd_gemm: n is %d; it must be 1 or more", a.n);
  if (a.k < 1) return fail("pd_gemm: k is %d; it must be 1 or more", a.k);
  if (a.dtype != PD_F32 && a.dtype != PD_BF16) return fail("pd_gemm: dtype is %d; it must be 0 (fp32) or 1 (bf16)", a.dtype);
  if (a.y_dtype != PD_F32 && a.y_dtype != PD_BF16) return fail("pd_gemm: y_dtype is %d; it must be 0 (fp32) or 1 (bf16)", a.y_dtype);
  if (a.epilogue < PD_STORE || a.epilogue > PD_GELU)
    return fail("pd_gemm: epilogue is %d; it must be %d to %d", a.epilogue, PD_STORE, PD_GELU);
  if (a.epilogue == PD_ADD && a.y_dtype != PD_F32) return fail("pd_gemm: y_dtype is %d; with PD_ADD it must be 0 (fp32)", a.y_dtype);
  if ((a.epilogue == PD_SILU_MUL || a.epilogue == PD_GELU_MUL) && a.n % 2) return fail("pd_gemm: n is %d; with gate and up rows it must be even", a.n);
  if (a.reserved) return fail("pd_gemm: reserved is %d; it must be 0", a.reserved);
  if (!a.packed) return fail("pd_gemm: packed is NULL");
  if ((uintptr_t)a.packed % 64) return fail("pd_gemm: packed is at %p; it must be 64-byte aligned", a.packed);
  if (a.next_bytes < 0) return fail("pd_gemm: next_bytes is %lld; it must be 0 or more", (long long)a.next_bytes);
  if (rows && !a.x) return fail("pd_gemm: x is NULL with %d rows", rows);
  if (rows && !a.y) return fail("pd_gemm: y is NULL with %d rows", rows);
  return 0;
}

void gemm_part(const pd_gemm_args &a, int thread, int num_threads) {
  if (*a.num_rows == 0) return;
  Job job = make_job(a, thread, num_threads);
  run(job);
}

}  // namespace pagedec
