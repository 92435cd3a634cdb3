// Attention over a cache of bytes on tensor cores: bytes come to shared memory, and are widened on their way from there
// to the instructions. Products, sums and their order are those of a plain cache of the same numbers.
#pragma once
#include "cuda/attention_byte_stages.h"
#include "cuda/attention_half.h"

namespace pagedec::attention {
namespace {

// V's scales are in the probabilities, whose product needs bf16's range: fp16's least number is 2^-24. Bytes are never
// infinite or NaN, so what a row does not see only needs a probability of 0.
template <class Element, int kHead, int kNumStages, int kKind>
struct ByteTiles : Factors<Element, bf16, kHead> {
  using E = Element;
  using M = uint8_t;
  using F = Factors<E, bf16, kHead>;
  static constexpr bool kHasScales = true;
  static constexpr int kColumns = kHead, kStages = kNumStages, kStride = kHead + 16;
  static constexpr bool kAnyStages = kHead > 128;
  static constexpr int64_t kWordsAt = F::kEnd, kShiftsAt = kWordsAt + 2 * kStages * TILE * 4;
  static constexpr int64_t kBytesAt = kShiftsAt + 2 * kStages * TILE * 4;
  static constexpr int64_t bytes(int stages) { return kBytesAt + 2 * stages * TILE * kStride; }

  PD_DEVICE ByteTiles(const SharedMemory &memory, int num_stages, const plan::Header &)
      : F(memory), kv(memory.part<uint8_t>(kBytesAt, 2 * num_stages * TILE * kStride)),
        words(memory.part<uint32_t>(kWordsAt, 2 * kStages * TILE)),
        shifts(memory.part<uint32_t>(kShiftsAt, 2 * kStages * TILE)) {}

  static PD_DEVICE int tile_at(int stage, bool is_v) { return (2 * stage + is_v) * TILE * kStride; }
  // Two pieces lie side by side, as one load brings them.
  static PD_DEVICE int column_of(int piece, int warp) {
    return kGroup * (kWarps * (piece / 2) + warp) + kGroup / 2 * (piece % 2);
  }

  struct Found : FoundOld<4> {
    int slot;  // whose scale a thread copies, of K or of V
    bool has_scale;
  };
  static PD_DEVICE Found find(const Place &place) {
    static_assert(kThreads == 2 * TILE);
    Found found{};
    found.find(place);
    const int token = thread_index() % TILE;
    found.slot = place.slot(token), found.has_scale = place.is_seen(token);
    return found;
  }
  template <class Start>
  PD_DEVICE void begin(int stage, const Found &found, int dim, const Start &start, const M *k, const M *v) const {
    copy_old<4, kHead>(kv, tile_at(stage, false), tile_at(stage, true), kStride, found, dim, start, k, v);
  }
  // Copies are of four bytes at least: two tokens' scales, and which it is.
  template <class Start>
  PD_DEVICE void begin_scales(int stage, const Found &found, const Start &start, const M *k, const M *v) const {
    const int at = 2 * stage * TILE + thread_index();
    const int64_t from = start(found.slot);
    begin_copy<4>(words.at(at), (thread_index() < TILE ? k : v) + from / 4 * 4, found.has_scale);
    shifts[at] = (uint32_t)(from % 4 * 8);
  }
  static PD_DEVICE void end_bringing() { end_copy_group(); }
  static PD_DEVICE void await(int stages) { await_stage<kAnyStages, kStages>(stages); }

  PD_DEVICE Scales scales(int stage, bool is_v, int warp) const {
    const int first = (2 * stage + is_v) * TILE + warp * kWarpTokens + 2 * (thread_index() % kWarp % 4);
    Scales scales;
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const int at = first + 8 * (i / 2) + i % 2;
      scales.by[i] = bits_float((uint32_t)words[at] >> (uint32_t)shifts[at] << 16);
    }
    return scales;
  }

  PD_DEVICE void add_logits(int stage, const Sight &sight, int dim, int warp, float (&s)[kRowTiles][2][4]) const {
    const int lane = thread_index() % kWarp;
    const int token = warp * kWarpTokens + lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * kGroup;
    const int of_k = tile_at(stage, false) + token * kStride + column;
    const int of_q = lane % 16 * F::kQueryStride + lane / 16 * 8;
    for (int d = 0; d < dim; d += 2 * kGroup) {
      uint32_t bytes[4];  // of eight tokens two groups, then of the next eight
      load_matrices(bytes, kv.at(of_k + d));
      PD_UNROLL for (int i = 0; i < 2; i++) {
        if (d + i * kGroup >= dim) break;
        uint32_t b[2][2];
        PD_UNROLL for (int n = 0; n < 2; n++) widen<E, kKind>(bytes[2 * n + i], b[n][0], b[n][1]);
        PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
          if (!sight.has_tile(tile)) continue;
          uint32_t a[4];
          load_matrices(a, this->q.at(of_q + tile * kTileRows * F::kQueryStride + d + i * kGroup));
          PD_UNROLL for (int n = 0; n < 2; n++) multiply_add<E>(s[tile][n], a, b[n][0], b[n][1]);
        }
      }
    }
  }
  PD_DEVICE bool has_poison(int, const Sight &, int) const { return false; }

  template <int kPieces, class LanesOf>
  PD_DEVICE void add_values(int stage, const Sight &sight, int dim, int warp, bool, float (&o)[kRowTiles][kPieces][4],
                            const LanesOf &) const {
    static_assert(kPieces % 2 == 0);
    const int of_v = tile_at(stage, true) + thread_index() % kWarp * kStride + kGroup * warp;
    [[maybe_unused]] constexpr int kUnrolled = kHead <= 128 ? 2 : 1;  // the largest heads lack the registers
    PD_UNROLL_BY(kUnrolled)
    for (int token = 0; token < TILE; token += 2 * kStepTokens) {
      uint32_t a[kRowTiles][2][4];
      this->load_probabilities(sight, token, a);
      PD_UNROLL for (int j = 0; j < kPieces; j += 2) {
        if (column_of(j, warp) >= dim) continue;
        uint32_t bytes[4], b[2][4];
        load_transposed(bytes, kv.at(of_v + token * kStride + kGroup * kWarps * (j / 2)));
        PD_UNROLL for (int i = 0; i < 4; i++) widen<bf16, kKind>(bytes[i], b[0][i], b[1][i]);
        PD_UNROLL for (int n = 0; n < 2; n++)
          PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
            if (sight.has_tile(tile)) F::add_columns(sight, tile, a[tile], b[n], o[tile][j + n]);
      }
    }
  }

 private:
  const SharedArray<uint8_t> kv;              // [stages][K, V][TILE][kStride]
  const SharedArray<uint32_t> words, shifts;  // [stages][K, V][TILE]
};

template <class E, int kKind>
int put_kind(pd_context &c, const Work &w, int head_dim) {
  if (head_dim <= 64) return put<ByteTiles<E, 64, 4, kKind>, ByteStages<E, 64, kKind>>(c, w);
  return head_dim <= 128 ? put<ByteTiles<E, 128, 3, kKind>, ByteStages<E, 128, kKind>>(c, w)
                         : put<ByteTiles<E, 256, 2, kKind>, ByteStages<E, 256, kKind>>(c, w);
}

template <class E>
int put_bytes(pd_context &c, const Work &w, int head_dim, int kv_kind) {
  return (kv_kind == PD_KV_INT8 ? put_kind<E, PD_KV_INT8> : put_kind<E, PD_KV_FP8>)(c, w, head_dim);
}

}  // namespace
}  // namespace pagedec::attention
