// One tile of rows in fp32 by a panel of bf16, where bf16 are multiplied as fp32 (AVX2): a step is two values of every
// row and 128 bytes of the panel. Rows are widened once for all panels and the panel by each tile. The products of an
// output are those of gemm_tile.h, in its order.
#pragma once
#include "cpu/gemm_tile.h"

namespace pagedec {

constexpr int PAIRS_TILE_ROWS = 6;

#if PD_LEVEL == 1
alignas(32) static const uint32_t odd_mask[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
PD_INLINE __m256 odd8_by_memory(__m256 a) {  // odd8 without a register for the mask
  asm("vandps %1, %0, %0" : "+x"(a) : "m"(odd_mask));
  return a;
}
template <bool ODD>
PD_INLINE __m256 broadcast_of_pair(const char *p) {
  return _mm256_broadcast_ss((const float *)p + ODD);
}

// The even or the odd values of a step by H halves of a panel, 16 outputs each, in 16 registers: of a whole panel 12
// accumulators, 3 of x and one of the panel; of half of one 12 accumulators, the mask, one of x and two of the panel,
// which is widened for twice as many rows.
template <bool ODD, int R>
PD_INLINE void half_step(F16 (&c)[R][2], const char *panel, const RowPointers &rows, int at, __m256) {
  __m256 x[R];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) x[i] = broadcast_of_pair<ODD>(rows[i] + at);
#pragma GCC unroll 16
  for (int j = 0; j < 2; j++)
#pragma GCC unroll 16
    for (int part = 0; part < 2; part++) {
      const __m256 words = _mm256_loadu_ps((const float *)(panel + j * 64 + part * 32));
      const __m256 w = ODD ? odd8_by_memory(words) : even8(words);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        __m256 &sum = part ? c[i][j].hi : c[i][j].lo;
        sum = _mm256_fmadd_ps(x[i], w, sum);
      }
    }
}
template <bool ODD, int R>
PD_INLINE void half_step(F16 (&c)[R][1], const char *panel, const RowPointers &rows, int at, __m256 mask) {
  const F16 words = load16(panel);
  const F16 w = ODD ? F16{_mm256_and_ps(words.lo, mask), _mm256_and_ps(words.hi, mask)} : even16(words);
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    const __m256 x = broadcast_of_pair<ODD>(rows[i] + at);
    c[i][0].lo = _mm256_fmadd_ps(x, w.lo, c[i][0].lo), c[i][0].hi = _mm256_fmadd_ps(x, w.hi, c[i][0].hi);
  }
}
template <int R, int H>
PD_INLINE void step_of_pairs(F16 (&c)[R][H], const char *panel, const RowPointers &rows, int at, __m256 mask) {
  // what was loaded is loaded again rather than kept: there is no register for it
  half_step<false>(c, panel, rows, at, mask);
  asm("" ::: "memory");
  half_step<true>(c, panel, rows, at, mask);
  asm("" ::: "memory");
}

// half_step: one more step, of which there is the even value alone.
template <int R>
void tile_of_pairs(const TileArgs &t) {
  constexpr int H = R * 2 <= PAIRS_TILE_ROWS ? 2 : 1;
  const char *ahead = t.ahead;
  __m256 mask = _mm256_load_ps((const float *)odd_mask);
  asm("" : "+x"(mask));
  for (int h = 0; h < 2; h += H) {
    float *const acc = t.acc + h * 16;
    F16 c[R][H];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int j = 0; j < H; j++) c[i][j] = t.first ? zero16() : load16(acc + i * 32 + j * 16);
    const char *panel = t.panel + h * 64;
    RowPointers x(t.x, t.x_stride);
    int64_t left = t.num_steps;
    for (; left >= 4; left -= 4, x.advance(32), panel += 512) {
      for (int j = 0; j < t.lines_ahead && ahead < t.ahead_end; j++, ahead += 64) prefetch_to_l2(ahead);
      x.pin();
#pragma GCC unroll 4
      for (int s = 0; s < 4; s++) step_of_pairs<R, H>(c, panel + s * 128, x, s * 8, mask);
    }
    for (; left > 0; left--, x.advance(8), panel += 128) step_of_pairs<R, H>(c, panel, x, 0, mask);
    if (t.half_step) half_step<false>(c, panel, x, 0, mask);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int j = 0; j < H; j++) store16(acc + i * 32 + j * 16, c[i][j]);
  }
}

template <size_t... R>
TileFn pick_tile_of_pairs(std::index_sequence<R...>, int rows) {
  static constexpr TileFn fn[] = {tile_of_pairs<(int)R + 1>...};
  return fn[rows - 1];
}
PD_INLINE TileFn pick_tile_of_pairs(int rows) {
  return pick_tile_of_pairs(std::make_index_sequence<PAIRS_TILE_ROWS>(), rows);
}
#else
PD_INLINE TileFn pick_tile_of_pairs(int) { return nullptr; }
#endif

}  // namespace pagedec
