// The parts of a linear layer with int8 weights: what a row of x becomes, and one tile of rows by a panel.
//
// An output's W is q * scale, q = W * (127 / max |W|) to nearest even, -127 .. 127. A row of x alike, but with a scale
// for each GROUP values: models have a few large channels, whose scale would leave the others of the row a handful of
// steps (measured on SmolLM2-135M: one scale a row costs 3.9 % of perplexity). A group's sum of q q is an exact integer
// below 2^24 in any order; groups are added in fp32, in order, each product and sum rounded by itself. So results are
// the same on every instruction set.
//
// A panel is 32 scales (fp32), then [K/4][32][4] bytes q + 128: unsigned, as the instruction that multiplies bytes
// (VNNI) wants one side. A step is four q of each row: 4 bytes, or without VNNI 8, q0 q2 q1 q3 in 16 bits each
// (products of bytes would saturate in 16 bits). Behind a row's steps, on a new cache line, each group has its scale
// (fp32) and -128 * (sum of its q) (int32), where sums start.
#pragma once
#include "cpu/gemm_tile.h"

namespace pagedec {

constexpr int GROUP = 64;                // values of x that share a scale
constexpr int GROUP_STEPS = GROUP / 4;
constexpr int64_t INT8_HEADER = 128;     // bytes of a panel before its weights
constexpr int INT8_TILE_ROWS = PD_LEVEL >= 2 ? 12 : PD_LEVEL == 1 ? 6 : 1;
template <int R>
constexpr int INT8_OUTPUTS = 32 / num_passes(R);  // of a panel, that a tile has at once

struct GroupHead {
  float scale;
  int32_t start;
};

// Bytes of a row of x: its steps, and from where on it has its groups.
struct Int8Row {
  int64_t step_bytes, num_steps, num_groups, heads, bytes;
  Int8Row(int64_t k, bool vnni)
      : step_bytes(vnni ? 4 : 8), num_steps((k + 3) / 4), num_groups((k + GROUP - 1) / GROUP),
        heads((num_steps * step_bytes + 63) / 64 * 64), bytes((heads + num_groups * 8 + 63) / 64 * 64) {}
};

// 127 / max |x|, or 0 where that is no number: values of 0, of less than fp32 divides by, or with an infinity or NaN
// among them.
inline float int8_factor(float max) { return max >= 0x1p-120f && max <= 3.40282347e38f ? 127.f / max : 0.f; }
// To nearest even, |x| <= 127: 1.5 * 2^23 leaves no room for a fraction.
inline int32_t int8_round(float x) {
  const float shifted = x + 12582912.f;
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

// One row of x [k] in dtype, the last step padded with zeros.
void quantize_row(const void *x, int dtype, int64_t k, const Int8Row &shape, char *row);

#if PD_LEVEL >= 2
template <int R>
using Int8Sums = __m512i[R][2];
template <bool VNNI, int R>
PD_INLINE void int8_step(Int8Sums<R> &c, const char *panel, const RowPointers &x, int s) {
  const __m512i w0 = _mm512_loadu_si512(panel), w1 = _mm512_loadu_si512(panel + 64);
  if constexpr (VNNI) {
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const __m512i word = _mm512_set1_epi32((int)load_word(x[i] + s * 4));
      add_dots_of_bytes(c[i][0], w0, word), add_dots_of_bytes(c[i][1], w1, word);
    }
  } else {
    const __m512i low = _mm512_set1_epi16(0xff);
    const __m512i e0 = _mm512_and_si512(w0, low), o0 = _mm512_srli_epi16(w0, 8);
    const __m512i e1 = _mm512_and_si512(w1, low), o1 = _mm512_srli_epi16(w1, 8);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const __m512i even = _mm512_set1_epi32((int)load_word(x[i] + s * 8));
      c[i][0] = _mm512_add_epi32(c[i][0], _mm512_madd_epi16(even, e0));
      c[i][1] = _mm512_add_epi32(c[i][1], _mm512_madd_epi16(even, e1));
      const __m512i odd = _mm512_set1_epi32((int)load_word(x[i] + s * 8 + 4));
      c[i][0] = _mm512_add_epi32(c[i][0], _mm512_madd_epi16(odd, o0));
      c[i][1] = _mm512_add_epi32(c[i][1], _mm512_madd_epi16(odd, o1));
      add_now(c[i][0], c[i][1]);
    }
  }
}
PD_INLINE void int8_start(__m512i (&c)[2], int32_t start) { c[0] = c[1] = _mm512_set1_epi32(start); }
PD_INLINE void int8_end(const __m512i (&c)[2], float scale, bool first, float *acc) {
  for (int j = 0; j < 2; j++) {
    const F16 sum = mul16(_mm512_cvtepi32_ps(c[j]), set16(scale));
    store16(acc + j * 16, first ? sum : add16(load16(acc + j * 16), sum));
  }
}

