// Linear layers with int8 weights: how W lies, what rows of x become, and how groups are added.
//
// Layout   W [N padded to 32][K padded to 64] as bytes q, zeros behind; then the outputs' scales (fp32). A group of 64
//          of k is two instructions: a lane has 16 bytes of it, k = 16t ... 16t + 15 (t = lane % 4), of W and of x
//          alike, so that no operand is rearranged.
// x        Nobody on the host knows how many rows there are, so there is no memory that they could lie in as int8:
//          who multiplies rows makes them int8 first, in registers. Four lanes have a row's group, and the scale that
//          they agree on is what the same lanes need for their sums.
// Bits     A group's sum is an integer that fp32 holds; groups are added from the first on, each operation rounded by
//          itself: what all instruction sets of a CPU give.
#pragma once
#include "cuda/gemm.h"

namespace pagedec::gemm {

constexpr int kGroup = 64, kOwnValues = kGroup / 4;  // of a row; of those, a lane's

PD_DEVICE int64_t pad_groups(int64_t k) { return (k + kGroup - 1) / kGroup * kGroup; }
PD_DEVICE int64_t pad_outputs(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }
PD_DEVICE const float *scales_of(const pd_gemm_args &a) {
  return (const float *)((const char *)a.packed + pad_outputs(a.n) * pad_groups(a.k));
}

struct alignas(16) Piece {  // 16 bytes of a row of W, or of int8 x as an instruction takes it
  uint32_t words[4];
};

// A lane's values of a group, as they lie in memory.
template <class E>
struct Values {
  static constexpr int kPieces = kOwnValues * (int)sizeof(E) / 16, kInPiece = 16 / (int)sizeof(E);
  Piece pieces[kPieces];

  // Of a row that may end, or begin anywhere: what is not there is 0.
  PD_DEVICE void load(const E *p, int64_t num_left, bool is_aligned) {
    if (is_aligned && num_left >= kOwnValues) {
      PD_UNROLL for (int i = 0; i < kPieces; i++) pieces[i] = load_whole<Piece>(p + i * kInPiece);
      return;
    }
    PD_UNROLL for (int i = 0; i < kPieces; i++) pieces[i] = {};
    if (num_left <= 0) return;
    PD_UNROLL for (int i = 0; i < kOwnValues; i++)
      if (i < num_left) add(i, p[i]);
  }
  PD_DEVICE float operator[](int i) const;

 private:
  PD_DEVICE void add(int i, E x);
};
template <>
PD_DEVICE float Values<float>::operator[](int i) const {
  return bits_float(pieces[i / 4].words[i % 4]);
}
template <class E>
PD_DEVICE float Values<E>::operator[](int i) const {
  return to_float(E{(uint16_t)(pieces[i / 8].words[i % 8 / 2] >> 16 * (i % 2))});
}
template <>
PD_DEVICE void Values<float>::add(int i, float x) {
  pieces[i / 4].words[i % 4] = float_bits(x);
}
template <class E>
PD_DEVICE void Values<E>::add(int i, E x) {
  pieces[i / 8].words[i % 8 / 2] |= (uint32_t)x.bits << 16 * (i % 2);
}
template <class E>
PD_DEVICE bool begins_aligned(const E *x, int64_t k) {
  return k * (int64_t)sizeof(E) % 16 == 0 && (uintptr_t)x % 16 == 0;
}

// Magnitudes of floats compare like integers, NaN above everything: one NaN makes a whole group NaN.
PD_DEVICE uint32_t magnitude(float x) { return float_bits(x) & 0x7fffffff; }
// 127 / max |x|, or 0 where that is no number: values of 0, of less than fp32 divides by, or with an infinity or NaN
// among them.
PD_DEVICE float int8_factor(float max) {
  return max >= 0x1p-120f && max <= 3.40282347e38f ? quotient(127.0f, max) : 0.0f;
}
// To nearest even, |x| <= 127: 1.5 * 2^23 leaves no room for a fraction, so it is the integer's lowest bits.
constexpr float kWhole = 12582912.0f;
constexpr int32_t kWholeBits = 0x4b400000;
PD_DEVICE uint32_t int8_bits(float x) { return float_bits(x + kWhole); }

// A lane's part of a group of a row becomes q; all lanes call it. The group's scale.
template <class E>
PD_DEVICE float quantize(const Values<E> &x, uint32_t (&q)[4]) {
  uint32_t max_bits = 0;
  PD_UNROLL for (int i = 0; i < kOwnValues; i++) max_bits = upper(max_bits, magnitude(x[i]));
  max_bits = upper(max_bits, shuffle_xor(max_bits, 1));
  max_bits = upper(max_bits, shuffle_xor(max_bits, 2));
  const float max = bits_float(max_bits), by = int8_factor(max);
  PD_UNROLL for (int i = 0; i < 4; i++) {
    uint32_t bytes[4];
    PD_UNROLL for (int j = 0; j < 4; j++) bytes[j] = int8_bits(x[4 * i + j] * by);
    q[i] = by == 0.0f ? 0 : pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
  }
  return quotient(max, 127.0f);
}

// 16 rows' group of x as a warp's two instructions take it: rows g and g + 8, g = lane / 4.
struct Rows {
  uint32_t q[2][4];
  float scales[2];
};
template <class E>
PD_DEVICE Rows quantize_rows(const Values<E> (&x)[2], bool has_second) {
  Rows rows;
  uint32_t low[4], high[4] = {};
  rows.scales[0] = quantize(x[0], low), rows.scales[1] = 0.0f;
  if (has_second) rows.scales[1] = quantize(x[1], high);
  PD_UNROLL for (int i = 0; i < 4; i++) rows.q[i / 2][i % 2 * 2] = low[i], rows.q[i / 2][i % 2 * 2 + 1] = high[i];
  return rows;
}

// (The sum of q q) * scale of 16 rows' group and eight outputs. Sums begin as the bits of 1.5 * 2^23, whose last ones
// count units: below 2^22 they become the float that is this much larger.
PD_DEVICE void multiply_group(const uint32_t (&x)[2][4], const float (&scales)[2], const Piece &w,
                              float (&products)[4]) {
  static_assert(kGroup * 127 * 127 < 1 << 22);
  const int32_t start[4] = {kWholeBits, kWholeBits, kWholeBits, kWholeBits};
  int32_t half[4], sums[4];
  multiply_bytes(half, x[0], w.words[0], w.words[1], start);
  multiply_bytes(sums, x[1], w.words[2], w.words[3], half);
  PD_UNROLL for (int i = 0; i < 4; i++) products[i] = (bits_float((uint32_t)sums[i]) - kWhole) * scales[i / 2];
}

}  // namespace pagedec::gemm
