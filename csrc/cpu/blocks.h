// Weights in blocks: how a format's blocks become a panel of 32 outputs, and one output's block read out of it.
//
// A panel is a row of units, each a block of every output. A unit is
//   64 bytes    d of each output, fp16; where there are minima or zero points, 64 more: theirs
//   groups      of 32 values: Q4_K and Q6_K have 64 bytes of scales first ([32] sc, [32] m; [2][32] sc of 16 values),
//               then 8 steps of 4 values of each output:
//     4 bits    64 bytes a step: outputs 0-15 in the low nibbles, [16][4], and 16-31 in the high ones
//               (of MXFP4 as they come: kernels look up what each is)
//     8 bits    128 bytes a step: q + 128, [32][4]
//     6 bits    192 bytes two steps: 64 of high bits, 2 of each value ([16][4]: outputs 0-15 and 16-31 of the first
//               step, then of the second, from the lowest bits on), then the steps' nibbles as of 4 bits
// so that 64 bytes are a vector of each half of the outputs after a shift and a mask, and memory is one stream.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/blocks.h"

namespace pagedec {

// Of MXFP4: twice what each nibble is, and 12 more.
constexpr int E2M1_ZERO = 12;
alignas(16) constexpr uint8_t E2M1_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

float half_to_float(uint16_t half);
// One output's row, [k] fp32: every value as the format says it.
void read_blocks(const Segments &, int64_t output, int64_t k, float *row);

}  // namespace pagedec
