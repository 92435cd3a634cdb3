// Weights in blocks into panels (blocks.h), and single outputs out of them.
#include "cpu/blocks.h"

#include <omp.h>

namespace pagedec {
namespace {

// A block as plain numbers. q without a sign: 8, 32 or 128 more than the value where the format has no other zero.
struct PlainBlock {
  uint16_t d, other;             // fp16; other: of minima, or a zero point
  uint8_t scales[16];            // Q4_K: 8, and minima in the others; Q6_K: int8
  uint8_t q[LONGEST_BLOCK];
};

void read_nibbles(const uint8_t *from, int count, uint8_t *q) {
  for (int j = 0; j < count; j++) q[j] = from[j] & 15, q[j + count] = from[j] >> 4;
}

void read_q4_k(const uint8_t *from, PlainBlock &b) {
  memcpy(&b.d, from, 2), memcpy(&b.other, from + 2, 2);
  const uint8_t *low = from + 4, *high = from + 8, *rest = from + 12;
  for (int j = 0; j < 4; j++) {
    b.scales[j] = low[j] & 63, b.scales[j + 4] = (rest[j] & 15) | (low[j] >> 2 & 48);
    b.scales[j + 8] = high[j] & 63, b.scales[j + 12] = (rest[j] >> 4) | (high[j] >> 2 & 48);
  }
  for (int pair = 0; pair < 4; pair++) read_nibbles(from + 16 + pair * 32, 32, b.q + pair * 64);
}

void read_q6_k(const uint8_t *from, PlainBlock &b) {
  memcpy(b.scales, from + 192, 16), memcpy(&b.d, from + 208, 2);
  for (int half = 0; half < 2; half++) {
    uint8_t *q = b.q + half * 128;
    read_nibbles(from + half * 64, 64, q);
    const uint8_t *high = from + 128 + half * 32;
    for (int part = 0; part < 4; part++)
      for (int j = 0; j < 32; j++) q[part * 32 + j] |= (high[j] >> part * 2 & 3) << 4;
  }
}

void read_block(const BlockShape &shape, const uint8_t *from, PlainBlock &b) {
  if (shape.kind == BlockKind::SIX) return read_q6_k(from, b);
  if (shape.has_scales) return read_q4_k(from, b);
  memcpy(&b.d, from, 2);
  if (shape.kind == BlockKind::NIBBLES_MIN) memcpy(&b.other, from + 2, 2);
  const uint8_t *values = from + shape.header / 32;
  if (shape.kind != BlockKind::BYTES) return read_nibbles(values, shape.values / 2, b.q);
  for (int j = 0; j < shape.values; j++) b.q[j] = values[j] ^ 128;
}

// Where the four values of an output's step lie behind the group's header: a word, and how far they are shifted in it;
// and of 6 bits the word of the higher ones.
struct Place {
  int word, shift, high_word, high_shift;
};
Place place_of(BlockKind kind, int output, int step) {
  const int lane = output % 16 * 4, upper = output / 16;
  if (kind == BlockKind::BYTES) return {step * 128 + output * 4, 0, 0, 0};
  if (kind != BlockKind::SIX) return {step * 64 + lane, upper * 4, 0, 0};
  const int pair = step / 2 * 192;
  return {pair + 64 + step % 2 * 64 + lane, upper * 4, pair + lane, step % 2 * 4 + upper * 2};
}
constexpr uint32_t LOW_BITS = 0x0f0f0f0f, HIGH_BITS = 0x03030303;  // of four values

void add_bits(uint8_t *word, uint32_t bits) {
  uint32_t all;
  memcpy(&all, word, 4);
  all |= bits;
  memcpy(word, &all, 4);
}
void write_step(BlockKind kind, uint8_t *group, int output, int step, uint32_t q) {
  const Place at = place_of(kind, output, step);
  add_bits(group + at.word, kind == BlockKind::BYTES ? q : (q & LOW_BITS) << at.shift);
  if (kind == BlockKind::SIX) add_bits(group + at.high_word, (q >> 4 & HIGH_BITS) << at.high_shift);
}
uint32_t read_step(BlockKind kind, const uint8_t *group, int output, int step) {
  const Place at = place_of(kind, output, step);
  uint32_t q, high;
  memcpy(&q, group + at.word, 4), memcpy(&high, group + at.high_word, 4);
  if (kind == BlockKind::BYTES) return q;
  q = q >> at.shift & LOW_BITS;
  return kind == BlockKind::SIX ? q | (high >> at.high_shift & HIGH_BITS) << 4 : q;
}

// A unit's bytes of one output; the others' stay.
void write_unit(const BlockShape &shape, const PlainBlock &b, int output, uint8_t *unit) {
  memcpy(unit + output * 2, &b.d, 2);
  if (shape.kind == BlockKind::NIBBLES_MIN) memcpy(unit + 64 + output * 2, &b.other, 2);
  for (int g = 0; g < shape.groups(); g++) {
    uint8_t *group = unit + shape.header + g * (shape.group_header + shape.group_data);
    const bool six = shape.kind == BlockKind::SIX;
    if (shape.has_scales) {
      group[output] = b.scales[six ? g * 2 : g];
      group[32 + output] = b.scales[six ? g * 2 + 1 : g + 8];
    }
    group += shape.group_header;
    for (int step = 0; step < 8; step++) {
      uint32_t q;
      memcpy(&q, b.q + g * X_GROUP + step * 4, 4);
      write_step(shape.kind, group, output, step, q);
    }
  }
}

// Values of one group of an output; every product and difference is rounded by itself.
void read_group(const BlockShape &shape, const uint8_t *unit, int g, int output, float *values) {
  const uint8_t *group = unit + shape.header + g * (shape.group_header + shape.group_data);
  uint16_t d, other = 0;
  memcpy(&d, unit + output * 2, 2);
  if (shape.kind == BlockKind::NIBBLES_MIN) memcpy(&other, unit + 64 + output * 2, 2);
  float scale[2] = {half_to_float(d), half_to_float(d)}, minimum = half_to_float(other);
  if (shape.kind == BlockKind::SIX)
    for (int h = 0; h < 2; h++) scale[h] = scale[h] * (float)(int8_t)group[h * 32 + output];
  else if (shape.has_scales)
    scale[0] = scale[1] = scale[0] * (float)group[output], minimum = minimum * (float)group[32 + output];
  group += shape.group_header;
  constexpr int ZERO[] = {8, 0, 32, 128, E2M1_ZERO};  // of each kind
  const int zero = ZERO[(int)shape.kind];
  for (int j = 0; j < X_GROUP; j++) {
    const uint32_t word = read_step(shape.kind, group, output, j / 4);
    const int byte = word >> j % 4 * 8 & 255, own = shape.kind == BlockKind::E2M1 ? E2M1_VALUES[byte] : byte;
    const float a = scale[j / 16], q = (float)(own - zero);
    if (shape.kind != BlockKind::NIBBLES_MIN) values[j] = a * q;
    else values[j] = shape.has_scales ? a * q - minimum : a * (q - minimum);
  }
}

}  // namespace

float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = (rest << 13) + (112u << 23);  // another bias
  if (rest >= 0x7c00) bits += 112u << 23;       // infinity and NaN
  float f;
  memcpy(&f, &bits, 4);
  if (rest < 0x400) f = (float)rest * 0x1p-24f;
  memcpy(&bits, &f, 4);
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}

