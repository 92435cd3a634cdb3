// Attention over a cache of bytes on tensor cores: bytes come to shared memory, and are widened on their way from there
// to the instructions. Products, sums and their order are those of a plain cache of the same numbers.
#pragma once
#include "cuda/attention_half.h"

namespace pagedec::attention {
namespace {

// V's scales are in the probabilities, whose product needs bf16's range: fp16's least number is 2^-24. Bytes are never
// infinite or NaN, so what a row does not see only needs a probability of 0.
template <class Element, int kHead, int kKind>
struct ByteStages {
  using E = Element;
  using M = uint8_t;
  using P = bf16;
  static constexpr bool kHasScales = true;
  static constexpr int kColumns = kHead, kStride = kHead + 16, kThreadsAToken = 4;
  static constexpr int kMostStages = kHead <= 64 ? 6 : kHead <= 128 ? 5 : 2;
  static constexpr int64_t kScaleStages = 2 * kMostStages * TILE, kFixedBytes = 2 * 4 * kScaleStages;
  static constexpr int64_t kStageBytes = 2 * TILE * kStride;

  PD_DEVICE ByteStages(const SharedMemory &memory, int64_t at, int num_stages)
      : words(memory.part<uint32_t>(at, kScaleStages)),
        shifts(memory.part<uint32_t>(at + 4 * kScaleStages, kScaleStages)),
        kv(memory.part<uint8_t>(at + kFixedBytes, 2 * num_stages * TILE * kStride)) {}

  static PD_DEVICE int tile_at(int stage, bool is_v) { return (2 * stage + is_v) * TILE * kStride; }

  PD_DEVICE void clear_columns(int num_stages, int dim, const M *k) const {
    begin_zeros<kHead>(kv, 2 * num_stages * TILE, kStride, dim, k);
  }
  PD_DEVICE void begin(int stage, int64_t at, int first, int last, int dim, const M *k, const M *v) const {
    copy_unit<kThreadsAToken, kHead>(kv, tile_at(stage, false), tile_at(stage, true), kStride, at, first, last, dim, k,
                                     v);
  }
  // Copies are of four bytes at least: two tokens' scales, and which it is.
  PD_DEVICE void begin_scale(int stage, int token, bool is_v, bool is_seen, int64_t from, const M *kv_cache) const {
    const int at = (2 * stage + is_v) * TILE + token;
    begin_copy<4>(words.at(at), kv_cache + from / 4 * 4, is_seen);
    shifts[at] = (uint32_t)(from % 4 * 8);
  }
  // Of the tokens that a thread has logits of, among the 16 from `token` on.
  PD_DEVICE Scales scales(int stage, bool is_v, int token) const {
    const int first = (2 * stage + is_v) * TILE + token + 2 * (thread_index() % kWarp % 4);
    Scales scales;
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const int at = first + 8 * (i / 2) + i % 2;
      scales.by[i] = bits_float((uint32_t)words[at] >> (uint32_t)shifts[at] << 16);
    }
    return scales;
  }
  // As HalfStages': of eight tokens two groups, then of the next eight.
  PD_DEVICE void load_keys(int stage, int token, int column, uint32_t (&b)[2][4]) const {
    const int lane = thread_index() % kWarp;
    uint32_t bytes[4];
    load_matrices(bytes, kv.at(tile_at(stage, false) + (token + lane / 16 * 8 + lane % 8) * kStride +
                               lane / 8 % 2 * kGroup + column));
    PD_UNROLL for (int step = 0; step < 2; step++)
      PD_UNROLL for (int n = 0; n < 2; n++)
        widen<E, kKind>(bytes[2 * n + step], b[step][2 * n], b[step][2 * n + 1]);
  }
  PD_DEVICE void load_values(int stage, int token, int column, uint32_t (&b)[2][4]) const {
    uint32_t bytes[4];
    load_transposed(bytes, kv.at(tile_at(stage, true) + (token + thread_index() % kWarp) * kStride + column));
    PD_UNROLL for (int i = 0; i < 4; i++) widen<bf16, kKind>(bytes[i], b[i / 2][i % 2], b[i / 2][2 + i % 2]);
  }
  PD_DEVICE bool has_poison(int, const Sight &, int) const { return false; }

 private:
  const SharedArray<uint32_t> words, shifts;  // [most stages][K, V][TILE]
  const SharedArray<uint8_t> kv;              // [stages][K, V][TILE][kStride]
};

template <class E, int kKind, class Launched>
int put_kind(pd_context &c, const Work &w, int head_dim, const Launched &launched) {
  if (head_dim <= 64) return put<ByteStages<E, 64, kKind>>(c, w, launched);
  return head_dim <= 128 ? put<ByteStages<E, 128, kKind>>(c, w, launched)
                         : put<ByteStages<E, 256, kKind>>(c, w, launched);
}

template <class E, class Launched>
int put_bytes(pd_context &c, const Work &w, int head_dim, int kv_kind, const Launched &launched) {
  return kv_kind == PD_KV_INT8 ? put_kind<E, PD_KV_INT8>(c, w, head_dim, launched)
                               : put_kind<E, PD_KV_FP8>(c, w, head_dim, launched);
}

}  // namespace
}  // namespace pagedec::attention
