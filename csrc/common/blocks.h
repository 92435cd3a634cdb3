// Weights in blocks: what a format's blocks are, and where the panels of 32 outputs lie that are made of them. A panel
// is a row of units, each a block of every output: first the numbers that the block has once, then its groups of 32
// values, each behind scales of its own where there are some. In which order a group's values lie is the kernels'
// affair.
#pragma once
#include <cstdint>

#include "common/internal.h"

namespace pagedec {

// _MIN: with a minimum or a zero point; E2M1: floats of 4 bits, which CPUs alone have
enum class BlockKind { NIBBLES, NIBBLES_MIN, SIX, BYTES, E2M1 };

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
    case PD_MXFP4: return {BlockKind::E2M1, false, 32, 18, 64, 0, 512};
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

}  // namespace pagedec
