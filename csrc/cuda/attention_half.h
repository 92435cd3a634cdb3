// Attention on tensor cores, in bf16 and fp16: K and V of a unit come to shared memory while the unit before is
// computed.
#pragma once
#include <algorithm>

#include "cuda/attention.h"
#include "cuda/attention_few.h"
#include "cuda/matrix.h"

namespace pagedec::attention {
namespace {

// What K and V are multiplied by. Rows of shared memory are 16 bytes longer than they need be, so that eight of them
// begin in different banks. P: of probabilities.
template <class E, class P, int kHead>
struct Factors {
  static constexpr int kQueryStride = kHead + 8, kProbabilityStride = TILE + 8;
  static constexpr int64_t kProbabilityAt = kTilesAt + ROWS_MAX * kQueryStride * 2;
  static constexpr int64_t kEnd = kProbabilityAt + ROWS_MAX * kProbabilityStride * 2;

  PD_DEVICE explicit Factors(const SharedMemory &memory)
      : q(memory.part<E>(kTilesAt, ROWS_MAX * kQueryStride)),
        p(memory.part<uint32_t>(kProbabilityAt, ROWS_MAX * kProbabilityStride / 2)) {}

  PD_DEVICE void put_query(int row, int d, E x) const { q[row * kQueryStride + d] = x; }
  PD_DEVICE void put_probabilities(int row, int token, float first, float second) const {
    p[(row * kProbabilityStride + token) / 2] = pair_of<P>(first, second);
  }
  template <int kSteps>
  PD_DEVICE void load_probabilities(const Sight &sight, int token, uint32_t (&a)[kRowTiles][kSteps][4]) const {
    const int lane = thread_index() % kWarp, of_p = lane % 16 * kProbabilityStride + lane / 16 * 8;
    PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
      PD_UNROLL for (int step = 0; step < kSteps; step++) if (sight.has_tile(tile)) {
        const int at = of_p + tile * kTileRows * kProbabilityStride + token + kStepTokens * step;
        load_matrices(a[tile][step], p.at(at / 2));
      }
  }
  // o += what a tile's rows have of the steps that were loaded, in eight columns.
  template <int kSteps>
  static PD_DEVICE void add_columns(const Sight &sight, int tile, const uint32_t (&a)[kSteps][4], const uint32_t *b,
                                    float (&o)[4]) {
    float sum[4] = {o[0], o[1], o[2], o[3]};
    PD_UNROLL for (int step = 0; step < kSteps; step++)
      multiply_add<P>(sum, a[step], b[2 * step], b[2 * step + 1]);
    PD_UNROLL for (int i = 0; i < 4; i++)  // other rows' probabilities are 0, which times infinity is NaN
      if (sight.has_row(tile * kTileRows + thread_index() % kWarp / 4 + i / 2 * 8)) o[i] = sum[i];
  }

  const SharedArray<E> q;
  const SharedArray<uint32_t> p;  // pairs
};

// The tokens of a unit of which a thread copies a part, and of the unit which lanes are seen by which rows.
template <int kThreadsAToken>
struct FoundOld {
  static constexpr int kApart = kThreads / kThreadsAToken, kTokens = TILE / kApart;
  int slots[kTokens];
  uint32_t is_seen, lanes;  // is_seen: a bit a token

  static PD_DEVICE int token(int i) { return thread_index() / kThreadsAToken + i * kApart; }
  PD_DEVICE void find(const Place &place) {
    PD_UNROLL for (int i = 0; i < kTokens; i++) slots[i] = place.slot(token(i));
    PD_UNROLL for (int i = 0; i < kTokens; i++) is_seen |= (uint32_t)place.is_seen(token(i)) << i;
  }
};

// Until the oldest of the stages is there, of as many as there may be at most, or of fewer.
template <bool kAny, int kMost>
PD_DEVICE void await_stage(int stages) {
  static_assert(!kAny || kMost <= 3);
  if (!kAny || stages == kMost) await_copies<(kMost > 2 ? kMost - 2 : 0)>();
  else await_copies<0>();
}

// Begins the copies of a unit's K and V.
template <int kThreadsAToken, int kHead, class M, class Start>
PD_DEVICE void copy_old(const SharedArray<M> &kv, int of_k, int of_v, int stride,
                         const FoundOld<kThreadsAToken> &found, int dim, const Start &start, const M *k,
                         const M *v) {
  constexpr int kCopied = kCopiedBytes / (int)sizeof(M);
  PD_UNROLL for (int i = 0; i < found.kTokens; i++) {
    const int64_t from = start(found.slots[i]);
    const bool is_seen = found.is_seen >> i & 1;
    PD_UNROLL for (int at = 0; at < kHead; at += kThreadsAToken * kCopied) {
      const int token = found.token(i), d = at + thread_index() % kThreadsAToken * kCopied;
      if (d >= dim) continue;
      begin_copy(kv.at(of_k + token * stride + d), k + from + d, is_seen);
      begin_copy(kv.at(of_v + token * stride + d), v + from + d, is_seen);
    }
  }
}

// Of a plain cache. kNumStages: the most that it may have.
template <class Element, int kHead, int kNumStages>
struct HalfTiles : Factors<Element, Element, kHead> {
  using E = Element;
  using M = Element;
  using F = Factors<E, E, kHead>;
  static constexpr bool kHasScales = false;
  static constexpr int kColumns = kHead, kStages = kNumStages, kStride = kHead + 8;
  static constexpr bool kAnyStages = kHead > 64;
  using Found = FoundOld<8>;
  static constexpr int64_t bytes(int stages) { return F::kEnd + 2 * stages * TILE * kStride * 2; }

