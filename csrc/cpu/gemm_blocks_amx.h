// Weights in blocks on the matrix unit: one or two tiles of rows by a slice of a panel.
//
// A group's 32 values (of 6 bits twice 16) are one instruction's for 16 rows and 16 outputs: sums of integers, exact,
// so what gemm_blocks.h gives. They leave the unit for each group's scales, and on to acc while the next group is
// multiplied. Weights of 4 and 6 bits become bytes before, once for all rows of a block.
//
// Expected, not measured: of a row and a group the vector unit has 14 to 17 cycles' work with byte products (VNNI),
// half of it the products. Where plain int8 leaves the unit in this way, 32 rows took 230 to 270 cycles: 8 a row.
#pragma once
#include "cpu/gemm_amx.h"
#include "cpu/gemm_blocks.h"

namespace pagedec {

// Of a slice. It begins where a block does, so one may be longer.
constexpr int64_t AMX_BYTES = (BLOCK_AMX_SLICE_VALUES + LONGEST_BLOCK) * 32;
static_assert(BLOCK_AMX_SLICE_VALUES >= 2 * LONGEST_BLOCK, "of shorter slices one may be empty");

struct AmxBlockArgs {
  const char *x;                 // first group of the first row
  int64_t x_stride;              // bytes from row to row
  int64_t second;                // bytes from a tile's x to that of the next
  int height;
  const char *panel;             // first unit
  const char *bytes;             // of every group, [8][32][4] q; of 8 bits they are in the panel
  int64_t num_units;
  int groups;                    // of a unit
  bool has_scales;               // of groups, beside d
  bool first;                    // sums start at zero, not at what acc holds
  float *acc;                    // [tiles][16][32], 64-byte aligned
  Ahead ahead;
  int lines_ahead;               // in every group
};

// Words of a row of x that one instruction takes: of 6 bits a half of a group, which has a scale of its own.
inline int amx_words(BlockKind kind) { return kind == BlockKind::SIX ? 4 : 8; }

#if PD_LEVEL >= 4
template <BlockKind KIND, int... S>
PD_INLINE void unpack_group(const char *data, char *to, std::integer_sequence<int, S...>) {
  (store_ints(to + S * 128, weights<KIND, S, 0>(data)), ...);
  (store_ints(to + S * 128 + 64, weights<KIND, S, 1>(data)), ...);
}
template <BlockKind KIND>
void unpack(const char *panel, int64_t num_units, int groups, bool has_scales, char *to) {
  for (int64_t u = 0; u < num_units; u++) {
    panel += UNIT_HEADER<KIND>;
    for (int g = 0; g < groups; g++, panel += GROUP_DATA<KIND>, to += 1024) {
      if (has_scales) panel += 64;
      unpack_group<KIND>(panel, to, std::make_integer_sequence<int, 8>());
    }
  }
}

// What is needed of a group when its sums have left the unit.
struct AmxGroup {
  const char *x, *unit, *scales;
};
template <int HALVES>
using AmxSums = int32_t[HALVES][2 * AMX_ROWS][32];

template <BlockKind KIND, int TILES>
PD_INLINE void add_sums(const AmxBlockArgs &t, const AmxGroup &group, const int32_t (*sums)[2 * AMX_ROWS][32]) {
  constexpr bool SIX = KIND == BlockKind::SIX;
  constexpr int ZERO = zero_of<KIND, true>();
  const int64_t stride = t.x_stride;
  Floats a[VECTORS], b[VECTORS];
  block_scales<KIND, 0>(group.unit, group.scales, t.has_scales, a, b);
  for (int i = 0; i < TILES; i++) {
    const char *x = group.x + i * t.second;
    const int32_t(*sum)[32] = sums[0] + i * AMX_ROWS, (*const end)[32] = sum + t.height;
    for (float *acc = t.acc + i * AMX_ROWS * 32; sum < end; sum++, acc += 32, x += stride) {
      float scale;
      memcpy(&scale, x + offsetof(XGroup, scale), 4);
      const Floats xs = set_floats(scale);
      Floats of_x = xs, out[VECTORS];
      if constexpr (KIND == BlockKind::NIBBLES_MIN) of_x = to_floats(sums_times(x, 1, 1));
      Ints start = set_ints(0), second = start;
      if constexpr (ZERO != 0) start = sums_times(x, -ZERO, SIX ? 0 : -ZERO);
      if constexpr (SIX) second = sums_times(x, 0, -ZERO);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        const Ints one = add_ints(start, load_ints(*sum + v * 16));
        Ints two = one;
        if constexpr (SIX) two = add_ints(second, load_ints(sum[2 * AMX_ROWS] + v * 16));
        out[v] = add_floats(load_floats(acc + v * 16), mul_floats(xs, scaled_sums<KIND>(two, one, a[v], b[v], of_x)));
      }
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) store_floats(acc + v * 16, out[v]);
    }
  }
}

