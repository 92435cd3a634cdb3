// One tile: R rows of x by one panel of 32 outputs, over a run of k.
//
// A "word" is 4 bytes: two bf16 or one fp32. A step is one word of every row and 128 bytes of the panel: 32 outputs by one word,
// two cache lines. x is read where it lies, row by row, one word broadcast at a time.
// Accumulators come from and go to memory (acc [R][32] fp32), so that a long k may be cut into slices without changing a
// result: the chain of products of an output goes on where it stopped.
#pragma once
#include <utility>

#include "cpu/gemm_vec.h"

namespace pagedec {

// Registers: 12 rows x 2 zmm leave room for the panel and a broadcast; 3 rows x 4 ymm (the same 12 accumulators as 6 x 2, with
// fewer loads and half of the widening of x for each product); 2 rows x 8 xmm.
constexpr int TILE_ROWS = PD_LEVEL >= 2 ? 12 : PD_LEVEL == 1 ? 3 : 2;

struct TileArgs {
  const char *x;         // first word of the first row
  int64_t x_stride;      // bytes from row to row
  const char *panel;     // 128 bytes a step
  int64_t num_steps;     // of whole words
  bool half_step;        // one more step, whose word of x is a single bf16 (k is odd, and here it ends)
  bool first;            // accumulators start at zero, not at what acc holds
  float *acc;            // [R][32], 64-byte aligned
  const char *ahead;     // lines to prefetch meanwhile: ahead <= line < ahead_end
  const char *ahead_end;
  int lines_ahead;       // in every 4 steps
};

// One step for bf16 where there is a dot-product instruction, and for fp32: one multiply-add an accumulator.
// x(i): the word of row i, in every lane.
template <int DTYPE, int R, class Word>
PD_INLINE void step(F16 (&c)[R][2], const char *panel, Word word) {
#if PD_LEVEL >= 3
  if constexpr (DTYPE == PD_BF16) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + 64);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32((int)word(i));
      c[i][0] = _mm512_dpbf16_ps(c[i][0], x, w0), c[i][1] = _mm512_dpbf16_ps(c[i][1], x, w1);
    }
    return;
  }
#endif
  const F16 w0 = load16(panel), w1 = load16(panel + 64);
  if constexpr (DTYPE == PD_F32) {
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const F16 x = set_word16(word(i));
      c[i][0] = fma16(x, w0, c[i][0]), c[i][1] = fma16(x, w1, c[i][1]);
    }
  } else {
    const F16 e0 = even16(w0), e1 = even16(w1);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const F16 x = even16(set_word16(word(i)));
      c[i][0] = fma16(x, e0, c[i][0]), c[i][1] = fma16(x, e1, c[i][1]);
    }
    const F16 o0 = odd16(w0), o1 = odd16(w1);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const F16 x = odd16(set_word16(word(i)));
      c[i][0] = fma16(x, o0, c[i][0]), c[i][1] = fma16(x, o1, c[i][1]);
    }
  }
}

PD_INLINE void prefetch_to_l2(const char *p) { __builtin_prefetch(p, 0, 2); }

template <int DTYPE, int R>
void tile(const TileArgs &t) {
  F16 c[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    for (int j = 0; j < 2; j++) c[i][j] = t.first ? zero16() : load16(t.acc + i * 32 + j * 16);
  const char *x = t.x, *panel = t.panel, *ahead = t.ahead;
  const int64_t stride = t.x_stride, last = t.num_steps;
  int64_t s = 0;
  auto whole = [&](int64_t at) __attribute__((always_inline)) {
    step<DTYPE, R>(c, panel + at * 128, [&](int i) __attribute__((always_inline)) { return load_word(x + i * stride + at * 4); });
  };
  for (; s + 4 <= last; s += 4) {
    for (int j = 0; j < t.lines_ahead && ahead < t.ahead_end; j++, ahead += 64) prefetch_to_l2(ahead);
    whole(s), whole(s + 1), whole(s + 2), whole(s + 3);
  }
  for (; s < last; s++) whole(s);
  if (t.half_step)
    step<DTYPE, R>(c, panel + s * 128, [&](int i) __attribute__((always_inline)) {
      uint16_t h;
      memcpy(&h, x + i * stride + s * 4, 2);
      return (uint32_t)h;
    });
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    for (int j = 0; j < 2; j++) store16(t.acc + i * 32 + j * 16, c[i][j]);
}

using TileFn = void (*)(const TileArgs &);

template <int DTYPE, size_t... R>
TileFn pick_tile(std::index_sequence<R...>, int rows) {
  static constexpr TileFn fn[] = {tile<DTYPE, (int)R + 1>...};
  return fn[rows - 1];
}
PD_INLINE TileFn pick_tile(int dtype, int rows) {
  constexpr auto heights = std::make_index_sequence<TILE_ROWS>();
  return dtype == PD_BF16 ? pick_tile<PD_BF16>(heights, rows) : pick_tile<PD_F32>(heights, rows);
}

}  // namespace pagedec