  PD_DEVICE HalfTiles(const SharedMemory &memory, int num_stages, const plan::Header &)
      : F(memory), kv(memory.part<E>(F::kEnd, 2 * num_stages * TILE * kStride)) {}

  static PD_DEVICE int tile_at(int stage, bool is_v) { return (2 * stage + is_v) * TILE * kStride; }
  static PD_DEVICE int column_of(int piece, int warp) { return 8 * (kWarps * piece + warp); }
  static PD_DEVICE NoScales scales(int, bool, int) { return {}; }

  static PD_DEVICE Found find(const Place &place) {
    Found found{};
    found.find(place);
    return found;
  }
  template <class Start>
  PD_DEVICE void begin(int stage, const Found &found, int dim, const Start &start, const E *k, const E *v) const {
    copy_old<8, kHead>(kv, tile_at(stage, false), tile_at(stage, true), kStride, found, dim, start, k, v);
  }
  static PD_DEVICE void end_bringing() { end_copy_group(); }
  static PD_DEVICE void await(int stages) { await_stage<kAnyStages, kStages>(stages); }

  PD_DEVICE void add_logits(int stage, const Sight &sight, int dim, int warp, float (&s)[kRowTiles][2][4]) const {
    const int lane = thread_index() % kWarp;
    const int token = warp * kWarpTokens + lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
    const int of_k = tile_at(stage, false) + token * kStride + column, of_q = lane % 16 * kStride + lane / 16 * 8;
    for (int d = 0; d < dim; d += 16) {
      uint32_t b[4];
      load_matrices(b, kv.at(of_k + d));
      PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
        if (!sight.has_tile(tile)) continue;
        uint32_t a[4];
        load_matrices(a, this->q.at(of_q + tile * kTileRows * kStride + d));
        multiply_add<E>(s[tile][0], a, b[0], b[1]);
        multiply_add<E>(s[tile][1], a, b[2], b[3]);
      }
    }
  }

  // Whether a value of V is not finite that only some rows see.
  PD_DEVICE bool has_poison(int stage, const Sight &sight, int dim) const {
    bool found = false;
    PD_ROLLED for (int token = sight.first; token < sight.last; token++) {
      if (token == sight.all_first && token < sight.all_last) token = sight.all_last;
      if (token >= sight.last) break;
      PD_ROLLED for (int d = thread_index(); d < dim; d += kThreads) {
        const E x = kv[tile_at(stage, true) + token * kStride + d];
        found |= !is_finite(x);
      }
    }
    return found;
  }

  // Where V is poisoned, rows first meet what of it they see, which makes them infinite or NaN whatever comes then, and
  // it leaves: what a row does not see changes none of its bits.
  template <int kPieces, class LanesOf>
  PD_DEVICE void add_values(int stage, const Sight &sight, int dim, int warp, bool is_poisoned,
                            float (&o)[kRowTiles][kPieces][4], const LanesOf &lanes_of) const {
    if (is_poisoned) add_poison(stage, sight, dim, warp, o, lanes_of), clear_poison(stage, sight, dim);
    // A load brings two steps of eight columns; or of the largest heads, which lack the registers, one of two pieces.
    constexpr int kSteps = kHead <= 128 ? 2 : 1, kPiecesAtATime = 2 / kSteps, kLoadedTokens = kStepTokens * kSteps;
    static_assert(kPieces % kPiecesAtATime == 0);
    const int lane = thread_index() % kWarp, column = 8 * warp + lane / kLoadedTokens * 8 * kWarps;
    const int of_v = tile_at(stage, true) + lane % kLoadedTokens * kStride + column;
    PD_UNROLL for (int token = 0; token < TILE; token += kLoadedTokens) {
      uint32_t a[kRowTiles][kSteps][4];
      this->load_probabilities(sight, token, a);
      PD_UNROLL for (int j = 0; j < kPieces; j += kPiecesAtATime) {
        if (column_of(j, warp) >= dim) continue;
        uint32_t b[4];
        load_transposed(b, kv.at(of_v + token * kStride + 8 * kWarps * j));
        PD_UNROLL for (int n = 0; n < kPiecesAtATime; n++)
          PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
            if (sight.has_tile(tile)) F::add_columns(sight, tile, a[tile], b + 2 * n, o[tile][j + n]);
      }
    }
  }

 private:
  static PD_DEVICE bool is_finite(E x) { return (x.bits & kInfinity<E>) != kInfinity<E>; }

