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
  const char *ahead, *ahead_end;  // lines to prefetch meanwhile
  int lines_ahead;                // for each line of k
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
template <bool INT8, int TILES>
PD_INLINE void multiply_line(const char *x, int64_t stride, int64_t second, const char *panel) {
  tile_load<6>(panel, 128), tile_load<4>(x, stride);
  tile_multiply<INT8, 0, 4, 6>();
  tile_load<7>(panel + 64, 128);
  tile_multiply<INT8, 1, 4, 7>();
  if constexpr (TILES == 2) {
    tile_load<5>(x + second, stride);
    tile_multiply<INT8, 2, 5, 6>(), tile_multiply<INT8, 3, 5, 7>();
  }
}

// Tiles 0 to 3 are sums, 4 and 5 two tiles of x (sums 0, 1 and 2, 3), 6 and 7 the halves of a panel.
inline void amx_configure(int height) {
  AmxShapes shapes;
  for (int i = 0; i < 8; i++) shapes.set(i, i < 6 ? height : AMX_ROWS, 64);
  load_shapes(shapes);
}

// line(x, stride, second, panel) for every line of k; the last is padded with zeros, on both sides: behind a panel may
// lie NaN.
template <class Line>
PD_INLINE void amx_lines(const AmxArgs &t, int tiles, Line line) {
  const char *x = t.x, *panel = t.panel, *ahead = t.ahead;
  int64_t left = t.x_bytes;
  for (; left >= AMX_LINE; left -= AMX_LINE, x += AMX_LINE, panel += AMX_PANEL) {
    // a line or three too far does no harm
    for (const char *stop = std::min(ahead + t.lines_ahead * 64, t.ahead_end); ahead < stop; ahead += 256)
      prefetch_to_l2(ahead), prefetch_to_l2(ahead + 64), prefetch_to_l2(ahead + 128), prefetch_to_l2(ahead + 192);
    line(x, t.x_stride, t.second, panel);
  }
  if (left == 0) return;
  alignas(64) char last_x[2][AMX_ROWS * AMX_LINE] = {}, last_panel[AMX_PANEL] = {};
  for (int i = 0; i < tiles; i++)
    for (int r = 0; r < t.height; r++) memcpy(last_x[i] + r * AMX_LINE, x + i * t.second + r * t.x_stride, left);
  memcpy(last_panel, panel, (left + 3) / 4 * 128);
  line(last_x[0], AMX_LINE, sizeof last_x[0], last_panel);
}

template <int TILES>
void amx_bf16(const AmxArgs &t) {
  float *const second = t.acc + AMX_ROWS * 32;
  if (t.first) {
    zero_sums<0>();
    if constexpr (TILES == 2) zero_sums<2>();
  } else {
    load_sums<0>(t.acc);
    if constexpr (TILES == 2) load_sums<2>(second);
  }
  amx_lines(t, TILES, multiply_line<false, TILES>);
  store_sums<0>(t.acc);
  if constexpr (TILES == 2) store_sums<2>(second);
}

// A line of int8 is a group of values of x: its sums go to memory, and on to acc while the next group is multiplied.
static_assert(GROUP == AMX_LINE && GROUP_STEPS == AMX_STEPS);
using GroupSums = int32_t[2 * AMX_ROWS][32];
template <int TILES>
PD_INLINE void add_group(const AmxArgs &t, const GroupSums &sums, int64_t group) {
  const char *heads = t.heads + group * (int64_t)sizeof(GroupHead);
  const bool first = t.first && group == 0;
  for (int i = 0; i < TILES; i++, heads += t.second)
    for (int r = 0; r < t.height; r++) {
      const char *head = heads + r * t.x_stride;
      float scale;
      memcpy(&scale, head, 4);
      __m512i c[2];
      int8_start(c, (int32_t)load_word(head + 4));
      for (int j = 0; j < 2; j++) c[j] = _mm512_add_epi32(c[j], _mm512_load_si512(sums[i * AMX_ROWS + r] + j * 16));
      int8_end(c, scale, first, t.acc + (i * AMX_ROWS + r) * 32);
    }
}
template <int TILES>
void amx_int8(const AmxArgs &t) {
  alignas(64) GroupSums sums[2];
  int64_t group = 0;
  amx_lines(t, TILES,
            [&](const char *x, int64_t stride, int64_t second, const char *panel) __attribute__((always_inline)) {
              zero_sums<0>();
              if constexpr (TILES == 2) zero_sums<2>();
              multiply_line<true, TILES>(x, stride, second, panel);
              if (group > 0) add_group<TILES>(t, sums[(group - 1) % 2], group - 1);
              store_sums<0>(sums[group % 2][0]);
              if constexpr (TILES == 2) store_sums<2>(sums[group % 2][AMX_ROWS]);
              group++;
            });
  add_group<TILES>(t, sums[(group - 1) % 2], group - 1);
}

PD_INLINE void amx_tiles(const AmxArgs &t, int tiles, bool int8) {
  if (tiles == 2) int8 ? amx_int8<2>(t) : amx_bf16<2>(t);
  else int8 ? amx_int8<1>(t) : amx_bf16<1>(t);
}
#else  // never called: what calls them is left out by if constexpr
PD_INLINE void amx_configure(int) {}
PD_INLINE void amx_tiles(const AmxArgs &, int, bool) {}
#endif

}  // namespace pagedec
