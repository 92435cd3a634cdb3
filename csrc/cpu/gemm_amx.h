// The matrix unit (AMX): a tile register holds 16 rows of 64 bytes, and one instruction multiplies 16 rows of x, a
// cache line of k each, by 16 outputs. A panel is already what it takes: 16 steps are 16 rows for the first half of the
// outputs and, 64 bytes on, 16 for the second, 128 bytes apart.
//
// Bits     Of a row of x and an output the unit adds up a line's even and its odd products in order, both sums to each
//          other, and that to what was there (Intel's manual, TDPBF16PS), whatever the other rows are: one row alone,
//          and any number, alike. Bytes are summed exactly, so int8 gives what gemm_int8.h gives.
// Threads  Tiles are configured, and released, inside a kernel: nothing of them is left to others.
#pragma once
#include <algorithm>

#include "cpu/amx.h"
#include "cpu/amx_tuning.h"
#include "cpu/gemm_int8.h"

namespace pagedec {

constexpr int AMX_STEPS = 16;            // of a line
constexpr int64_t AMX_LINE = 64;         // bytes of each row
constexpr int64_t AMX_PANEL = AMX_STEPS * 128;

// A block's rows in tiles of equal height; the last reaches back over rows of the one before, so that nothing behind x
// is read.
struct AmxTiles {
  int rows, count, height;
  explicit AmxTiles(int rows)
      : rows(rows), count((rows + AMX_ROWS - 1) / AMX_ROWS), height((rows + count - 1) / count) {}
  int begin(int i) const { return i + 1 < count ? i * height : rows - height; }
  int first(int i) const { return i * height; }  // the first that no tile before has
  int end(int i) const { return i + 1 < count ? (i + 1) * height : rows; }
};

// Rows of a block, whose x stays in L2 beside two panels.
inline int64_t amx_block_rows(int64_t row_bytes) {
  constexpr int64_t group = AMX_GROUP_TILES * AMX_ROWS, pair = 2 * AMX_ROWS;
  return std::max(group, (AMX_L2_BYTES / row_bytes - 64) / pair * pair);
}

struct AmxArgs {
  const char *x;            // first line of the first row
  int64_t x_stride;         // bytes from row to row
  int64_t second;           // bytes from a tile's x to that of the next
  int height;
  const char *panel;
  int64_t x_bytes;          // of each row; not only whole lines, where k ends
  bool first;               // sums start at zero, not at what acc holds
  float *acc;               // [tiles][16][32], 64-byte aligned
  const char *heads;        // int8 only: the first group's of the first row
  Ahead ahead;
  int lines_ahead;          // twice for each line of k
};

#if PD_LEVEL >= 4
template <int T>  // sums T and T + 1: two halves of [16][32]
PD_INLINE void zero_sums() {
  tile_zero<T>(), tile_zero<T + 1>();
}
template <int T, class E>
PD_INLINE void load_sums(const E *p) {
  tile_load<T>(p, 128), tile_load<T + 1>(p + 16, 128);
}
template <int T, class E>
PD_INLINE void store_sums(E *p) {
  tile_store<T>(p, 128), tile_store<T + 1>(p + 16, 128);
}
// A line of k: one or two tiles of x by a panel.
template <bool INT8, int TILES, class Fetch>
PD_INLINE void multiply_line(const char *x, int64_t stride, int64_t second, const char *panel, Fetch fetch) {
  tile_load<6>(panel, 128), tile_load<4>(x, stride);
  tile_multiply<INT8, 0, 4, 6>();
  tile_load<7>(panel + 64, 128);
  tile_multiply<INT8, 1, 4, 7>();
  fetch();
  if constexpr (TILES == 2) {
    tile_load<5>(x + second, stride);
    tile_multiply<INT8, 2, 5, 6>(), tile_multiply<INT8, 3, 5, 7>();
  }
}

// line(x, stride, second, panel, fetch) for every line of k; the last is padded with zeros, on both sides: behind a
// panel may lie NaN. Behind each line beside() is called, for what the vector unit does meanwhile. Prefetches are
// spread as thinly as can be: those that wait for memory hold the buffers that x needs on its way from L2.
template <class Line, class Beside>
PD_INLINE void amx_lines(const AmxArgs &t, int tiles, Line line, Beside beside) {
  const char *x = t.x, *panel = t.panel;
  const int64_t stride = t.x_stride, second = t.second;
  Ahead ahead = t.ahead;
  const auto fetch = [&]() __attribute__((always_inline)) { ahead.fetch<false>(t.lines_ahead); };
  int64_t left = t.x_bytes;
  for (; left >= AMX_LINE; left -= AMX_LINE, x += AMX_LINE, panel += AMX_PANEL) {
    line(x, stride, second, panel, fetch);
    fetch();
    beside();
  }
  if (left == 0) return;
  alignas(64) char last_x[2][AMX_ROWS * AMX_LINE] = {}, last_panel[AMX_PANEL] = {};
  for (int i = 0; i < tiles; i++)
    for (int r = 0; r < t.height; r++) memcpy(last_x[i] + r * AMX_LINE, x + i * second + r * stride, left);
  memcpy(last_panel, panel, (left + 3) / 4 * 128);
  line(last_x[0], AMX_LINE, sizeof last_x[0], last_panel, fetch);
  fetch();
  beside();
}

template <int TILES, class Beside>
__attribute__((noinline)) void amx_bf16(const AmxArgs &t, Beside beside) {
  float *const second = t.acc + AMX_ROWS * 32;
  if (t.first) {
    zero_sums<0>();
    if constexpr (TILES == 2) zero_sums<2>();
  } else {
    load_sums<0>(t.acc);
    if constexpr (TILES == 2) load_sums<2>(second);
  }
  amx_lines(
      t, TILES,
      [](const char *x, int64_t stride, int64_t second, const char *panel, auto fetch) __attribute__((always_inline)) {
        multiply_line<false, TILES>(x, stride, second, panel, fetch);
      },
      beside);
  store_sums<0>(t.acc);
  if constexpr (TILES == 2) store_sums<2>(second);
}

// A line of int8 is a group of values of x: its sums go to memory, and on to acc while the next group is multiplied.
static_assert(GROUP == AMX_LINE);
using GroupSums = int32_t[2 * AMX_ROWS][32];
template <int TILES>
PD_INLINE void add_group(const AmxArgs &t, const GroupSums &sums, int64_t group) {
  const int64_t stride = t.x_stride;
  const bool first = t.first && group == 0;
  for (int i = 0; i < TILES; i++) {
    const char *head = t.heads + group * (int64_t)sizeof(GroupHead) + i * t.second;
    const int32_t(*sum)[32] = sums + i * AMX_ROWS, (*const end)[32] = sum + t.height;
    for (float *acc = t.acc + i * AMX_ROWS * 32; sum < end; sum++, acc += 32, head += stride) {
      float scale;
      memcpy(&scale, head, 4);
      __m512i c[2];
      int8_start(c, (int32_t)load_word(head + 4));
      for (int j = 0; j < 2; j++) c[j] = _mm512_add_epi32(c[j], _mm512_load_si512(*sum + j * 16));
      int8_end(c, scale, first, acc);
    }
  }
}
template <int TILES, class Beside>
__attribute__((noinline)) void amx_int8(const AmxArgs &t, Beside beside) {
  alignas(64) GroupSums sums[2];
  int64_t group = 0;
  amx_lines(
      t, TILES,
      [&](const char *x, int64_t stride, int64_t second, const char *panel, auto fetch) __attribute__((always_inline)) {
        zero_sums<0>();
        if constexpr (TILES == 2) zero_sums<2>();
        multiply_line<true, TILES>(x, stride, second, panel, fetch);
        if (group > 0) add_group<TILES>(t, sums[(group - 1) % 2], group - 1);
        store_sums<0>(sums[group % 2][0]);
        if constexpr (TILES == 2) store_sums<2>(sums[group % 2][AMX_ROWS]);
        group++;
      },
      beside);
  add_group<TILES>(t, sums[(group - 1) % 2], group - 1);
}

template <class Beside>
PD_INLINE void amx_tiles(const AmxArgs &t, int tiles, bool int8, Beside beside) {
  if (tiles == 2) int8 ? amx_int8<2>(t, beside) : amx_bf16<2>(t, beside);
  else int8 ? amx_int8<1>(t, beside) : amx_bf16<1>(t, beside);
}
#else  // never called: what calls them is left out by if constexpr
template <class Beside>
PD_INLINE void amx_tiles(const AmxArgs &, int, bool, Beside) {}
#endif

}  // namespace pagedec
