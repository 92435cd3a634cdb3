// The parts of a linear layer with weights in blocks (blocks.h): what x becomes, and one tile of rows by a panel.
//
// A row of x is int8 in groups of 32 values with a scale each, and the sums of each 16 values: a zero point or minimum
// of W takes a multiple of a sum. A group's products are added up as integers, exactly in any order:
//   t = sum of (q - zero) q_x     over 32 values, or 16 where these have a scale of their own; |t| < 2^20
//   Q4_0, INT4_128, Q8_0, MXFP4   acc = acc + xs * (a * t)            a = d, zero 8, 8, 128, 12
//   Q4_K, INT4_ZERO               acc = acc + xs * (a * t - b * S)    a = d sc, d; b = dmin m, d z; S = sum of q_x
//   Q6_K                          acc = acc + xs * (a * t + a' * t')  a = d sc, zero 32
// from acc = 0 on, in fp32, each product and sum rounded by itself. a and b are exact: 11 bits times 8 or 11. Results
// are the same on every instruction set, and those of reference_blocks.py.
//
// Where bytes cannot be multiplied into 32 bits (VNNI), pairs of products are added in 16: those of 4 bits stay below
// 15 * 127 * 2 * 8 steps = 30480, of 6 bits 63 * 127 * 2 = 16002, and of 8 bits, as |q| times x with q's sign, 32512.
// Those of MXFP4 are widened twice a group, after 24 * 127 * 2 * 4 steps = 24384.
#pragma once
#include <cstddef>

#include "cpu/blocks.h"
#include "cpu/gemm_ints.h"
#include "cpu/gemm_tile.h"

namespace pagedec {

struct XGroup {
  int8_t q[X_GROUP];
  float scale;
  int16_t sums[2];               // of q: the first and the second 16
};
constexpr int X_BYTES = sizeof(XGroup);
static_assert(X_BYTES == 40);

struct Share;  // gemm_shares.h

int64_t blocks_workspace_bytes(const pd_gemm_args &, int num_threads);
bool blocks_quantize_part(const pd_context &, const pd_gemm_args &, int thread, int num_threads);
void blocks_part(const pd_context &, const pd_gemm_args &, int thread, int num_threads);
// Of workspace that a thread has for itself; and a share that has it.
int64_t blocks_own_bytes(const pd_gemm_args &);
void blocks_share(const pd_context &, const pd_gemm_args &, const Share &);
// k / 32 groups of a row of x in dtype.
void quantize_groups(const void *x, int dtype, int64_t k, XGroup *to);

constexpr int BLOCK_TILE_ROWS = PD_LEVEL >= 2 ? 12 : PD_LEVEL == 1 ? 6 : 1;

struct BlockTileArgs {
  const char *x;                 // first group of the first row
  int64_t x_stride;              // bytes from row to row
  const char *panel;             // first unit
  int64_t num_units;
  int groups;                    // of a unit
  bool has_scales;               // of groups, beside d
  bool first;                    // sums start at zero, not at what acc holds
  float *acc;                    // [R][32], 64-byte aligned
  Ahead ahead;
  int lines_ahead;               // in every group
};

// Sums of 16 bits have no room for a zero point: it is added when they are widened. Signed bytes have none.
template <BlockKind KIND, bool VNNI>
constexpr int zero_of() {
  if (KIND == BlockKind::NIBBLES) return 8;
  if (KIND == BlockKind::BYTES) return VNNI ? 128 : 0;
  if (KIND == BlockKind::E2M1) return E2M1_ZERO;
  return KIND == BlockKind::SIX ? 32 : 0;
}

#if PD_LEVEL >= 1
constexpr int VECTOR = sizeof(Ints);               // bytes; so many outputs times 4
constexpr int VECTORS = 128 / VECTOR, LOADS = 64 / VECTOR;  // of 32 outputs, and of their nibbles in a step
// Vectors of outputs that a tile has at once: of 16 registers 6 rows of half a panel take 12.
template <int R>
constexpr int TOGETHER = PD_LEVEL == 1 && R > 2 ? 2 : VECTORS;

// Vector V of step S of a group: q without a sign, 4 values of each of its outputs.
template <BlockKind KIND, int S, int V>
PD_INLINE Ints weights(const char *group) {
  if constexpr (KIND == BlockKind::BYTES) return load_ints(group + S * 128 + V * VECTOR);
  constexpr int UPPER = V / LOADS, AT = V % LOADS * VECTOR;
  const Ints low = set_ints(0x0f0f0f0f);
  if constexpr (KIND != BlockKind::SIX) {
    const Ints q = and_ints(shift16<UPPER * 4>(load_ints(group + S * 64 + AT)), low);
    return KIND == BlockKind::E2M1 ? look_up(E2M1_VALUES, q) : q;
  }
  const char *pair = group + S / 2 * 192 + AT;
  const Ints nibbles = and_ints(shift16<UPPER * 4>(load_ints(pair + 64 + S % 2 * 64)), low);
  return and_or(shift16<S % 2 * 4 + UPPER * 2 - 4>(load_ints(pair)), set_ints(0x30303030), nibbles);
}

// One step's products of one vector of outputs and a row.
template <BlockKind KIND, bool VNNI>
PD_INLINE void add_products(Ints &sum, Ints w, Ints word) {
#if PD_LEVEL >= 2
  if constexpr (VNNI) return add_dots_of_bytes(sum, w, word);
#endif
  constexpr bool WIDE = KIND == BlockKind::BYTES || KIND == BlockKind::SIX;
  const Ints pairs = KIND == BlockKind::BYTES ? signed_products(w, word) : madd_bytes(w, word);
  sum = WIDE ? add_ints(sum, madd_shorts(pairs, set_ints(0x00010001))) : add_shorts(sum, pairs);
}

// By N vectors of outputs from V on.
template <BlockKind KIND, bool VNNI, int S, int V, int R, int N>
PD_INLINE void block_step(Ints (&c)[R][N], const char *group, const RowPointers &x) {
  const auto pair = [&](int j, Ints w0, Ints w1) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const Ints word = set_ints((int32_t)load_word(x[i] + S * 4));
      add_products<KIND, VNNI>(c[i][j], w0, word), add_products<KIND, VNNI>(c[i][j + 1], w1, word);
      if constexpr (R > 1 && !VNNI) add_now(c[i][j], c[i][j + 1]);
    }
  };
  pair(0, weights<KIND, S, V>(group), weights<KIND, S, V + 1>(group));
  if constexpr (N == 4) pair(2, weights<KIND, S, 2>(group), weights<KIND, S, 3>(group));
}
template <BlockKind KIND, bool VNNI, int S, int V, int R, int N>
PD_INLINE void four_steps(Ints (&c)[R][N], const char *group, const RowPointers &x) {
  block_step<KIND, VNNI, S, V>(c, group, x), block_step<KIND, VNNI, S + 1, V>(c, group, x);
  block_step<KIND, VNNI, S + 2, V>(c, group, x), block_step<KIND, VNNI, S + 3, V>(c, group, x);
}

