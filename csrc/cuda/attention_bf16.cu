// Attention on tensor cores: K and V of a unit come to shared memory while the unit before is computed.
#include "cuda/attention.h"
#include "cuda/matrix.h"

namespace pagedec::attention {
namespace {

constexpr int kCopied = 8;  // values that one copy brings

// Rows of shared memory are 16 bytes longer than they need be, so that eight of them begin in different banks.
template <int kHead, int kNumStages>
struct Bf16Tiles {
  using E = bf16;
  static constexpr int kColumns = kHead, kStages = kNumStages;
  static constexpr int kStride = kHead + 8, kProbabilityStride = TILE + 8;
  static constexpr int64_t kQueryBytes = ROWS_MAX * kStride * 2, kTileBytes = TILE * kStride * 2;
  static constexpr int64_t kTilesAt = kQueryBytes + ROWS_MAX * kProbabilityStride * 2;
  static constexpr int64_t kBytes = kTilesAt + 2 * kStages * kTileBytes;

  PD_DEVICE explicit Bf16Tiles(const SharedMemory &memory)
      : q(memory.part<bf16>(0, ROWS_MAX * kStride)),
        p(memory.part<uint32_t>(kQueryBytes, ROWS_MAX * kProbabilityStride / 2)),
        kv(memory.part<bf16>(kTilesAt, 2 * kStages * TILE * kStride)) {}

  PD_DEVICE void put_query(int row, int d, bf16 x) const { q[row * kStride + d] = x; }
  PD_DEVICE void put_probabilities(int row, int token, float first, float second) const {
    p[(row * kProbabilityStride + token) / 2] = bf16_pair(first, second);
  }
  static PD_DEVICE int tile_at(int stage, bool is_v) { return (2 * stage + is_v) * TILE * kStride; }

