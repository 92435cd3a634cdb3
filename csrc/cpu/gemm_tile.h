// One tile: R rows of x by one panel of 32 outputs, over a run of k.
//
// A "word" is 4 bytes: two bf16 or one fp32. A step is one word of every row and 128 bytes of the panel: 32 outputs by
// one word, two cache lines. x is read where it lies, row by row, one word broadcast at a time. Accumulators come from
// and go to memory (acc [R][32] fp32), so that a long k may be cut into slices without changing a result: the chain of
// products of an output goes on where it stopped.
#pragma once
#include <utility>

#include "cpu/gemm_fp8.h"
#include "cpu/gemm_vec.h"
#include "cpu/gemm_weight_only.h"

namespace pagedec {

// Registers: 14 rows x 2 zmm leave room for the panel, where a dot product takes its word of x from memory; 12 where it
// does not; 3 rows x 4 ymm (the same 12 accumulators as 6 x 2, with fewer loads); 1 row x 8 xmm.
constexpr int TILE_ROWS = PD_LEVEL >= 3 ? 14 : PD_LEVEL >= 2 ? 12 : PD_LEVEL == 1 ? 3 : 1;
// How often a tile of so many rows goes through a panel, each time for its share of the outputs: of 16 registers 6 rows
// of half a panel or 3 of a whole one take 12.
constexpr int num_passes(int rows) { return PD_LEVEL == 1 && rows > 3 ? 2 : 1; }

struct TileArgs {
  const char *x;         // first word of the first row
  int64_t x_stride;      // bytes from row to row
  const char *panel;     // 128 bytes a step, or half of them
  int64_t num_steps;     // of whole words
  bool half_step;        // one more step, of a single bf16 (k is odd, and here it ends)
  bool first;            // accumulators start at zero, not at what acc holds
  float *acc;            // [R][32], 64-byte aligned
  const char *heads;     // int8 only: the first group's of the first row
  const char *ahead;     // lines to prefetch meanwhile: ahead <= line < ahead_end
  const char *ahead_end;
  int lines_ahead;       // in every 4 steps
  char *wide;            // of a panel of bytes: where its words are left, 128 bytes a step
  const float *scales;   // fp8: of the panel's outputs, of its first 128 values of k
  int64_t begin;         // fp8: steps of the panel before these
};

// What a panel has: words of x's dtype; or bytes, int8 or e4m3, which become words, that may be left for the tiles that
// follow.
enum Panel { WORDS, BYTES, WIDENED, FP8, WIDENED_FP8 };
constexpr bool is_fp8(int panel) { return panel == FP8 || panel == WIDENED_FP8; }
constexpr bool is_left(int panel) { return panel == WIDENED || panel == WIDENED_FP8; }
#if PD_LEVEL >= 3
template <int PANEL, int H>
PD_INLINE __m512bh panel_words(const char *p, char *wide, const Fp8Scales &scales) {
  if constexpr (PANEL == WORDS) return (__m512bh)_mm512_loadu_si512(p);
  const __m512bh words = is_fp8(PANEL) ? fp8_words(p, scales) : H == 1 ? widen_words_of_one_load(p) : widen_words(p);
  if constexpr (is_left(PANEL)) _mm512_storeu_si512(wide, (__m512i)words);
  return words;
}
#endif

// One step. word(i): the word of row i of x. H: halves of a panel, 16 outputs each; one of them, or a panel of bytes,
// only where bf16 are multiplied. scales: of each half.
template <int DTYPE, int R, int PANEL, int H, class Word>
PD_INLINE void step(F16 (&c)[R][H], const char *panel, char *wide, const Fp8Scales (&scales)[H], Word word) {
  static_assert(PD_LEVEL >= 3 || DTYPE == PD_F32);  // elsewhere bf16 has tiles of its own: gemm_pairs.h
  static_assert((PANEL == WORDS && H == 2) || DTYPE == PD_BF16);
#if PD_LEVEL >= 3
  if constexpr (DTYPE == PD_BF16) {
    __m512bh w[H];
#pragma GCC unroll 2
    for (int j = 0; j < H; j++)
      w[j] = panel_words<PANEL, H>(panel + j * (PANEL == WORDS ? 64 : 32), wide + j * 64, scales[j]);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32((int)word(i));
#pragma GCC unroll 2
      for (int j = 0; j < H; j++) c[i][j] = _mm512_dpbf16_ps(c[i][j], x, w[j]);
    }
    return;
  }
#endif
  const F16 w0 = load16(panel), w1 = load16(panel + 64);
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    const F16 x = set_word16(word(i));
    c[i][0] = fma16(x, w0, c[i][0]), c[i][1] = fma16(x, w1, c[i][1]);
  }
}

