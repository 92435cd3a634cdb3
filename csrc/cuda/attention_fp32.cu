// Attention in fp32, for tests of what must be equal: each logit and each result is one chain of products.
#include "cuda/attention.h"

namespace pagedec::attention {
namespace {

// K and V are read where they lie; a unit's stage says where that is.
template <int kHead>
struct Fp32Tiles {
  using E = float;
  static constexpr int kColumns = kHead, kStages = 1;
  static constexpr int kStride = kHead + 1, kProbabilityStride = TILE + 1;
  static constexpr int64_t kPlacesAt = 0, kQueryAt = 16 * TILE, kProbabilityAt = kQueryAt + ROWS_MAX * kStride * 4;
  static constexpr int64_t kBytes = (kProbabilityAt + ROWS_MAX * kProbabilityStride * 4 + 15) / 16 * 16;

  PD_DEVICE explicit Fp32Tiles(const SharedMemory &memory)
      : ks(memory.part<const float *>(kPlacesAt, TILE)), vs(memory.part<const float *>(kPlacesAt + 8 * TILE, TILE)),
        q(memory.part<float>(kQueryAt, ROWS_MAX * kStride)),
        p(memory.part<float>(kProbabilityAt, ROWS_MAX * kProbabilityStride)) {}

  PD_DEVICE void put_query(int row, int d, float x) const { q[row * kStride + d] = x; }
  PD_DEVICE void put_probabilities(int row, int token, float first, float second) const {
    p[row * kProbabilityStride + token] = first, p[row * kProbabilityStride + token + 1] = second;
  }
  template <class Start>
  PD_DEVICE void begin(int, const Place &place, int, const Start &start, const float *k, const float *v) const {
    const int token = thread_index();
    if (token >= TILE) return;
    const bool is_seen = place.is_seen(token);
    ks[token] = is_seen ? k + start(place.slot(token)) : nullptr;
    vs[token] = is_seen ? v + start(place.slot(token)) : nullptr;
  }
  static PD_DEVICE void end_bringing() {}
  static PD_DEVICE void await() {}

  PD_DEVICE void add_logits(int, const Sight &sight, int dim, int warp, float (&s)[kRowTiles][2][4]) const {
    const int lane = thread_index() % kWarp;
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const float *k = ks[warp * kWarpTokens + 8 * (i / 2) + 2 * (lane % 4) + i % 2];
      for (int d = 0; k && d < dim; d++) {
        const float x = k[d];
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
        for (int token = lanes.first; token < lanes.last; token++) {
          const float weight = p[row * kProbabilityStride + token], *v = vs[token];
          PD_UNROLL for (int j = 0; j < kPieces; j++) {
            const int column = 8 * (kWarps * j + warp) + 2 * (lane % 4);
            if (column >= dim) continue;
            PD_UNROLL for (int i = 0; i < 2; i++) {
              float &x = o[tile][j][2 * half + i];
              x = x + weight * v[column + i];
            }
          }
        }
      }
  }

 private:
  const SharedArray<const float *> ks, vs;  // of each token; NULL where no row sees it
  const SharedArray<float> q, p;
};

template <int kHead>
PD_KERNEL(kThreads) fp32_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  Walk<Fp32Tiles<kHead>>(w, memory).run();
}

template <int kHead>
int put(pd_context &c, const Work &w) {
  const Grid grid(kThreads, kBlocksAtATime, Walk<Fp32Tiles<kHead>>::kBytes);
  return launch(c, "pd_attention", fp32_kernel<kHead>, grid, w);
}

}  // namespace

int enqueue_fp32(pd_context &c, const Work &w, int head_dim) {
  return head_dim <= 64 ? put<64>(c, w) : head_dim <= 128 ? put<128>(c, w) : put<256>(c, w);
}

}  // namespace pagedec::attention
