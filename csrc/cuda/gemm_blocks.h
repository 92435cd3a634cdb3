// Linear layers with weights in blocks: what rows of x become, and what groups give.
//
// Layout   cuda/blocks.h. A group of 32 of k is one instruction, of which a lane has k = 8t ... 8t + 7 (t = lane % 4),
//          of W and of x alike.
// x        becomes int8 where it is multiplied, as with int8 weights: four lanes have a row's group.
// Bits     A group's t is an integer that fp32 holds (W is signed, or without a zero, so that nothing is to be taken
//          off); then come the operations of pagedec.h in their order, each rounded by itself: what all instruction
//          sets of a CPU give. An infinite d gives NaN where a CPU may have an infinity: who reads files refuses it.
#pragma once
#include "cuda/blocks.h"
#include "cuda/gemm_int8.h"

namespace pagedec::gemm {

// Eight values of a row, from `at` on: of 16 bits they come ahead of their use, as they lie in memory, of fp32 when
// they are needed. Of rows that there are not, they are zeros.
struct RowPlace {
  const void *x;  // of the first row
  int64_t row, at;
  bool is_there, is_aligned;
};
PD_DEVICE Piece load_eight(const pd_gemm_args &a, const RowPlace &place) {
  Piece x{};
  if (!place.is_there || a.dtype == PD_F32) return x;
  const uint16_t *p = (const uint16_t *)place.x + place.row * a.k + place.at;
  if (place.is_aligned) {
    x = load_whole<Piece>(p);
  } else {
    PD_UNROLL for (int i = 0; i < 8; i++) x.words[i / 2] |= (uint32_t)p[i] << 16 * (i % 2);
  }
  return x;
}
PD_DEVICE void read_eight(const pd_gemm_args &a, const RowPlace &place, const Piece &halves, float (&x)[8]) {
  const auto half = [&](int i) { return (uint16_t)(halves.words[i / 2] >> 16 * (i % 2)); };
  if (a.dtype == PD_F32) {
    const float *p = (const float *)place.x + place.row * a.k + place.at;
    PD_UNROLL for (int i = 0; i < 8; i++) x[i] = place.is_there ? p[i] : 0.0f;
  } else if (a.dtype == PD_BF16) {
    PD_UNROLL for (int i = 0; i < 8; i++) x[i] = to_float(bf16{half(i)});
  } else {
    PD_UNROLL for (int i = 0; i < 8; i++) x[i] = to_float(fp16{half(i)});
  }
}

// What a group's q stand for: q times scale; sum: of q.
struct alignas(8) GroupScale {
  float scale, sum;
};
// A lane's part of a row's group becomes q; all lanes call it.
PD_DEVICE GroupScale quantize_eight(const pd_gemm_args &a, const RowPlace &place, const Piece &halves, uint64_t &q) {
  float x[8];
  read_eight(a, place, halves, x);
  uint32_t max_bits = 0;
  PD_UNROLL for (int i = 0; i < 8; i++) max_bits = upper(max_bits, magnitude(x[i]));
  max_bits = upper(max_bits, shuffle_xor(max_bits, 1));
  max_bits = upper(max_bits, shuffle_xor(max_bits, 2));
  const float max = bits_float(max_bits), by = int8_factor(max);
  uint32_t bytes[8], sum = 0;
  PD_UNROLL for (int i = 0; i < 8; i++) {
    bytes[i] = by == 0.0f ? (uint32_t)kWholeBits : int8_bits(x[i] * by);
    sum += bytes[i] - (uint32_t)kWholeBits;
  }
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  q = pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]) |
      (uint64_t)pack_bytes(bytes[4], bytes[5], bytes[6], bytes[7]) << 32;
  return {quotient(max, 127.0f), (float)(int32_t)sum};
}

template <BlockKind kOne>
struct OfKind {
  static constexpr BlockKind kKind = kOne;
};
// On the host: what `put` gives for each kind that some of a weight is of, up to one that is not 0. A kernel is of one
// kind, because together they take more registers than any of them.
template <class Put>
int for_kinds(const Segments &segments, const Put &put) {
  const auto has = [&](BlockKind kind) {
    for (int i = 0; i < segments.count; i++)
      if (segments.one[i].shape.kind == kind) return true;
    return false;
  };
  if (has(BlockKind::NIBBLES) && put(OfKind<BlockKind::NIBBLES>())) return -1;
  if (has(BlockKind::NIBBLES_MIN) && put(OfKind<BlockKind::NIBBLES_MIN>())) return -1;
  if (has(BlockKind::SIX) && put(OfKind<BlockKind::SIX>())) return -1;
  return has(BlockKind::BYTES) && put(OfKind<BlockKind::BYTES>()) ? -1 : 0;
}