template <BlockKind KIND, int TILES>
void amx_blocks(const AmxBlockArgs &t) {
  constexpr int HALVES = KIND == BlockKind::SIX ? 2 : 1;
  alignas(64) AmxSums<HALVES> sums[2];
  const char *panel = t.panel, *bytes = t.bytes, *x = t.x;
  Ahead ahead = t.ahead;
  AmxGroup before{};
  int turn = 0;
  if (t.first) memset(t.acc, 0, TILES * AMX_ROWS * 128);
  for (int64_t u = 0; u < t.num_units; u++) {
    const char *unit = panel;
    panel += UNIT_HEADER<KIND>;
    for (int g = 0; g < t.groups; g++, x += X_BYTES, turn ^= 1) {
      const char *scales = panel;
      if (t.has_scales) panel += 64;
      if constexpr (KIND == BlockKind::BYTES) bytes = panel;
      ahead.fetch<false>(t.lines_ahead);
      for (int h = 0; h < HALVES; h++) {
        zero_sums<0>();
        if constexpr (TILES == 2) zero_sums<2>();
        multiply_line<true, TILES>(x + h * 16, t.x_stride, t.second, bytes + h * 512, [] {});
        if (h + 1 == HALVES && before.x) add_sums<KIND, TILES>(t, before, sums[turn ^ 1]);
        store_sums<0>(sums[turn][h][0]);
        if constexpr (TILES == 2) store_sums<2>(sums[turn][h][AMX_ROWS]);
      }
      before = {x, unit, scales};
      panel += GROUP_DATA<KIND>, bytes += 1024;
    }
  }
  add_sums<KIND, TILES>(t, before, sums[turn ^ 1]);
}

template <BlockKind KIND>
void amx_blocks(const AmxBlockArgs &t, int tiles) {
  tiles == 2 ? amx_blocks<KIND, 2>(t) : amx_blocks<KIND, 1>(t);
}
inline void amx_blocks(BlockKind kind, const AmxBlockArgs &t, int tiles) {
  switch (kind) {
    case BlockKind::NIBBLES: return amx_blocks<BlockKind::NIBBLES>(t, tiles);
    case BlockKind::NIBBLES_MIN: return amx_blocks<BlockKind::NIBBLES_MIN>(t, tiles);
    case BlockKind::SIX: return amx_blocks<BlockKind::SIX>(t, tiles);
    case BlockKind::E2M1: return amx_blocks<BlockKind::E2M1>(t, tiles);
    default: return amx_blocks<BlockKind::BYTES>(t, tiles);
  }
}
// The values of a slice as amx_blocks takes them.
inline void unpack(const BlockShape &shape, const char *panel, int64_t num_units, char *to) {
  switch (shape.kind) {
    case BlockKind::NIBBLES: return unpack<BlockKind::NIBBLES>(panel, num_units, shape.groups(), shape.has_scales, to);
    case BlockKind::NIBBLES_MIN:
      return unpack<BlockKind::NIBBLES_MIN>(panel, num_units, shape.groups(), shape.has_scales, to);
    case BlockKind::SIX: return unpack<BlockKind::SIX>(panel, num_units, shape.groups(), shape.has_scales, to);
    case BlockKind::E2M1: return unpack<BlockKind::E2M1>(panel, num_units, shape.groups(), shape.has_scales, to);
    default: return;
  }
}
#else  // never called: what calls them is left out by if constexpr
PD_INLINE void amx_blocks(BlockKind, const AmxBlockArgs &, int) {}
PD_INLINE void unpack(const BlockShape &, const char *, int64_t, char *) {}
#endif

}  // namespace pagedec
