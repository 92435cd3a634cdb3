// One tile of rows in fp32 by a panel of bf16, or of bytes beside x in bf16, where bf16 are multiplied as fp32: a step
// is two values of every row and 128 bytes of the panel, or 64. Rows are widened once for all panels, and the panel by
// each tile. An output's products are those of gemm_tile.h, in its order.
#pragma once
#include "cpu/gemm_tile.h"

namespace pagedec {

#if PD_LEVEL <= 2
constexpr int PAIRS_TILE_ROWS = PD_LEVEL == 1 ? 6 : TILE_ROWS;  // beside 12 sums: two of the panel, one of x, a mask

// The even or the odd values of a step of half a panel.
template <bool ODD, int PANEL>
PD_INLINE F16 value_of_pair(const char *panel, OddMask mask, const Fp8Scales &scales) {
  if constexpr (PANEL == BYTES) return widen_bytes(panel + ODD * 16);
  if constexpr (PANEL == FP8) return rounded16(fp8_floats(panel + ODD * 16, scales));
  return ODD ? odd16(load16(panel), mask) : even16(load16(panel));
}
template <int PANEL>
constexpr int HALF_STEP = PANEL == WORDS ? 64 : 32;  // bytes
// The even or the odd values of a step, by H halves of the panel.
template <bool ODD, int PANEL, int R, int H>
PD_INLINE void add_values(F16 (&c)[R][H], const char *panel, const RowPointers &rows, int at, OddMask mask,
                          const Fp8Scales (&scales)[H]) {
  const auto word = [&](int i) __attribute__((always_inline)) {
    return set_word16(load_word(rows[i] + at + ODD * 4));
  };
  if constexpr (PD_LEVEL == 1) {
#pragma GCC unroll 2
    for (int j = 0; j < H; j++) {
      const F16 w = value_of_pair<ODD, PANEL>(panel + j * HALF_STEP<PANEL>, mask, scales[j]);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) c[i][j] = fma16(word(i), w, c[i][j]);
      asm("" ::: "memory");  // words are loaded again rather than kept: there is no register for them
    }
  } else {
    const F16 w0 = value_of_pair<ODD, PANEL>(panel, mask, scales[0]),
              w1 = value_of_pair<ODD, PANEL>(panel + HALF_STEP<PANEL>, mask, scales[1]);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const F16 x = word(i);
      c[i][0] = fma16(x, w0, c[i][0]), c[i][1] = fma16(x, w1, c[i][1]);
    }
    asm("" ::: "memory");
  }
}
template <int PANEL, int R, int H>
PD_INLINE void step_of_pairs(F16 (&c)[R][H], const char *panel, const RowPointers &rows, int at, OddMask mask,
                             const Fp8Scales (&scales)[H]) {
  add_values<false, PANEL>(c, panel, rows, at, mask, scales), add_values<true, PANEL>(c, panel, rows, at, mask, scales);
}

template <int PANEL, int R>
void tile_of_pairs(const TileArgs &t) {
  constexpr int H = 2 / num_passes(R), STEP = 2 * HALF_STEP<PANEL>;
  const char *ahead = t.ahead;
  OddMask mask = odd_mask();
#if PD_LEVEL == 1
  if constexpr (PANEL == WORDS) asm("" : "+x"(mask));  // in a register: memory gives it once more with each step
#endif
  for (int h = 0; h < 2; h += H) {
    float *const acc = t.acc + h * 16;
    F16 c[R][H];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int j = 0; j < H; j++) c[i][j] = t.first ? zero16() : load16(acc + i * 32 + j * 16);
    const char *panel = t.panel + h * HALF_STEP<PANEL>;
    Fp8Scales scales[H];
    RowPointers x(t.x, t.x_stride);
    int64_t at = t.begin;
    const int64_t end = at + t.num_steps;
    do {  // once, but of fp8 as often as there are scales
      int64_t left = end - at;
      if constexpr (PANEL == FP8) left = fp8_group<H>(t.scales + h * 16, at, left, scales);
      at += left;
      for (; left >= 4; left -= 4, x.advance(32), panel += 4 * STEP) {
        for (int j = 0; j < t.lines_ahead && ahead < t.ahead_end; j++, ahead += 64) prefetch_to_l2(ahead);
        x.pin();
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) step_of_pairs<PANEL>(c, panel + s * STEP, x, s * 8, mask, scales);
      }
      for (; left > 0; left--, x.advance(8), panel += STEP) step_of_pairs<PANEL>(c, panel, x, 0, mask, scales);
    } while (at < end);
    if (t.half_step) {
      if constexpr (PANEL == FP8) fp8_group<H>(t.scales + h * 16, at, 1, scales);
      add_values<false, PANEL>(c, panel, x, 0, mask, scales);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int j = 0; j < H; j++) store16(acc + i * 32 + j * 16, c[i][j]);
  }
}

template <int PANEL, size_t... R>
TileFn pick_tile_of_pairs(std::index_sequence<R...>, int rows) {
  static constexpr TileFn fn[] = {tile_of_pairs<PANEL, (int)R + 1>...};
  return fn[rows - 1];
}
PD_INLINE TileFn pick_tile_of_pairs(Panel panel, int rows) {
  constexpr auto heights = std::make_index_sequence<PAIRS_TILE_ROWS>();
  if (panel == WORDS) return pick_tile_of_pairs<WORDS>(heights, rows);
  return panel == FP8 ? pick_tile_of_pairs<FP8>(heights, rows) : pick_tile_of_pairs<BYTES>(heights, rows);
}
#else
constexpr int PAIRS_TILE_ROWS = TILE_ROWS;
PD_INLINE TileFn pick_tile_of_pairs(Panel, int) { return nullptr; }
#endif

}  // namespace pagedec