// first * (the first sum of q_x) + second * (the second), in every lane.
PD_INLINE Ints sums_times(const char *x, int first, int second) {
  const Ints sums = set_ints((int32_t)load_word(x + offsetof(XGroup, sums)));
  return madd_shorts(sums, set_ints((int32_t)((uint32_t)(second & 0xffff) << 16 | (uint32_t)(first & 0xffff))));
}
template <BlockKind KIND, bool VNNI>
constexpr bool sums_16 = !VNNI && KIND != BlockKind::BYTES && KIND != BlockKind::SIX;
// Whether the first 16 values' sums are kept by themselves: they have a scale of their own, or 16 bits hold no more.
template <BlockKind KIND, bool VNNI>
constexpr bool in_halves = KIND == BlockKind::SIX || (!VNNI && KIND == BlockKind::E2M1);

template <BlockKind KIND, bool VNNI, int R, int N>
PD_INLINE void block_start(Ints (&c)[R][N], const RowPointers &x, bool first, bool second) {
  constexpr int ZERO = zero_of<KIND, VNNI>();
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    const bool zero = ZERO == 0 || sums_16<KIND, VNNI>;
    const Ints start = zero ? set_ints(0) : sums_times(x[i], first ? -ZERO : 0, second ? -ZERO : 0);
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) c[i][v] = start;
  }
}

// A group's scales of N vectors of outputs from V on: a, and a' or b.
template <BlockKind KIND, int V, int N>
PD_INLINE void block_scales(const char *unit, const char *scales, bool has_scales, Floats (&a)[N], Floats (&b)[N]) {
  constexpr int LANES = VECTOR / 4;
#pragma GCC unroll 4
  for (int v = 0; v < N; v++) {
    const int at = (V + v) * LANES;
    a[v] = load_halves(unit + at * 2);
    if constexpr (KIND == BlockKind::SIX) {
      b[v] = mul_floats(a[v], load_signed(scales + 32 + at));
      a[v] = mul_floats(a[v], load_signed(scales + at));
    }
    if constexpr (KIND == BlockKind::NIBBLES_MIN) {
      b[v] = load_halves(unit + 64 + at * 2);
      if (has_scales) {
        a[v] = mul_floats(a[v], load_bytes(scales + at));
        b[v] = mul_floats(b[v], load_bytes(scales + 32 + at));
      } else {
        b[v] = mul_floats(a[v], b[v]);
      }
    }
  }
}