#elif PD_LEVEL == 1
template <int R>
using Int8Sums = __m256i[R][INT8_OUTPUTS<R> / 8];
// q0 and q2 of a step, or q1 and q3, in 16 bits each
template <bool ODD>
PD_INLINE __m256i int8_pairs(const char *panel) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i *)panel);
  return ODD ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
}
template <bool ODD, int R, int V>
PD_INLINE void int8_half_step(__m256i (&c)[R][V], const char *panel, const RowPointers &x, int s) {
#pragma GCC unroll 2
  for (int j = 0; j < V; j += 2) {
    const __m256i w0 = int8_pairs<ODD>(panel + j * 32), w1 = int8_pairs<ODD>(panel + j * 32 + 32);
#pragma GCC unroll 6
    for (int i = 0; i < R; i++) {
      const __m256i word = _mm256_set1_epi32((int)load_word(x[i] + s * 8 + ODD * 4));
      c[i][j] = _mm256_add_epi32(c[i][j], _mm256_madd_epi16(word, w0));
      c[i][j + 1] = _mm256_add_epi32(c[i][j + 1], _mm256_madd_epi16(word, w1));
      add_now(c[i][j], c[i][j + 1]);
    }
  }
}
template <bool VNNI, int R>
PD_INLINE void int8_step(Int8Sums<R> &c, const char *panel, const RowPointers &x, int s) {
  int8_half_step<false>(c, panel, x, s);
  asm("" ::: "memory");  // the bytes are loaded again rather than kept: there is no register for them
  int8_half_step<true>(c, panel, x, s);
}
template <int V>
PD_INLINE void int8_start(__m256i (&c)[V], int32_t start) {
  for (int j = 0; j < V; j++) c[j] = _mm256_set1_epi32(start);
}
template <int V>
PD_INLINE void int8_end(const __m256i (&c)[V], float scale, bool first, float *acc) {
  for (int j = 0; j < V; j++) {
    const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(c[j]), _mm256_set1_ps(scale));
    _mm256_storeu_ps(acc + j * 8, first ? sum : _mm256_add_ps(_mm256_loadu_ps(acc + j * 8), sum));
  }
}

#else
template <int R>
using Int8Sums = int32_t[R][32];
template <bool VNNI, int R>
PD_INLINE void int8_step(Int8Sums<R> &c, const char *panel, const RowPointers &x, int s) {
  uint8_t w[128];
  memcpy(w, panel, 128);
  for (int i = 0; i < R; i++) {
    int16_t q[4];
    memcpy(q, x[i] + s * 8, 8);
    for (int j = 0; j < 32; j++)
      c[i][j] += q[0] * w[j * 4] + q[2] * w[j * 4 + 1] + q[1] * w[j * 4 + 2] + q[3] * w[j * 4 + 3];
  }
}
PD_INLINE void int8_start(int32_t (&c)[32], int32_t start) {
  for (int32_t &sum : c) sum = start;
}
PD_INLINE void int8_end(const int32_t (&c)[32], float scale, bool first, float *acc) {
  for (int j = 0; j < 32; j++) {
    const float sum = (float)c[j] * scale;
    acc[j] = first ? sum : acc[j] + sum;
  }
}
#endif

// A group's sums of some outputs of a panel, and what to prefetch meanwhile; x and ahead move on.
template <bool VNNI, int R>
PD_INLINE void int8_group(Int8Sums<R> &c, const TileArgs &t, RowPointers &x, const char *panel, int steps,
                          const char *&ahead) {
  constexpr int STEP = VNNI ? 4 : 8;
  for (; steps >= 4; steps -= 4) {
    for (int j = 0; j < t.lines_ahead && ahead < t.ahead_end; j++, ahead += 64) prefetch_to_l2(ahead);
    x.pin();
    int8_step<VNNI, R>(c, panel, x, 0), int8_step<VNNI, R>(c, panel + 128, x, 1);
    int8_step<VNNI, R>(c, panel + 256, x, 2), int8_step<VNNI, R>(c, panel + 384, x, 3);
    x.advance(4 * STEP), panel += 512;
  }
  for (; steps > 0; steps--, x.advance(STEP), panel += 128) int8_step<VNNI, R>(c, panel, x, 0);
}

// As tile<DTYPE, R>, with steps of quantised x from the beginning of a group on. heads: the first row's, of that group.
template <bool VNNI, int R>
void int8_tile(const TileArgs &t) {
  constexpr int STEP = VNNI ? 4 : 8;
  const char *panel = t.panel, *ahead = t.ahead, *heads = t.heads;
  RowPointers x(t.x, t.x_stride);
  bool first = t.first;
  for (int64_t left = t.num_steps; left > 0; left -= GROUP_STEPS, heads += sizeof(GroupHead), first = false) {
    const int steps = left < GROUP_STEPS ? (int)left : GROUP_STEPS;
    for (int output = 0; output < 32; output += INT8_OUTPUTS<R>) {
      Int8Sums<R> c;
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) int8_start(c[i], (int32_t)load_word(heads + i * t.x_stride + 4));
      RowPointers own = x;  // where there are several passes
      int8_group<VNNI, R>(c, t, num_passes(R) == 1 ? x : own, panel + output * 4, steps, ahead);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        float scale;
        memcpy(&scale, heads + i * t.x_stride, 4);
        int8_end(c[i], scale, first, t.acc + i * 32 + output);
      }
    }
    if (num_passes(R) > 1) x.advance(steps * STEP);
    panel += steps * 128;
  }
}

template <bool VNNI, size_t... R>
TileFn pick_int8_tile(std::index_sequence<R...>, int rows) {
  static constexpr TileFn fn[] = {int8_tile<VNNI, (int)R + 1>...};
  return fn[rows - 1];
}
PD_INLINE TileFn pick_int8_tile(int rows, bool vnni) {
  constexpr auto heights = std::make_index_sequence<INT8_TILE_ROWS>();
#if PD_LEVEL >= 3
  return pick_int8_tile<true>(heights, rows);
#else
  if constexpr (PD_LEVEL == 2)
    if (vnni) return pick_int8_tile<true>(heights, rows);
  return pick_int8_tile<false>(heights, rows);
#endif
}

}  // namespace pagedec
