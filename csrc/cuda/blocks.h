// Weights in blocks on a device: a packed weight is units in panels of 32 outputs (common/blocks.h), as long as a
// CPU's. Lane 4 g + t of a warp has of outputs g, g + 8, g + 16 and g + 24 values 8 t ... 8 t + 7 of a group: what it
// reads of one is 16 bytes, which lie lane by lane.
//
// A unit is
//   64 bytes    d of each output, fp16; where there are minima or zero points, 64 more: theirs
//   groups      of 32 values: Q4_K and Q6_K have 64 bytes of scales first ([32] sc, [32] m; [2][32] sc of 16 values),
//               then words [32 lanes][4 outputs]:
//     4 bits    of the lane's first four values in the low halves of bytes, of the others in the high ones
//     8 bits    of the first four values, then [32][4] of the others
//     6 bits    nibbles as of 4 bits, then [32 lanes][2] words of high bits: of the first four values, of the others;
//               bits 2 i and 2 i + 1 of a byte are those of the lane's output i
#pragma once
#include "common/blocks.h"
#include "cuda/device.h"

namespace pagedec {

constexpr int kGroupLanes = X_GROUP / 8;  // that have an output's group
constexpr int kPanelOutputs = 32;
constexpr int kPanelTiles = kPanelOutputs / 8;

// Where a group of a panel lies.
struct GroupPlace {
  const char *unit, *scales, *data;

  PD_DEVICE void advance(int bytes) { unit += bytes, scales += bytes, data += bytes; }
};
PD_DEVICE GroupPlace group_place(const BlockShape &shape, const char *panel, int64_t group) {
  const int whole = shape.group_header + shape.group_data, groups = shape.values / X_GROUP;  // a power of two
  const int64_t units = groups == 8 ? group / 8 : groups == 4 ? group / 4 : group;
  const char *unit = panel + units * (shape.header + groups * whole);
  const char *scales = unit + shape.header + (group - units * groups) * whole;
  return {unit, scales, scales + shape.group_header};
}

// From a group to the one `count` behind it, a multiple of the longest block's groups.
PD_DEVICE int stride_of_groups(const BlockShape &shape, int count) {
  const int whole = shape.group_header + shape.group_data, groups = shape.values / X_GROUP;
  return count / groups * (shape.header + groups * whole);
}

// The numbers of an output's group as they are stored: d and a minimum or zero point, and whole scales.
struct StoredScales {
  uint32_t halves, bytes;
};
template <BlockKind kKind>
PD_DEVICE StoredScales load_scales(const BlockShape &shape, const GroupPlace &at, int output) {
  StoredScales stored = {((const uint16_t *)at.unit)[output], 0};
  if (kKind == BlockKind::NIBBLES_MIN)
    stored.halves |= (uint32_t)((const uint16_t *)at.unit)[kPanelOutputs + output] << 16;
  if (shape.has_scales) {  // words, of which a warp reads as many bytes
    const uint32_t *words = (const uint32_t *)at.scales + output / 4;
    const int shift = output % 4 * 8;
    stored.bytes = (words[0] >> shift & 255) | (words[kPanelOutputs / 4] >> shift & 255) << 8;
  }
  return stored;
}

// a, and b, or of 6 bits a of the other 16 values (pagedec.h), exact. Of zero points b is z itself where `plain`.
struct Factors {
  float a, b;
};
template <BlockKind kKind>
PD_DEVICE Factors factors(const BlockShape &shape, StoredScales stored, bool plain = false) {
  const float d = half_float((uint16_t)stored.halves), other = half_float((uint16_t)(stored.halves >> 16));
  const int low = (int)(stored.bytes & 255), high = (int)(stored.bytes >> 8);
  if (kKind == BlockKind::SIX) return {d * (float)(int8_t)low, d * (float)(int8_t)high};
  if (kKind != BlockKind::NIBBLES_MIN) return {d, 0.0f};
  if (shape.has_scales) return {d * (float)low, other * (float)high};
  return {d, plain ? other : d * other};
}

// Value v of a group of an output, as the format says it: every product and difference is rounded by itself.
template <BlockKind kKind>
PD_DEVICE float block_value(const BlockShape &shape, const GroupPlace &at, int output, int v) {
  constexpr int kZero = kKind == BlockKind::NIBBLES ? 8 : kKind == BlockKind::SIX ? 32 : 0;
  const uint32_t *words = (const uint32_t *)at.data;
  const int lane = output % 8 * kGroupLanes + v / 8, tile = output / 8, half = v % 8 / 4, shift = v % 4 * 8;
  const Factors by = factors<kKind>(shape, load_scales<kKind>(shape, at, output), true);
  if (kKind == BlockKind::BYTES)
    return by.a * (float)(int8_t)(words[(half * kWarp + lane) * kPanelTiles + tile] >> shift);
  uint32_t q = words[lane * kPanelTiles + tile] >> (shift + 4 * half) & 15;
  if (kKind == BlockKind::SIX) q |= (words[kWarp * kPanelTiles + lane * 2 + half] >> (shift + 2 * tile) & 3) << 4;
  const float x = (float)((int)q - kZero);
  if (kKind != BlockKind::NIBBLES_MIN) return (kKind == BlockKind::SIX && v >= 16 ? by.b : by.a) * x;
  return shape.has_scales ? by.a * x - by.b : by.a * (x - by.b);
}
PD_DEVICE float value_in_blocks(const Segments &table, int64_t output, int64_t d) {
  int i = 0;
  while (i + 1 < table.count && output / kPanelOutputs >= table.one[i].end) i++;
  const Segments::One &own = table.one[i];
  const char *panel = own.base + (output / kPanelOutputs - own.begin) * own.panel_bytes;
  const GroupPlace at = group_place(own.shape, panel, d / X_GROUP);
  const int column = (int)(output % kPanelOutputs), v = (int)(d % X_GROUP);
  switch (own.shape.kind) {
    case BlockKind::NIBBLES: return block_value<BlockKind::NIBBLES>(own.shape, at, column, v);
    case BlockKind::NIBBLES_MIN: return block_value<BlockKind::NIBBLES_MIN>(own.shape, at, column, v);
    case BlockKind::SIX: return block_value<BlockKind::SIX>(own.shape, at, column, v);
    default: return block_value<BlockKind::BYTES>(own.shape, at, column, v);
  }
}

}  // namespace pagedec