PD_INLINE void prefetch_to_l2(const char *p) { __builtin_prefetch(p, 0, 2); }
// Lines to prefetch: at .. end, then next .. next_end.
struct Ahead {
  const char *at = nullptr, *end = nullptr, *next = nullptr, *next_end = nullptr;
  bool near = false;             // needed at once: into L1, not L2

  int64_t lines() const { return (end - at + (next_end - next)) / 64; }
  template <bool NEAR>
  __attribute__((always_inline)) void fetch(int count) {
    for (int i = 0; i < count; i++, at += 64) {
      if (at >= end) at = next, end = next_end, next = next_end;
      if (at >= end) return;
      NEAR ? __builtin_prefetch(at, 0, 3) : prefetch_to_l2(at);
    }
  }
};

// The addresses of up to sixteen rows in six registers: base + {0, 1, 2, 4, 8} * stride is one addressing mode. As many
// pointers, or offsets, would be spilled in the innermost loop (measured: 4 to 6 % of the whole).
struct RowPointers {
  const char *r0, *r3, *r6, *r9, *r11;
  int64_t stride;
  __attribute__((always_inline)) RowPointers(const char *x, int64_t s)
      : r0(x), r3(x + 3 * s), r6(x + 6 * s), r9(x + 9 * s), r11(x + 11 * s), stride(s) {}
  __attribute__((always_inline)) const char *operator[](int row) const {
    switch (row) {
      case 0: return r0;
      case 1: return r0 + stride;
      case 2: return r0 + 2 * stride;
      case 3: return r3;
      case 4: return r0 + 4 * stride;
      case 5: return r3 + 2 * stride;
      case 6: return r6;
      case 7: return r3 + 4 * stride;
      case 8: return r0 + 8 * stride;
      case 9: return r9;
      case 10: return r6 + 4 * stride;
      case 11: return r11;
      case 12: return r11 + stride;
      case 13: return r9 + 4 * stride;
      case 14: return r6 + 8 * stride;
      default: return r11 + 4 * stride;
    }
  }
  __attribute__((always_inline)) void advance(int64_t bytes) {
    r0 += bytes, r3 += bytes, r6 += bytes, r9 += bytes, r11 += bytes;
  }
  // Keeps the compiler from replacing them by a pointer for each row.
  __attribute__((always_inline)) void pin() {
    asm("" : "+r"(r0), "+r"(r3), "+r"(r6), "+r"(r9), "+r"(r11), "+r"(stride));
  }
};

