// Weights in blocks: how a format's blocks become a panel of 32 outputs, and one output's block read out of it.
//
// A panel is a row of units, each a block of every output. A unit is
//   64 bytes    d of each output, fp16; where there are minima or zero points, 64 more: theirs
//   groups      of 32 values: Q4_K and Q6_K have 64 bytes of scales first ([32] sc, [32] m; [2][32] sc of 16 values),
//               then 8 steps of 4 values of each output:
//     4 bits    64 bytes a step: outputs 0-15 in the low nibbles, [16][4], and 16-31 in the high ones
//     8 bits    128 bytes a step: q + 128, [32][4]
//     6 bits    192 bytes two steps: 64 of high bits, 2 of each value ([16][4]: outputs 0-15 and 16-31 of the first
//               step, then of the second, from the lowest bits on), then the steps' nibbles as of 4 bits
// so that 64 bytes are a vector of each half of the outputs after a shift and a mask, and memory is one stream.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/internal.h"

namespace pagedec {

enum class BlockKind { NIBBLES, NIBBLES_MIN, SIX, BYTES };  // _MIN: with a minimum or a zero point

constexpr int X_GROUP = 32;      // values of x that share a scale
constexpr int LONGEST_BLOCK = 256;

// A format's block as it comes, and as a part of a unit.
struct BlockShape {
  BlockKind kind;
  bool has_scales;               // of groups, in whole numbers
  int values, num_bytes;         // of a block as it comes
  int header, group_header, group_data;  // bytes of a unit

  constexpr int groups() const { return values / X_GROUP; }
  constexpr int unit_bytes() const { return header + groups() * (group_header + group_data); }
  constexpr int64_t panel_bytes(int64_t k) const { return k / values * unit_bytes(); }
};

constexpr BlockShape block_shape(int format) {
  switch (format) {
    case PD_Q4_0: return {BlockKind::NIBBLES, false, 32, 18, 64, 0, 512};
    case PD_INT4_128: return {BlockKind::NIBBLES, false, 128, 66, 64, 0, 512};
    case PD_INT4_ZERO_32: return {BlockKind::NIBBLES_MIN, false, 32, 20, 128, 0, 512};
    case PD_INT4_ZERO_128: return {BlockKind::NIBBLES_MIN, false, 128, 68, 128, 0, 512};
    case PD_Q4_K: return {BlockKind::NIBBLES_MIN, true, 256, 144, 128, 64, 512};
    case PD_Q6_K: return {BlockKind::SIX, true, 256, 210, 64, 64, 768};
    default: return {BlockKind::BYTES, false, 32, 34, 64, 0, 1024};  // PD_Q8_0
  }
}

// Where a weight's segments lie: some panels each, one behind the other.
struct Segments {
  struct One {
    BlockShape shape;
    int64_t begin, end;          // panels
    const char *base;            // of its first
    int64_t panel_bytes;
  };
  One one[PD_MAX_SEGMENTS];
  int count;

  Segments(const void *packed, const pd_segment *segments, int num_segments, int64_t n, int64_t k)
      : count(num_segments) {
    const char *base = (const char *)packed;
    for (int i = 0; i < count; i++) {
      const int64_t begin = segments[i].first_output / 32;
      const int64_t end = i + 1 < count ? segments[i + 1].first_output / 32 : (n + 31) / 32;
      const BlockShape shape = block_shape(segments[i].format);
      one[i] = {shape, begin, end, base, shape.panel_bytes(k)};
      base += (end - begin) * one[i].panel_bytes;
    }
  }
  const One &of(int64_t panel) const {
    int i = 0;
    while (i + 1 < count && panel >= one[i].end) i++;
    return one[i];
  }
  const char *panel(int64_t p) const {
    const One &s = of(p);
    return s.base + (p - s.begin) * s.panel_bytes;
  }
};

float half_to_float(uint16_t half);
// One output's row, [k] fp32: every value as the format says it.
void read_blocks(const Segments &, int64_t output, int64_t k, float *row);

}  // namespace pagedec