// A group's sums of one vector of outputs, but for the scale of x. half: of 6 bits, of the first 16 values, and t of
// the second; sum: of x's q.
template <BlockKind KIND>
PD_INLINE Floats scaled_sums(Ints t, Ints half, Floats a, Floats b, Floats sum) {
  if constexpr (KIND == BlockKind::SIX) return add_floats(mul_floats(a, to_floats(half)), mul_floats(b, to_floats(t)));
  const Floats s = mul_floats(a, to_floats(t));
  return KIND == BlockKind::NIBBLES_MIN ? sub_floats(s, mul_floats(b, sum)) : s;
}

// A group's sums into acc. first_half: in halves, what the first 16 values gave.
template <BlockKind KIND, bool VNNI, int V, int R, int N>
PD_INLINE void block_end(const Ints (&c)[R][N], const int32_t *first_half, const RowPointers &x, const char *unit,
                         const char *scales, bool has_scales, float *acc) {
  Floats a[N], b[N];
  block_scales<KIND, V>(unit, scales, has_scales, a, b);
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    float x_scale;
    memcpy(&x_scale, x[i] + offsetof(XGroup, scale), 4);
    const Floats xs = set_floats(x_scale);
    constexpr int ZERO = zero_of<KIND, VNNI>();
    Floats sum = xs;
    if constexpr (KIND == BlockKind::NIBBLES_MIN) sum = to_floats(sums_times(x[i], 1, 1));
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) {
      Ints t = c[i][v];
      Ints half = t;
      if constexpr (in_halves<KIND, VNNI>) half = load_ints(first_half + i * 32 + (V + v) * (VECTOR / 4));
      if constexpr (sums_16<KIND, VNNI>) {
        t = madd_shorts(t, set_ints(0x00010001));
        if constexpr (in_halves<KIND, VNNI>) t = add_ints(t, madd_shorts(half, set_ints(0x00010001)));
        if constexpr (ZERO != 0) t = add_ints(t, sums_times(x[i], -ZERO, -ZERO));
      }
      const Floats s = scaled_sums<KIND>(t, half, a[v], b[v], sum);
      float *to = acc + i * 32 + (V + v) * (VECTOR / 4);
      store_floats(to, add_floats(load_floats(to), mul_floats(xs, s)));
    }
  }
}

template <BlockKind KIND, bool VNNI, int R, int V = 0>
PD_INLINE void block_group(const char *data, const RowPointers &x, const char *unit, const char *scales,
                           bool has_scales, float *acc) {
  constexpr int N = TOGETHER<R>;
  Ints c[R][N];
  alignas(64) int32_t first_half[in_halves<KIND, VNNI> ? R * 32 : 1];
  block_start<KIND, VNNI>(c, x, true, KIND != BlockKind::SIX);
  four_steps<KIND, VNNI, 0, V>(c, data, x);
  if constexpr (in_halves<KIND, VNNI>) {
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int v = 0; v < N; v++) store_ints(first_half + i * 32 + (V + v) * (VECTOR / 4), c[i][v]);
    block_start<KIND, VNNI>(c, x, false, true);
  }
  four_steps<KIND, VNNI, 4, V>(c, data, x);
  block_end<KIND, VNNI, V>(c, first_half, x, unit, scales, has_scales, acc);
  if constexpr (V + N < VECTORS) block_group<KIND, VNNI, R, V + N>(data, x, unit, scales, has_scales, acc);
}