void read_blocks(const Segments &segments, int64_t output, int64_t k, float *row) {
  const BlockShape shape = segments.of(output / 32).shape;
  const uint8_t *unit = (const uint8_t *)segments.panel(output / 32);
  for (int64_t u = 0; u < k / shape.values; u++, unit += shape.unit_bytes())
    for (int g = 0; g < shape.groups(); g++, row += X_GROUP) read_group(shape, unit, g, (int)(output % 32), row);
}

}  // namespace pagedec

using namespace pagedec;

extern "C" {
int64_t pd_packed_blocks_bytes(int64_t n, int64_t k, int32_t format) {
  if (check_size("pd_packed_blocks_bytes", n, k) || check_blocks("pd_packed_blocks_bytes", k, format)) return -1;
  return (n + 31) / 32 * block_shape(format).panel_bytes(k);
}

int pd_pack_blocks(pd_context *context, const void *blocks, int64_t n, int64_t k, int32_t format, void *packed) {
  const char *name = "pd_pack_blocks";
  if (!context) return fail("%s: context is NULL", name);
  if (!blocks) return fail("%s: blocks is NULL", name);
  if (check_pack(name, context, blocks, packed) || check_size(name, n, k) || check_blocks(name, k, format)) return -1;
  const BlockShape shape = block_shape(format);
  const int64_t units = k / shape.values, panel_bytes = shape.panel_bytes(k);
  const int threads = num_threads(*context);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t p = 0; p < (n + 31) / 32; p++) {
    uint8_t *panel = (uint8_t *)packed + p * panel_bytes;
    memset(panel, 0, panel_bytes);
    PlainBlock plain;
    for (int64_t u = 0; u < units; u++)
      for (int c = 0; c < 32 && p * 32 + c < n; c++) {
        read_block(shape, (const uint8_t *)blocks + ((p * 32 + c) * units + u) * shape.num_bytes, plain);
        write_unit(shape, plain, c, panel + u * shape.unit_bytes());
      }
  }
  return 0;
}
}
