// Linear layers with weights in blocks: threads, order and slices as in gemm.cpp, with segments of several formats.
#include "cpu/gemm_blocks_amx.h"

#include <algorithm>

#include "common/context.h"
#include "cpu/gemm_finish.h"
#include "cpu/gemm_shares.h"

namespace pagedec {
namespace {

constexpr int64_t SLICE_VALUES = 4096;   // of k: 72 to 136 KB of panel
// While one tile passes a panel, what lies so many bytes further on is fetched: measured on Zen 5 (one core, 37 GB/s),
// one row of 4 bits reads 34 GB/s so and 21 to 28 without: the processor sees fewer lines ahead, since
// each takes more instructions than one of bf16. Fetching the next slice into L2, as below, gives 30.
constexpr int64_t NEAR = 8192;

struct Job {
  const pd_gemm_args &a;
  Segments segments;
  bool vnni, shared, amx;
  int64_t x_stride, num_slices;
  int64_t row_begin, row_end, panel_begin, panel_end;  // this thread's share
  FinishFn finish;
  char *workspace;               // this thread's rows of x in int8, or all of them
  const char *next, *next_end;   // what this thread will read in the following layer, or NULL

  int64_t slice_begin(int64_t s) const {  // in values: a block of any format begins there
    return s < num_slices ? a.k * s / num_slices / LONGEST_BLOCK * LONGEST_BLOCK : a.k;
  }
};

int64_t stride_of(int64_t k) { return stride_past_period((k / X_GROUP * X_BYTES + 63) & -64); }

// Of a panel's 256 values by so many rows: what memory, or multiplying, takes; in bytes that memory gives meanwhile.
int64_t cost_of(const BlockShape &shape, int64_t rows) {
  const int64_t bytes = shape.panel_bytes(LONGEST_BLOCK);
  const int64_t row = shape.kind == BlockKind::SIX ? 1020 : shape.kind == BlockKind::NIBBLES_MIN ? 840 : 770;
  return std::max(bytes, rows * row);
}
// Where part i of so many begins, of equal cost.
int64_t panel_of_part(const Segments &segments, int64_t rows, int64_t i, int64_t parts) {
  int64_t total = 0;
  for (int s = 0; s < segments.count; s++)
    total += (segments.one[s].end - segments.one[s].begin) * cost_of(segments.one[s].shape, rows);
  int64_t left = total * i / parts;
  for (int s = 0; s < segments.count; s++) {
    const Segments::One &one = segments.one[s];
    const int64_t cost = cost_of(one.shape, rows), panels = one.end - one.begin;
    if (left < panels * cost) return one.begin + left / cost;
    left -= panels * cost;
  }
  return segments.one[segments.count - 1].end;
}

Share share_of(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  const int64_t rows = *a.num_rows, panels = ((int64_t)a.n + 31) / 32;
  const int groups = num_row_groups(rows, panels, num_threads), columns = num_threads / groups;
  const int column = thread % columns, group = thread / columns;
  const Segments segments(a.packed, a.segments, a.num_segments, a.n, a.k);
  Share s{};
  s.row_begin = rows * group / groups, s.row_end = rows * (group + 1) / groups;
  s.panel_begin = panel_of_part(segments, rows, column, columns);
  s.panel_end = panel_of_part(segments, rows, column + 1, columns);
  s.quantized = shares_rows(a, num_threads);
  s.workspace = c.linear.get() + (s.quantized ? 0 : thread * blocks_own_bytes(a));
  set_next(s, a, thread, num_threads);
  return s;
}

Job make_job(const pd_context &c, const pd_gemm_args &a, const Share &s) {
  const Segments segments(a.packed, a.segments, a.num_segments, a.n, a.k);
  const bool amx = HAS_AMX && c.vnni && s.row_end - s.row_begin >= BLOCK_AMX_MIN_ROWS;
  const int64_t slice = amx ? BLOCK_AMX_SLICE_VALUES : SLICE_VALUES;
  return {a, segments, c.vnni, s.quantized, amx, stride_of(a.k), ((int64_t)a.k + slice - 1) / slice, s.row_begin,
          s.row_end, s.panel_begin, s.panel_end, pick_finish<false>(a), s.workspace, s.next, s.next_end};
}

// Rows begin .. end of x, one behind the other.
void quantize_rows(const Job &j, int64_t begin, int64_t end, char *to) {
  const int64_t row_bytes = (int64_t)j.a.k * (j.a.dtype == PD_BF16 ? 2 : 4);
  for (int64_t r = begin; r < end; r++, to += j.x_stride)
    quantize_groups((const char *)j.a.x + r * row_bytes, j.a.dtype, j.a.k, (XGroup *)to);
}

BlockTileFn pick_tile(const BlockShape &shape, int rows, bool vnni) {
  switch (shape.kind) {
    case BlockKind::NIBBLES: return pick_block_tile<BlockKind::NIBBLES>(rows, vnni);
    case BlockKind::NIBBLES_MIN: return pick_block_tile<BlockKind::NIBBLES_MIN>(rows, vnni);
    case BlockKind::SIX: return pick_block_tile<BlockKind::SIX>(rows, vnni);
    case BlockKind::E2M1: return pick_block_tile<BlockKind::E2M1>(rows, vnni);
    default: return pick_block_tile<BlockKind::BYTES>(rows, vnni);
  }
}

// A slice of a panel: its first byte, and the one behind it.
struct Slice {
  const char *begin, *end;
};
Slice slice_of(const Job &j, int64_t p, int64_t s) {
  const Segments::One &one = j.segments.of(p);
  const char *panel = one.base + (p - one.begin) * one.panel_bytes;
  return {panel + one.shape.panel_bytes(j.slice_begin(s)), panel + one.shape.panel_bytes(j.slice_begin(s + 1))};
}

// What follows at a short distance, wherever that is; behind this thread's last slice the next layer's.
Ahead near_ahead(const Job &j, int64_t p, int64_t s) {
  const Slice own = slice_of(j, p, s);
  if (p + 1 < j.panel_end || s + 1 < j.num_slices) return {own.begin + NEAR, own.end + NEAR, nullptr, nullptr, true};
  return {std::min(own.begin + NEAR, own.end), own.end, j.next, j.next + std::min(j.next_end - j.next, NEAR), true};
}
// The next slice, of this panel or of the one behind it; then the next block's first; then the next layer's.
Ahead slice_ahead(const Job &j, int64_t p, int64_t s, bool again) {
  const Slice own = slice_of(j, p, s);
  if (p + 1 == j.panel_end && s + 1 == j.num_slices && !again)
    return {j.next, j.next + std::min(j.next_end - j.next, own.end - own.begin)};
  const int64_t following = p + 1 < j.panel_end ? p + 1 : j.panel_begin;
  const Slice ahead = s + 1 < j.num_slices ? slice_of(j, p, s + 1) : slice_of(j, following, 0);
  return {ahead.begin, ahead.end};
}

// One slice of one panel by a block of rows, x being theirs. ahead: what to prefetch meanwhile, each tile its share.
void run_slice(const Job &j, const char *x, int64_t row, int rows, int64_t p, int64_t s, float *acc,
               const Ahead &ahead) {
  const BlockShape shape = j.segments.of(p).shape;
  const int tiles = (rows + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
  const int64_t lines = ahead.lines(), values = j.slice_begin(s + 1) - j.slice_begin(s);
  const int64_t groups = values / X_GROUP * tiles;
  BlockTileArgs t{};
  t.x_stride = j.x_stride;
  t.panel = slice_of(j, p, s).begin;
  t.num_units = values / shape.values, t.groups = shape.groups(), t.has_scales = shape.has_scales;
  t.first = s == 0;
  t.lines_ahead = (int)((lines + groups - 1) / groups);
  for (int i = 0; i < tiles; i++) {
    const int r0 = rows * i / tiles, r1 = rows * (i + 1) / tiles;
    t.x = x + r0 * j.x_stride + j.slice_begin(s) / X_GROUP * X_BYTES;
    t.acc = j.num_slices > 1 ? acc + r0 * 32 : acc;  // nothing to keep: stay in L1
    t.ahead = ahead;
    if (tiles > 1) t.ahead = {ahead.at + lines * i / tiles * 64, ahead.at + lines * (i + 1) / tiles * 64};
    pick_tile(shape, r1 - r0, j.vnni)(t);
    if (s + 1 == j.num_slices) j.finish(j.a, row + r0, r1 - r0, p, t.acc, nullptr);
  }
}

// The same on the matrix unit, two tiles of rows at a time. acc holds each tile by itself: rows that two of them have
// are in both.
void run_amx_slice(const Job &j, const char *x, int64_t row, int rows, int64_t p, int64_t s, float *acc,
                   const Ahead &ahead) {
  alignas(64) char bytes[AMX_BYTES];
  const BlockShape shape = j.segments.of(p).shape;
  const AmxTiles tiles(rows);
  const int pairs = (tiles.count + 1) / 2;
  const int64_t lines = ahead.lines(), values = j.slice_begin(s + 1) - j.slice_begin(s);
  const int64_t groups = values / X_GROUP * pairs;
  AmxBlockArgs t{};
  t.x_stride = j.x_stride, t.height = tiles.height;
  t.panel = slice_of(j, p, s).begin, t.bytes = bytes;
  t.num_units = values / shape.values, t.groups = shape.groups(), t.has_scales = shape.has_scales;
  t.first = s == 0;
  t.lines_ahead = (int)((lines + groups - 1) / groups);
  unpack(shape, t.panel, t.num_units, bytes);
  for (int i = 0; i < tiles.count; i += 2) {
    const int count = std::min(2, tiles.count - i), pair = i / 2;
    t.x = x + tiles.begin(i) * j.x_stride + j.slice_begin(s) / X_GROUP * X_BYTES;
    t.second = (tiles.begin(i + count - 1) - tiles.begin(i)) * j.x_stride;
    t.acc = acc + i * AMX_ROWS * 32;
    t.ahead = {ahead.at + lines * pair / pairs * 64, ahead.at + lines * (pair + 1) / pairs * 64};
    amx_blocks(shape.kind, t, count);
    for (int k = i; k < i + count && s + 1 == j.num_slices; k++)
      j.finish(j.a, row + tiles.first(k), tiles.end(k) - tiles.first(k), p,
               acc + (k * AMX_ROWS + tiles.first(k) - tiles.begin(k)) * 32, nullptr);
  }
}

void run(const Job &j) {
  alignas(64) float acc[BLOCK_ROWS * 32];
  static_assert(BLOCK_ROWS % AMX_ROWS == 0);
  const int64_t rows = j.row_end - j.row_begin, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t r0 = j.row_begin + rows * b / blocks, r1 = j.row_begin + rows * (b + 1) / blocks;
    if (!j.shared) quantize_rows(j, r0, r1, j.workspace);
    const char *x = j.workspace + (j.shared ? r0 * j.x_stride : 0);
    for (int64_t p = j.panel_begin; p < j.panel_end; p++) {
      if (j.amx) amx_configure(AmxTiles((int)(r1 - r0)).height, amx_words(j.segments.of(p).shape.kind));
      for (int64_t s = 0; s < j.num_slices; s++) {
        const Ahead ahead = r1 - r0 <= BLOCK_TILE_ROWS ? near_ahead(j, p, s) : slice_ahead(j, p, s, b + 1 < blocks);
        if constexpr (HAS_AMX)
          if (j.amx) {
            run_amx_slice(j, x, r0, (int)(r1 - r0), p, s, acc, ahead);
            continue;
          }
        run_slice(j, x, r0, (int)(r1 - r0), p, s, acc, ahead);
      }
    }
  }
  if (j.amx) amx_release();
}

}  // namespace

int64_t blocks_own_bytes(const pd_gemm_args &a) { return own_rows(a) * stride_of(a.k); }

int64_t blocks_workspace_bytes(const pd_gemm_args &a, int num_threads) {
  return std::max(stride_of(a.k) * (int64_t)*a.num_rows, num_threads * blocks_own_bytes(a));
}

bool blocks_quantize_part(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  if (*a.num_rows == 0 || !shares_rows(a, num_threads)) return false;
  const Job j = make_job(c, a, share_of(c, a, thread, num_threads));
  // this thread's share of its group's rows: it finds those that it wrote in its own cache
  const int64_t rows = j.row_end - j.row_begin,
                columns = num_threads / num_row_groups(*a.num_rows, ((int64_t)a.n + 31) / 32, num_threads);
  const int64_t column = thread % columns, begin = j.row_begin + rows * column / columns,
                end = j.row_begin + rows * (column + 1) / columns;
  quantize_rows(j, begin, end, j.workspace + begin * j.x_stride);
  return true;
}

void blocks_part(const pd_context &c, const pd_gemm_args &a, int thread, int num_threads) {
  blocks_share(c, a, share_of(c, a, thread, num_threads));
}

void blocks_share(const pd_context &c, const pd_gemm_args &a, const Share &share) { run(make_job(c, a, share)); }

}  // namespace pagedec