// What a lane has of a group of a panel.
template <BlockKind kKind>
struct LaneWeights {
  static constexpr int kPieces = kKind == BlockKind::BYTES ? 2 : 1;
  // q is 16 or 4 times what it stands for where a sign comes by moving it to a byte's upper end.
  static constexpr float kUnit = kKind == BlockKind::NIBBLES ? 0.0625f : kKind == BlockKind::SIX ? 0.25f : 1.0f;
  Piece pieces[kPieces];
  uint64_t high;

  PD_DEVICE void load(const char *data) {
    const int lane = thread_index() % kWarp;
    PD_UNROLL for (int i = 0; i < kPieces; i++) pieces[i] = load_whole<Piece>(data + (i * kWarp + lane) * 16);
    if constexpr (kKind == BlockKind::SIX) high = ((const uint64_t *)data)[2 * kWarp + lane];
  }
  // Of output 8 i + g: the first four values, and the others, signed bytes.
  PD_DEVICE void unpack(int i, uint32_t &first, uint32_t &second) const {
    const uint32_t word = pieces[0].words[i];
    if constexpr (kKind == BlockKind::BYTES) {
      first = word, second = pieces[1].words[i];
    } else if constexpr (kKind == BlockKind::NIBBLES_MIN) {
      first = word & 0x0f0f0f0fu, second = word >> 4 & 0x0f0f0f0fu;
    } else if constexpr (kKind == BlockKind::NIBBLES) {
      first = (word << 4 & 0xf0f0f0f0u) ^ 0x80808080u, second = (word & 0xf0f0f0f0u) ^ 0x80808080u;
    } else {
      const uint32_t of_first = (uint32_t)high, of_second = (uint32_t)(high >> 32);
      first = (word << 2 & 0x3c3c3c3cu) | ((of_first << (6 - 2 * i) & 0xc0c0c0c0u) ^ 0x80808080u);
      second = (word >> 2 & 0x3c3c3c3cu) | ((of_second << (6 - 2 * i) & 0xc0c0c0c0u) ^ 0x80808080u);
    }
  }
};

// Sums of a group that have scales of their own: of 6 bits each half of its values has.
template <BlockKind kKind>
constexpr int kSumsOf = kKind == BlockKind::SIX ? 2 : 1;

// What a lane has of outputs 8 i + g, for each of the sums. Of four lanes the first two have the first half.
template <BlockKind kKind>
struct LaneBytes {
  uint32_t words[kSumsOf<kKind>][2];

  PD_DEVICE LaneBytes(const LaneWeights<kKind> &w, int i) {
    w.unpack(i, words[0][0], words[0][1]);
    if constexpr (kKind == BlockKind::SIX) {
      const uint32_t is_first = thread_index() % 4 < 2 ? ~0u : 0;
      PD_UNROLL for (int j = 0; j < 2; j++) words[1][j] = words[0][j] & ~is_first, words[0][j] &= is_first;
    }
  }
};
// A group's products of 16 rows and eight outputs, as bits of 1.5 * 2^23 + t.
template <BlockKind kKind>
PD_DEVICE void multiply_eight(const uint32_t (&x)[4], const LaneBytes<kKind> &w,
                              int32_t (&sums)[kSumsOf<kKind>][4]) {
  static_assert(X_GROUP * 128 * 127 < 1 << 22);  // times a unit, too
  const int32_t start[4] = {kWholeBits, kWholeBits, kWholeBits, kWholeBits};
  PD_UNROLL for (int of = 0; of < kSumsOf<kKind>; of++)
    multiply_bytes(sums[of], x, w.words[of][0], w.words[of][1], start);
}
// a t of such a sum, rounded once: kWhole a is exact, and so is what it is taken from. shift: -kWhole a.
PD_DEVICE float times(float a, float shift, float sum) { return fmaf(a, sum, shift); }
// What a group adds to an output: of one sum or two.
template <BlockKind kKind>
PD_DEVICE float group_product(Factors by, Factors shift, const float (&sums)[kSumsOf<kKind>], GroupScale x) {
  float product = times(by.a, shift.a, sums[0]);
  if constexpr (kKind == BlockKind::SIX) product = product + times(by.b, shift.b, sums[1]);
  if constexpr (kKind == BlockKind::NIBBLES_MIN) product = product - by.b * x.sum;
  return x.scale * product;
}
// Factors as sums of a kind are multiplied by them.
template <BlockKind kKind>
PD_DEVICE Factors unit_factors(const BlockShape &shape, StoredScales stored) {
  Factors by = factors<kKind>(shape, stored);
  by.a = by.a * LaneWeights<kKind>::kUnit;
  if (kKind == BlockKind::SIX) by.b = by.b * LaneWeights<kKind>::kUnit;
  return by;
}
PD_DEVICE Factors shifts(Factors by) { return {by.a * -kWhole, by.b * -kWhole}; }

// Where a lane's outputs 8 i + 2 t and the next lie among 32 that it reads side by side, and the place of an output.
constexpr int kLaneOutputs = 8;
PD_DEVICE int place_of_output(int output) { return output % 8 / 2 * kLaneOutputs + output / 8 * 2 + output % 2; }

}  // namespace pagedec::gemm