  // Eight threads a token.
  template <class Start>
  PD_DEVICE void begin(int stage, const Place &place, int dim, const Start &start, const bf16 *k, const bf16 *v) const {
    constexpr int kThreadsAToken = 8;
    for (int token = thread_index() / kThreadsAToken; token < TILE; token += kThreads / kThreadsAToken) {
      const bool is_seen = place.is_seen(token);
      const int64_t from = is_seen ? start(place.slot(token)) : 0;
      for (int d = thread_index() % kThreadsAToken * kCopied; d < dim; d += kThreadsAToken * kCopied) {
        begin_copy(kv.at(tile_at(stage, false) + token * kStride + d), k + from + d, is_seen);
        begin_copy(kv.at(tile_at(stage, true) + token * kStride + d), v + from + d, is_seen);
      }
    }
  }
  static PD_DEVICE void end_bringing() { end_copy_group(); }
  static PD_DEVICE void await() { await_copies<(kStages > 1 ? kStages - 2 : 0)>(); }

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
        load_matrices(a, q.at(of_q + tile * kTileRows * kStride + d));
        multiply_add(s[tile][0], a, b[0], b[1]);
        multiply_add(s[tile][1], a, b[2], b[3]);
      }
    }
  }

  // Whether a value of V is not finite that only some rows see.
  PD_DEVICE bool has_poison(int stage, const Sight &sight, int dim) const {
    bool found = false;
    for (int token = sight.first; token < sight.last; token++) {
      if (token == sight.all_first && token < sight.all_last) token = sight.all_last;
      if (token >= sight.last) break;
      for (int d = thread_index(); d < dim; d += kThreads) {
        const bf16 x = kv[tile_at(stage, true) + token * kStride + d];
        found |= (x.bits & 0x7f80) == 0x7f80;
      }
    }
    return found;
  }

  template <int kPieces, class LanesOf>
  PD_DEVICE void add_values(int stage, const Sight &sight, int dim, int warp, bool is_poisoned,
                            float (&o)[kRowTiles][kPieces][4], const LanesOf &lanes_of) const {
    constexpr int kTokens = 32;  // that one load brings of eight columns
    const int lane = thread_index() % kWarp;
    const int of_v = tile_at(stage, true) + lane * kStride + 8 * warp;
    const int of_p = lane % 16 * kProbabilityStride + lane / 16 * 8;
    PD_UNROLL for (int token = 0; token < TILE; token += kTokens) {
      uint32_t a[kRowTiles][2][4];
      PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
        PD_UNROLL for (int step = 0; step < 2; step++) if (sight.has_tile(tile)) {
          const int at = of_p + tile * kTileRows * kProbabilityStride + token + 16 * step;
          load_matrices(a[tile][step], (const bf16 *)p.at(at / 2));
        }
      PD_UNROLL for (int j = 0; j < kPieces; j++) {
        if (8 * (kWarps * j + warp) >= dim) continue;
        uint32_t b[4];
        load_transposed(b, kv.at(of_v + token * kStride + 8 * kWarps * j));
        PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
          if (!sight.has_tile(tile)) continue;
          if (is_poisoned) {
            add_apart(sight, tile, token, a[tile], b, o[tile][j], lanes_of);
            continue;
          }
          float sum[4] = {o[tile][j][0], o[tile][j][1], o[tile][j][2], o[tile][j][3]};
          multiply_add(sum, a[tile][0], b[0], b[1]);
          multiply_add(sum, a[tile][1], b[2], b[3]);
          PD_UNROLL for (int i = 0; i < 4; i++)  // other rows' probabilities are 0, which times infinity is NaN
            if (sight.has_row(tile * kTileRows + lane / 4 + i / 2 * 8)) o[tile][j][i] = sum[i];
        }
      }
    }
  }

 private:
  // Each row by itself, with zeros for what it does not see: the same bits, had that been finite.
  template <class LanesOf>
  static PD_DEVICE void add_apart(const Sight &sight, int tile, int token, const uint32_t (&a)[2][4],
                                  const uint32_t (&b)[4], float (&o)[4], const LanesOf &lanes_of) {
    const int lane = thread_index() % kWarp;
    // Seldom taken: unrolled it is half of the kernel's instructions. The largest heads lack the registers for a loop.
    [[maybe_unused]] constexpr int kUnrolled = kHead <= 128 ? 1 : kTileRows;
    PD_UNROLL_BY(kUnrolled)
    for (int r = 0; r < kTileRows; r++) {
      const int row = tile * kTileRows + r;
      if (!sight.has_row(row)) continue;
      const auto lanes = lanes_of(row);
      float own[4] = {o[0], o[1], o[2], o[3]};
      uint32_t seen[4];
      PD_UNROLL for (int i = 0; i < 4; i++) {
        const int at = token + 8 * i + 2 * (lane % 4);
        seen[i] = (at >= lanes.first && at < lanes.last ? b[i] & 0xffffu : 0) |
                  (at + 1 >= lanes.first && at + 1 < lanes.last ? b[i] & 0xffff0000u : 0);
      }
      multiply_add(own, a[0], seen[0], seen[1]);
      multiply_add(own, a[1], seen[2], seen[3]);
      PD_UNROLL for (int i = 0; i < 4; i++)
        if (r == lane / 4 + i / 2 * 8) o[i] = own[i];
    }
  }

  const SharedArray<bf16> q;
  const SharedArray<uint32_t> p;  // pairs
  const SharedArray<bf16> kv;     // [stages][K, V][TILE][kStride]
};

template <int kHead, int kStages>
PD_KERNEL(kThreads) bf16_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  Walk<Bf16Tiles<kHead, kStages>>(w, memory).run();
}

template <int kHead, int kStages>
int put(pd_context &c, const Work &w) {
  const Grid grid(kThreads, kBlocksAtATime, Walk<Bf16Tiles<kHead, kStages>>::kBytes);
  return launch(c, "pd_attention", bf16_kernel<kHead, kStages>, grid, w);
}

}  // namespace

int enqueue_bf16(pd_context &c, const Work &w, int head_dim) {
  if (head_dim <= 64) return put<64, 3>(c, w);
  if (head_dim <= 128) return put<128, 2>(c, w);
  // An SM80 has no room for two stages, nor have most later ones that are not an H100 or B200.
  const bool has_room = Walk<Bf16Tiles<256, 2>>::kBytes <= c.max_shared_bytes;
  return has_room ? put<256, 2>(c, w) : put<256, 1>(c, w);
}

}  // namespace pagedec::attention
