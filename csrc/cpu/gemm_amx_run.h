// One thread's share of a linear layer on the matrix unit.
//
// Order    row block > panel > group of tiles > part of k > two tiles. gemm_amx.h says where each stays meanwhile.
// Beside   While the unit multiplies, the vector unit makes y of the sums of the group before, some rows every few
//          lines of k, and the panel that comes next is prefetched, an equal share beside each line of k. Stores of y
//          and prefetches wait for memory: they are spread over all the time that there is.
#pragma once
#include "cpu/gemm_job.h"

namespace pagedec {
namespace {  // private to each file that includes it

// Sums that are whole: those of a group of tiles by a panel.
struct Whole {
  int at = 0, end = 0;           // rows of the block that are left
  int first_tile = 0;            // acc's
  int64_t panel = 0;
  const float *acc = nullptr;
  int rows = 0, every = 0;       // so many at once, every so many lines of k
  int wait = -1;                 // lines until the next; below 0: there is none
};

struct RowBlock {
  const Job &j;
  const int64_t row;             // the first
  const AmxTiles tiles;
  const bool again;              // another block comes after this one
  float *acc[2];                 // in turn: of the group in work and of the one before
  int turn = 0;
  int64_t done = 0, all = 0;     // of a panel: lines of k by pairs of tiles, behind and altogether
  Whole whole{};

  int pairs() const { return (tiles.count + 1) / 2; }
  int groups() const { return (tiles.count + AMX_GROUP_TILES - 1) / AMX_GROUP_TILES; }
  int group_begin(int g) const { return std::min(pairs() * g / groups() * 2, tiles.count); }
};

__attribute__((noinline)) void finish_rows(RowBlock &b, int rows) {
  Whole &w = b.whole;
  for (const int stop = std::min(w.at + rows, w.end); w.at < stop;) {
    const int tile = w.at / b.tiles.height, end = std::min(stop, b.tiles.end(tile));
    const int at = (tile - w.first_tile) * AMX_ROWS + w.at - b.tiles.begin(tile);
    b.j.finish(b.j.a, b.row + w.at, end - w.at, w.panel, w.acc + at * 32, (const float *)b.j.panel(w.panel));
    w.at = end;
  }
  w.wait = w.at < w.end ? w.every : -1;
}

// Spreads what is left over so many lines of k.
void spread(Whole &w, int64_t lines) {
  const int64_t left = w.end - w.at;
  if (left == 0) return;
  w.rows = (int)std::max<int64_t>(AMX_FINISH_ROWS, (left + lines - 1) / lines);
  w.every = (int)std::max<int64_t>(1, lines * w.rows / left);
  w.wait = w.every;
}

// Bytes from .. to of what this thread reads from panel p on: behind its last panel comes its first again, for another
// block, or the next layer.
Ahead weights_from(const RowBlock &b, int64_t p, int64_t from, int64_t to) {
  const Job &j = b.j;
  const int64_t left = (j.panel_end - p) * j.panel_bytes;
  const char *const own = j.panel(p), *const next = b.again ? j.panel(j.panel_begin) : j.next;
  const int64_t bytes = b.again ? j.panel_bytes : j.next_end - j.next;
  const auto behind = [&](int64_t at) { return next + std::clamp<int64_t>(at - left, 0, bytes); };
  return {own + std::min(from, left), own + std::min(to, left), behind(from), behind(to)};
}

// What to prefetch beside the next `lines` lines of panel p: as large a share of what lies further on.
void set_ahead(const RowBlock &b, int64_t p, int64_t lines, AmxArgs &t) {
  if (b.tiles.rows < AMX_PREFETCH_MIN_ROWS) return;
  const int64_t bytes = b.j.panel_bytes, distance = b.groups() > 1 ? bytes : std::min(bytes, AMX_AHEAD);
  const auto at = [&](int64_t done) { return distance + (bytes * done / b.all & -64); };
  t.ahead = weights_from(b, p, at(b.done), at(b.done + lines));
  t.lines_ahead = (int)((t.ahead.lines() + 2 * lines - 1) / (2 * lines));
}

// A group of tiles by a panel. acc holds each tile by itself: rows that two of them have are in both.
void run_group(RowBlock &b, int64_t p, int group) {
  const Job &j = b.j;
  const AmxTiles &tiles = b.tiles;
  const int first = b.group_begin(group), end = b.group_begin(group + 1);
  Whole &whole = b.whole;
  float *const acc = b.acc[b.turn ^= 1];
  AmxArgs t{};
  t.x_stride = j.rows.stride, t.height = tiles.height;
  spread(whole, j.num_lines() * ((end - first + 1) / 2));
  for (int64_t s = 0; s < j.num_slices; s++) {
    const int64_t begin = j.slice_begin(s), stop = j.slice_begin(s + 1);
    const int64_t lines = (stop - begin + AMX_STEPS - 1) / AMX_STEPS;
    t.panel = place_slice(j, p, s, group > 0), t.first = s == 0;
    t.x_bytes = (j.int8 ? stop * 4 : std::min(stop * 4, j.row_bytes)) - begin * 4;  // k may be odd
    for (int i = first; i < end; i += 2) {
      const int count = std::min(2, end - i);
      const char *x = j.rows.x + tiles.begin(i) * j.rows.stride;
      t.x = x + begin * 4;
      t.second = (tiles.begin(i + count - 1) - tiles.begin(i)) * j.rows.stride;
      t.heads = x + j.shape.heads + begin / GROUP_STEPS * (int64_t)sizeof(GroupHead);
      t.acc = acc + (i - first) * AMX_ROWS * 32;
      set_ahead(b, p, lines, t);
      amx_tiles(t, count, j.int8, [&]() __attribute__((always_inline)) {
        if (--whole.wait == 0) finish_rows(b, whole.rows);
      });
      b.done += lines;
    }
  }
  finish_rows(b, whole.end - whole.at);
  whole = {tiles.first(first), tiles.end(end - 1), first, p, acc};
}

// What is widened and not kept would be widened for each group again: a block is one, then.
int64_t most_rows(const Job &j) {
  if (j.widens && !j.keeps_wide()) return AMX_GROUP_TILES * AMX_ROWS;
  return amx_block_rows(j.int8 ? j.shape.bytes : j.row_bytes);
}

void run_amx(Job &j) {
  alignas(64) float acc[2][AMX_GROUP_TILES * AMX_ROWS * 32];
  const int64_t rows = j.row_end - j.row_begin, pair = 2 * AMX_ROWS, pairs = (rows + pair - 1) / pair;
  const int64_t most = most_rows(j) / pair, blocks = (pairs + most - 1) / most;
  const auto begin = [&](int64_t b) { return j.row_begin + std::min(rows, pairs * b / blocks * pair); };
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t row = begin(i), count = begin(i + 1) - row;
    place_rows(j, row, count);
    RowBlock b{j, row, AmxTiles((int)count), i + 1 < blocks, {acc[0], acc[1]}};
    b.all = j.num_lines() * b.pairs();
    amx_configure(b.tiles.height);
    for (int64_t p = j.panel_begin; p < j.panel_end; p++) {
      b.done = 0;
      for (int g = 0; g < b.groups(); g++) run_group(b, p, g);
    }
    finish_rows(b, b.whole.end - b.whole.at);
  }
  amx_release();
}

}  // namespace
}  // namespace pagedec