// STREAMS: it prefetches as many lines as it reads, step by step; with one half of the outputs its half of each pair,
// or, of bytes, where both halves are in each line, half as many one behind the other.
template <int DTYPE, int R, int PANEL = WORDS, int H = 2, bool STREAMS = false>
void tile(const TileArgs &t) {
  constexpr int STEP = PANEL == WORDS ? 128 : 64;
  constexpr int LINES = STEP / 16 / (3 - H), GAP = PANEL == WORDS && H == 1 ? 128 : 64;  // of four steps
  F16 c[R][H];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    for (int j = 0; j < H; j++) c[i][j] = t.first ? zero16() : load16(t.acc + i * 32 + j * 16);
  const char *panel = t.panel, *ahead = t.ahead;
  char *wide = t.wide;
  Fp8Scales scales[H];
  RowPointers x(t.x, t.x_stride);
  auto whole = [&](int s) __attribute__((always_inline)) {
    if constexpr (STREAMS)
#pragma GCC unroll 2
      for (int i = s * LINES / 4; i < (s + 1) * LINES / 4; i++) prefetch_to_l2(ahead + i * GAP);
    step<DTYPE, R, PANEL, H>(c, panel + s * STEP, wide + s * 128, scales,
                             [&](int i) __attribute__((always_inline)) { return load_word(x[i] + s * 4); });
  };
  int64_t at = t.begin;
  const int64_t end = at + t.num_steps;
  do {  // once, but of fp8 as often as there are scales
    int64_t left = end - at;
    if constexpr (is_fp8(PANEL)) left = fp8_group<H>(t.scales, at, left, scales);
    at += left;
    for (; left >= 4; left -= 4) {
      if constexpr (!STREAMS)
        for (int j = 0; j < t.lines_ahead && ahead < t.ahead_end; j++, ahead += 64) prefetch_to_l2(ahead);
      x.pin();
      whole(0), whole(1), whole(2), whole(3);
      x.advance(16), panel += 4 * STEP;
      if constexpr (STREAMS) ahead += LINES * GAP;
      if constexpr (is_left(PANEL)) wide += 512;
    }
    for (; left > 0; left--, x.advance(4), panel += STEP, wide += 128) whole(0);
  } while (at < end);
  if (t.half_step) {
    if constexpr (is_fp8(PANEL)) fp8_group<H>(t.scales, at, 1, scales);
    step<DTYPE, R, PANEL, H>(c, panel, wide, scales, [&](int i) __attribute__((always_inline)) {
      uint16_t half;
      memcpy(&half, x[i], 2);
      return (uint32_t)half;
    });
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    for (int j = 0; j < H; j++) store16(t.acc + i * 32 + j * 16, c[i][j]);
}

using TileFn = void (*)(const TileArgs &);

template <int DTYPE, int PANEL = WORDS, size_t... R>
TileFn pick_tile(std::index_sequence<R...>, int rows) {
  static constexpr TileFn fn[] = {tile<DTYPE, (int)R + 1, PANEL>...};
  return fn[rows - 1];
}
PD_INLINE TileFn pick_tile(int dtype, int rows) {
  constexpr auto heights = std::make_index_sequence<TILE_ROWS>();
  if constexpr (PD_LEVEL >= 3)
    if (dtype == PD_BF16) return pick_tile<PD_BF16>(heights, rows);
  return pick_tile<PD_F32>(heights, rows);
}

#if PD_LEVEL == 3
// Of bf16 with all rows that there are in one tile. The two tallest have half of a panel. Streaming gains from so many
// rows on; below, the hardware's own prefetching is as fast or faster.
constexpr int STREAM_ROWS = TILE_ROWS + 2, STREAM_MIN_ROWS = 7, STREAM_BYTES_MIN_ROWS = 7;
template <int PANEL, size_t... R>
TileFn pick_stream(std::index_sequence<R...>, int rows) {
  constexpr int least = PANEL == WORDS ? STREAM_MIN_ROWS : STREAM_BYTES_MIN_ROWS;
  static constexpr TileFn fn[] = {
      tile<PD_BF16, (int)R + 1, PANEL, (int)R < TILE_ROWS ? 2 : 1, (int)R + 1 >= least>...};
  return fn[rows - 1];
}
PD_INLINE TileFn pick_stream(Panel panel, int rows) {
  constexpr auto heights = std::make_index_sequence<STREAM_ROWS>();
  if (panel == WORDS) return pick_stream<WORDS>(heights, rows);
  return panel == FP8 ? pick_stream<FP8>(heights, rows) : pick_stream<BYTES>(heights, rows);
}
// The first of several tiles: by a panel of bytes, whose words it leaves.
PD_INLINE TileFn pick_widening_tile(Panel panel, int rows) {
  constexpr auto heights = std::make_index_sequence<TILE_ROWS>();
  return panel == FP8 ? pick_tile<PD_BF16, WIDENED_FP8>(heights, rows) : pick_tile<PD_BF16, WIDENED>(heights, rows);
}
#else
constexpr int STREAM_ROWS = 0;
PD_INLINE TileFn pick_stream(Panel, int) { return nullptr; }
PD_INLINE TileFn pick_widening_tile(Panel, int) { return nullptr; }
#endif

}  // namespace pagedec
