// Attention in fp32, for tests of what must be equal: each logit and each result is one chain of products. It need
// not be fast, so there are two sizes of heads, and of bytes each is asked what it is.
#include "cuda/attention.h"

namespace pagedec::attention {
namespace {

// K and V are read where they lie; a unit's stage says where that is.
template <int kHead, bool kBytes>
struct Fp32Tiles {
  using E = float;
  using M = std::conditional_t<kBytes, uint8_t, float>;
  static constexpr bool kHasScales = kBytes, kAnyStages = false;
  static constexpr int kColumns = kHead, kStages = 1;
  static constexpr int kStride = kHead + 1, kProbabilityStride = TILE + 1;
  static constexpr int64_t kQueryAt = kTilesAt + 16 * TILE, kProbabilityAt = kQueryAt + ROWS_MAX * kStride * 4;
  static constexpr int64_t kScalesAt = kProbabilityAt + ROWS_MAX * kProbabilityStride * 4;
  static constexpr int64_t kEnd = kScalesAt + (kHasScales ? 2 * TILE * 4 : 0);

  PD_DEVICE Fp32Tiles(const SharedMemory &memory, int, const plan::Header &header)
      : is_int8(header.kv_kind == PD_KV_INT8), ks(memory.part<const M *>(kTilesAt, TILE)),
        vs(memory.part<const M *>(kTilesAt + 8 * TILE, TILE)),
        q(memory.part<float>(kQueryAt, ROWS_MAX * kStride)),
        p(memory.part<float>(kProbabilityAt, ROWS_MAX * kProbabilityStride)),
        by(memory.part<float>(kScalesAt, kHasScales ? 2 * TILE : 0)) {}

  PD_DEVICE void put_query(int row, int d, float x) const { q[row * kStride + d] = x; }
  PD_DEVICE void put_probabilities(int row, int token, float first, float second) const {
    p[row * kProbabilityStride + token] = first, p[row * kProbabilityStride + token + 1] = second;
  }
  static PD_DEVICE int column_of(int piece, int warp) { return 8 * (kWarps * piece + warp); }
  struct Found {  // a thread has a token, of K or of V
    int slot;
    bool is_seen;
    uint32_t lanes;
  };
  static PD_DEVICE Found find(const Place &place) {
    static_assert(kThreads == 2 * TILE);
    const int token = thread_index() % TILE;
    return {place.slot(token), place.is_seen(token), 0};
  }
  template <class Start>
  PD_DEVICE void begin(int, const Found &found, int, const Start &start, const M *k, const M *v) const {
    const bool is_k = thread_index() < TILE;
    (is_k ? ks : vs)[thread_index() % TILE] = found.is_seen ? (is_k ? k : v) + start(found.slot) : nullptr;
  }
  template <class Start>
  PD_DEVICE void begin_scales(int, const Found &found, const Start &start, const M *k, const M *v) const {
    if (!found.is_seen) return;
    by[thread_index()] = to_float(*(const bf16 *)((thread_index() < TILE ? k : v) + start(found.slot)));
  }
  PD_DEVICE auto scales(int, bool is_v, int warp) const {
    if constexpr (kHasScales) {
      const int first = is_v * TILE + warp * kWarpTokens + 2 * (thread_index() % kWarp % 4);
      return Scales{{by[first], by[first + 1], by[first + 8], by[first + 9]}};
    } else {
      return NoScales{};
    }
  }
  PD_DEVICE float number(const M *head, int d) const {
    if constexpr (!kBytes) return head[d];
    else return is_int8 ? to_number<PD_KV_INT8>(head[place_of_byte(d)]) : to_number<PD_KV_FP8>(head[place_of_byte(d)]);
  }
  static PD_DEVICE void end_bringing() {}
  static PD_DEVICE void await(int) {}

  PD_DEVICE void add_logits(int, const Sight &sight, int dim, int warp, float (&s)[kRowTiles][2][4]) const {
    const int lane = thread_index() % kWarp;
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const M *k = ks[warp * kWarpTokens + 8 * (i / 2) + 2 * (lane % 4) + i % 2];
      for (int d = 0; k && d < dim; d++) {
        const float x = number(k, d);
        PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
          PD_UNROLL for (int half = 0; half < 2; half++) if (sight.has_tile(tile)) {
            const int row = tile * kTileRows + 8 * half + lane / 4;
            float &y = s[tile][i / 2][2 * half + i % 2];
            y = y + q[row * kStride + d] * x;
          }
      }
    }
  }
  PD_DEVICE bool has_poison(int, const Sight &, int) const { return false; }  // rows read only what they see

  template <int kPieces, class LanesOf>
  PD_DEVICE void add_values(int, const Sight &sight, int dim, int warp, bool, float (&o)[kRowTiles][kPieces][4],
                            const LanesOf &lanes_of) const {
    const int lane = thread_index() % kWarp;
    PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
      PD_UNROLL for (int half = 0; half < 2; half++) {
        const int row = tile * kTileRows + 8 * half + lane / 4;
        if (!sight.has_row(row)) continue;
        const auto lanes = lanes_of(row);
        [[maybe_unused]] constexpr int kUnrolled = kHasScales ? 1 : 4;  // bytes take the registers
        PD_UNROLL_BY(kUnrolled)
        for (int token = lanes.first; token < lanes.last; token++) {
          const float weight = p[row * kProbabilityStride + token];
          const M *v = vs[token];
          PD_UNROLL for (int j = 0; j < kPieces; j++) {
            const int column = column_of(j, warp) + 2 * (lane % 4);
            if (column >= dim) continue;
            PD_UNROLL for (int i = 0; i < 2; i++) {
              float &x = o[tile][j][2 * half + i];
              x = x + weight * number(v, column + i);
            }
          }
        }
      }
  }

 private:
  const bool is_int8;
  const SharedArray<const M *> ks, vs;  // of each token; NULL where no row sees it
  const SharedArray<float> q, p, by;    // by: scales of K, then of V
};

template <int kHead, bool kBytes>
PD_KERNEL(kThreads) fp32_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  Walk<Fp32Tiles<kHead, kBytes>> walk(w, memory);
  const auto run = [&](int i, int last) { return walk.run(i, last); };
  walk_spans(w, run, run);
}

template <int kHead, bool kBytes>
int put(pd_context &c, const Work &w) {
  const Grid grid(kThreads, kBlocksAtATime, Fp32Tiles<kHead, kBytes>::kEnd);
  return launch(c, "pd_attention", fp32_kernel<kHead, kBytes>, grid, w);
}

}  // namespace

int enqueue_fp32(pd_context &c, const Work &w, int head_dim, int kv_kind) {
  if (kv_kind == PD_KV_PLAIN) return (columns_of(PD_F32, head_dim) == 64 ? put<64, false> : put<256, false>)(c, w);
  return (columns_of(PD_F32, head_dim) == 64 ? put<64, true> : put<256, true>)(c, w);
}

}  // namespace pagedec::attention