#else
template <BlockKind KIND>
PD_INLINE void read_step(const uint8_t *group, int s, uint8_t (&w)[128]) {
  if constexpr (KIND == BlockKind::BYTES) return (void)memcpy(w, group + s * 128, 128);
  const uint8_t *high = group + s / 2 * 192, *low = KIND == BlockKind::SIX ? high + 64 + s % 2 * 64 : group + s * 64;
  for (int j = 0; j < 64; j++) w[j] = low[j] & 15, w[64 + j] = low[j] >> 4;
  if constexpr (KIND == BlockKind::E2M1)
    for (uint8_t &q : w) q = E2M1_VALUES[q];
  if constexpr (KIND == BlockKind::SIX)
    for (int j = 0; j < 64; j++)
      w[j] |= (high[j] >> s % 2 * 4 & 3) << 4, w[64 + j] |= (high[j] >> (s % 2 * 4 + 2) & 3) << 4;
}
template <BlockKind KIND, bool VNNI, int R>
PD_INLINE void block_group(const char *data, const RowPointers &x, const char *unit, const char *scales,
                           bool has_scales, float *acc) {
  static_assert(R == 1);
  constexpr bool SIX = KIND == BlockKind::SIX;
  constexpr int ZERO = zero_of<KIND, true>();
  XGroup g;
  memcpy(&g, x[0], sizeof g);
  int32_t t[2][32];
  for (int j = 0; j < 32; j++) t[0][j] = -ZERO * g.sums[0], t[1][j] = -ZERO * g.sums[1];
  for (int s = 0; s < 8; s++) {
    uint8_t w[128];
    read_step<KIND>((const uint8_t *)data, s, w);
    const int8_t *q = g.q + s * 4;
    for (int j = 0; j < 32; j++)
      t[s / 4][j] += q[0] * w[j * 4] + q[1] * w[j * 4 + 1] + q[2] * w[j * 4 + 2] + q[3] * w[j * 4 + 3];
  }
  for (int j = 0; j < 32; j++) {
    uint16_t d, other;
    memcpy(&d, unit + j * 2, 2), memcpy(&other, unit + 64 + j * 2, 2);
    const float a = half_to_float(d);
    float s;
    if constexpr (SIX) {
      const float first = a * (float)(int8_t)scales[j], second = a * (float)(int8_t)scales[32 + j];
      const float one = first * (float)t[0][j], two = second * (float)t[1][j];
      s = one + two;
    } else {
      const float own = has_scales ? a * (float)(uint8_t)scales[j] : a;
      s = own * (float)(t[0][j] + t[1][j]);
      if constexpr (KIND == BlockKind::NIBBLES_MIN) {
        const float b = half_to_float(other) * (has_scales ? (float)(uint8_t)scales[32 + j] : a);
        const float minimum = b * (float)(g.sums[0] + g.sums[1]);
        s = s - minimum;
      }
    }
    const float product = g.scale * s;
    acc[j] = acc[j] + product;
  }
}
#endif

// Bytes of a unit before its groups, and of a group's values.
template <BlockKind KIND>
constexpr int UNIT_HEADER = KIND == BlockKind::NIBBLES_MIN ? 128 : 64;
template <BlockKind KIND>
constexpr int GROUP_DATA = KIND == BlockKind::BYTES ? 1024 : KIND == BlockKind::SIX ? 768 : 512;

template <BlockKind KIND, bool VNNI, int R>
void block_tile(const BlockTileArgs &t) {
  constexpr int HEADER = UNIT_HEADER<KIND>, DATA = GROUP_DATA<KIND>;
  const int group_header = t.has_scales ? 64 : 0;
  const char *panel = t.panel;
  Ahead ahead = t.ahead;
  if (t.first) memset(t.acc, 0, R * 128);
  RowPointers x(t.x, t.x_stride);
  for (int64_t u = 0; u < t.num_units; u++) {
    const char *unit = panel;
    panel += HEADER;
    for (int g = 0; g < t.groups; g++) {
      ahead.near ? ahead.fetch<true>(t.lines_ahead) : ahead.fetch<false>(t.lines_ahead);
      x.pin();
      block_group<KIND, VNNI, R>(panel + group_header, x, unit, panel, t.has_scales, t.acc);
      x.advance(X_BYTES), panel += group_header + DATA;
    }
  }
}

using BlockTileFn = void (*)(const BlockTileArgs &);
template <BlockKind KIND, bool VNNI, size_t... R>
BlockTileFn pick_block_tile(std::index_sequence<R...>, int rows) {
  static constexpr BlockTileFn fn[] = {block_tile<KIND, VNNI, (int)R + 1>...};
  return fn[rows - 1];
}
template <BlockKind KIND>
BlockTileFn pick_block_tile(int rows, bool vnni) {
  constexpr auto heights = std::make_index_sequence<BLOCK_TILE_ROWS>();
#if PD_LEVEL >= 3
  return pick_block_tile<KIND, true>(heights, rows);
#else
  if constexpr (PD_LEVEL == 2)
    if (vnni) return pick_block_tile<KIND, true>(heights, rows);
  return pick_block_tile<KIND, false>(heights, rows);
#endif
}

}  // namespace pagedec