  // Seldom taken: of more than two pieces sums lie in memory meanwhile, where loops can count them. Unrolled it would
  // be half of the kernel.
  template <int kPieces, class LanesOf>
  PD_DEVICE void add_poison(int stage, const Sight &sight, int dim, int warp, float (&o)[kRowTiles][kPieces][4],
                            const LanesOf &lanes_of) const {
    const int lane = thread_index() % kWarp;
    [[maybe_unused]] constexpr int kUnrolled = kPieces <= 2 ? 2 * kRowTiles : 1;
    float sums[kRowTiles][kPieces][4];
    PD_UNROLL for (int n = 0; n < kRowTiles * kPieces; n++)
      PD_UNROLL for (int i = 0; i < 4; i++) sums[n / kPieces][n % kPieces][i] = o[n / kPieces][n % kPieces][i];
    PD_UNROLL_BY(kUnrolled)
    for (int of = 0; of < 2 * kRowTiles; of++) {
      const int row = of * (kTileRows / 2) + lane / 4;
      if (!sight.has_row(row)) continue;
      const auto lanes = lanes_of(row);
      PD_ROLLED for (int token = lanes.first; token < lanes.last; token++) {
        const uint32_t pair = this->p[(row * F::kProbabilityStride + token) / 2];
        const float by = to_float(E{(uint16_t)(pair >> 16 * (token % 2))});
        PD_UNROLL_BY(kUnrolled)
        for (int j = 0; j < kPieces; j++) {
          if (column_of(j, warp) >= dim) break;
          PD_UNROLL_BY(kUnrolled)
          for (int i = 0; i < 2; i++) {
            const E x = kv[tile_at(stage, true) + token * kStride + column_of(j, warp) + 2 * (lane % 4) + i];
            if (!is_finite(x)) sums[of / 2][j][of % 2 * 2 + i] += by * to_float(x);
          }
        }
      }
    }
    PD_UNROLL for (int n = 0; n < kRowTiles * kPieces; n++)
      PD_UNROLL for (int i = 0; i < 4; i++) o[n / kPieces][n % kPieces][i] = sums[n / kPieces][n % kPieces][i];
  }
  PD_DEVICE void clear_poison(int stage, const Sight &sight, int dim) const {
    sync_block();
    PD_ROLLED for (int token = sight.first; token < sight.last; token++)
      PD_ROLLED for (int d = thread_index(); d < dim; d += kThreads) {
        const int at = tile_at(stage, true) + token * kStride + d;
        if (!is_finite(kv[at])) kv[at] = E{0};
      }
    sync_block();
  }

  template <class Number>
  static constexpr uint16_t kInfinity = std::is_same_v<Number, bf16> ? 0x7f80 : 0x7c00;  // its exponent
  const SharedArray<E> kv;  // [stages][K, V][TILE][kStride]
};

template <class T, class S>
PD_KERNEL_BLOCKS(kThreads, kBlocksAtATime) half_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  walk_spans(
      w, [&](int i, int last) { return Few<S>(w, memory).run(i, last); },
      [&](int i, int last) { return Walk<T>(w, memory).run(i, last); });
}

// Of which a multiprocessor has so many for all of its blocks, of which the driver takes a little of each. For two
// stages of the largest heads an SM80 has no room, nor have most later ones that are not an H100 or B200. Of heads of
// 128 it has room for one block where these have it for two: there it has as many bytes under way, in three stages.
template <class T>
int stages_for(int64_t most_of_block) {
  constexpr int64_t kTaken = (1 << 10) + 128;
  if (!T::kAnyStages) return T::kStages;
  const bool is_for_one = T::kStages > 2, has_room = T::bytes(T::kStages) <= most_of_block;
  const bool has_two = 2 * (T::bytes(T::kStages - 1) + kTaken) <= most_of_block + kTaken;
  return has_room && !(is_for_one && has_two) ? T::kStages : T::kStages - 1;
}
template <class F>
int few_stages(int64_t most_of_block) {
  constexpr int64_t kTaken = (1 << 10) + 128;
  const auto fitting = [&](int64_t room) {
    int stages = F::kMostStages;
    while (stages && F::bytes(stages) > room) stages--;
    return stages;
  };
  const int of_two = fitting((most_of_block + kTaken) / 2 - kTaken);
  return of_two > 1 ? of_two : fitting(most_of_block);
}

// What T says of its shared memory is what a launch gives.
template <class T, class S>
int put(pd_context &c, Work w) {
  using F = Few<S>;
  const int64_t most = target(c).max_shared_bytes;
  w.num_stages = stages_for<T>(most), w.few_stages = few_stages<F>(most);
  const int64_t bytes = std::max(T::bytes(w.num_stages), F::bytes(w.few_stages));
  return launch(c, "pd_attention", half_kernel<T, S>, Grid(kThreads, kBlocksAtATime, bytes), w);
}

template <class E>
int put_plain(pd_context &c, const Work &w, int head_dim) {
  if (head_dim <= 64) return put<HalfTiles<E, 64, 3>, HalfStages<E, 64>>(c, w);
  return head_dim <= 128 ? put<HalfTiles<E, 128, 3>, HalfStages<E, 128>>(c, w)
                         : put<HalfTiles<E, 256, 2>, HalfStages<E, 256>>(c, w);
}

}  // namespace
}  // namespace pagedec::attention
