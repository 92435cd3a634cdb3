// K and V of units in shared memory, as tensor cores take them: HalfStages of a plain cache, ByteStages (of
// attention_bytes.h) of bytes. A stage holds a unit; what comes next is on its way to the others.
#pragma once
#include "cuda/attention_work.h"

namespace pagedec::attention {
namespace {

constexpr int kCopiedBytes = 16;   // that one copy brings
constexpr int kStepTokens = 16;    // of V, that one instruction multiplies
constexpr int kLoadedColumns = 32, kLoadedTokens = 32;  // of K, of V, that are loaded together

// Begins the copies of a unit's K and V, of which lanes first .. last - 1 are seen. A warp has 16 tokens: `at` is where
// token `lane` % 16 of them begins in the cache.
template <int kThreadsAToken, int kHead, class M>
PD_DEVICE void copy_unit(const SharedArray<M> &kv, int of_k, int of_v, int stride, int64_t at, int first, int last,
                         int dim, const M *k, const M *v) {
  constexpr int kCopied = kCopiedBytes / (int)sizeof(M), kTokens = kWarp / kThreadsAToken;
  const int lane = thread_index() % kWarp, column = lane % kThreadsAToken * kCopied;
  const int64_t apart = (const char *)v - (const char *)k;
  PD_UNROLL for (int i = 0; i < kWarpTokens; i += kTokens) {
    const int of = i + lane / kThreadsAToken, token = thread_index() / kWarp * kWarpTokens + of;
    const char *from_k = (const char *)k + (shuffle(at, of) + column) * (int)sizeof(M), *from_v = from_k + apart;
    const bool is_seen = token >= first && token < last;
    const int to = token * stride + column;
    PD_UNROLL for (int d = 0; d < kHead; d += kThreadsAToken * kCopied) {
      if (column + d >= dim) continue;
      begin_copy(kv.at(of_k + to + d), from_k + d * sizeof(M), is_seen);
      begin_copy(kv.at(of_v + to + d), from_v + d * sizeof(M), is_seen);
    }
  }
}

// Columns that a head has not are zeros, which add nothing. They come as copies of which nothing is read.
template <int kHead, class M>
PD_DEVICE void begin_zeros(const SharedArray<M> &rows, int num_rows, int stride, int dim, const M *from) {
  constexpr int kCopied = kCopiedBytes / (int)sizeof(M);
  const int left = (kHead - dim) / kCopied;
  for (int i = thread_index(); i < num_rows * left; i += kThreads)
    begin_copy(rows.at(i / left * stride + dim + i % left * kCopied), from, false);
}

// Rows of shared memory are 16 bytes longer than they need be, so that eight of them begin in different banks.
template <class Element, int kHead>
struct HalfStages {
  using E = Element;
  using M = Element;
  using P = Element;  // of probabilities
  static constexpr bool kHasScales = false;
  static constexpr int kColumns = kHead, kStride = kHead + 8, kThreadsAToken = 8;
  static constexpr int kMostStages = kHead <= 64 ? 6 : 3;
  static constexpr int64_t kFixedBytes = 0, kStageBytes = 2 * TILE * kStride * 2;

  PD_DEVICE HalfStages(const SharedMemory &memory, int64_t at, int num_stages)
      : kv(memory.part<E>(at, 2 * num_stages * TILE * kStride)) {}

  static PD_DEVICE int tile_at(int stage, bool is_v) { return (2 * stage + is_v) * TILE * kStride; }
  static PD_DEVICE NoScales scales(int, bool, int) { return {}; }

  PD_DEVICE void clear_columns(int num_stages, int dim, const E *k) const {
    begin_zeros<kHead>(kv, 2 * num_stages * TILE, kStride, dim, k);
  }
  PD_DEVICE void begin(int stage, int64_t at, int first, int last, int dim, const E *k, const E *v) const {
    copy_unit<kThreadsAToken, kHead>(kv, tile_at(stage, false), tile_at(stage, true), kStride, at, first, last, dim, k,
                                     v);
  }
  // Of 16 tokens 32 columns: by steps of 16, then by eight tokens.
  PD_DEVICE void load_keys(int stage, int token, int column, uint32_t (&b)[2][4]) const {
    const int lane = thread_index() % kWarp;
    const int at = tile_at(stage, false) + (token + lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8 + column;
    PD_UNROLL for (int i = 0; i < 2; i++) load_matrices(b[i], kv.at(at + 16 * i));
  }
  // Of 32 tokens 16 columns: by steps of 16, then by eight columns.
  PD_DEVICE void load_values(int stage, int token, int column, uint32_t (&b)[2][4]) const {
    const int lane = thread_index() % kWarp;
    const int at = tile_at(stage, true) + (token + lane % 16) * kStride + lane / 16 * 8 + column;
    PD_UNROLL for (int i = 0; i < 2; i++) load_transposed(b[i], kv.at(at + kStepTokens * i * kStride));
  }

  PD_DEVICE E value(int stage, int token, int column) const {
    return kv[tile_at(stage, true) + token * kStride + column];
  }
  // Probabilities where K was, each row's side by side.
  PD_DEVICE void put_pair(int stage, int row, int token, uint32_t pair) const {
    PD_UNROLL for (int i = 0; i < 2; i++)
      kv[tile_at(stage, false) + row * (TILE + 2) + token + i] = E{(uint16_t)(pair >> 16 * i)};
  }
  PD_DEVICE E number(int stage, int row, int token) const {
    return kv[tile_at(stage, false) + row * (TILE + 2) + token];
  }
  // They may be NaN, which the zeros are not that stood behind K's columns: those are put back.
  PD_DEVICE void clear_numbers(int stage, int dim) const {
    PD_ROLLED for (int token = 0; token < TILE; token++)
      PD_ROLLED for (int d = dim + thread_index(); d < kHead; d += kThreads)
        kv[tile_at(stage, false) + token * kStride + d] = E{0};
  }
  static PD_DEVICE bool is_finite(E x) { return (x.bits & kInfinity<E>) != kInfinity<E>; }
  // Whether a value of V is not finite that only some rows see.
  PD_DEVICE bool has_poison(int stage, const Sight &sight, int dim) const {
    bool found = false;
    PD_ROLLED for (int token = sight.first; token < sight.last; token++) {
      if (token == sight.all_first && token < sight.all_last) token = sight.all_last;
      if (token >= sight.last) break;
      PD_ROLLED for (int d = thread_index(); d < dim; d += kThreads) found |= !is_finite(value(stage, token, d));
    }
    return found;
  }
  PD_DEVICE void clear_poison(int stage, const Sight &sight, int dim) const {
    PD_ROLLED for (int token = sight.first; token < sight.last; token++)
      PD_ROLLED for (int d = thread_index(); d < dim; d += kThreads)
        if (!is_finite(value(stage, token, d))) kv[tile_at(stage, true) + token * kStride + d] = E{0};
  }

 private:
  template <class Number>
  static constexpr uint16_t kInfinity = std::is_same_v<Number, bf16> ? 0x7f80 : 0x7c00;  // its exponent
  const SharedArray<E> kv;  // [stages][K, V][TILE][kStride]
};

}  // namespace
}  // namespace pagedec::attention
