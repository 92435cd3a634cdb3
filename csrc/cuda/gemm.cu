// Linear layers of few rows: a block of eight warps has a panel of 32 outputs for up to 32 rows. In fp32 it takes any
// number of them, 32 at a time; in bf16 and fp16 more than 32 are gemm_many.cu's.
//
// Threads  Warps have every eighth chunk, each straight from memory to registers: at few rows a layer is its weights,
//          and all warps' loads are under way at a time. Chunks' sums meet in shared memory.
#include "cuda/gemm.h"

#include "cuda/gemm_weight_only.h"

namespace pagedec {
namespace gemm {
namespace {

constexpr int kBlocks = 2;  // of a multiprocessor
constexpr int kChunkSteps = kChunk / kStep;
constexpr int kSumFloats = 16 * kTileRows * kSumStride;  // 40 KB: 16 chunks of 16 rows or 8 of 32

template <int kTiles>
using Sums = float[kTiles][kPanelTiles][4];

// Where a warp finds what it multiplies.
template <class E>
struct Operands {
  const E *x;     // from the first row
  const char *w;  // the panel's
  int64_t k, padded_k;
  int num_rows;
};

// A lane's values of W of the steps that come next, as they lie in memory, numbers or bytes: of a warp's chunks one
// after another, so that loads are under way over the ends of chunks, too.
template <class E, int kTiles, bool kBytes>
class WeightsAhead {
 public:
  static constexpr int kDepth = kTiles == 1 ? 4 : 2;  // steps: what the registers have room for
  static_assert(kChunkSteps % kDepth == 0);

  PD_DEVICE WeightsAhead(const Operands<E> &a, int chunk)
      : stride_(8 * a.padded_k * (int64_t)sizeof(E)), left_((int)(a.padded_k / kStep) - chunk * kChunkSteps) {
    const int lane = thread_index() % kWarp, g = lane / 4, t = lane % 4;
    at_ = a.w + (kBytes ? lane * 16 : (g * a.padded_k + 8 * t) * (int64_t)sizeof(E));
    at_ += (int64_t)chunk * kChunkSteps * kStepBytes;
    PD_UNROLL for (int i = 0; i < kDepth; i++) load(i);
    advance(kDepth);
  }
  // Of step i from where it is, if there is one, in place of those of that step before.
  PD_DEVICE void load(int i) {
    if (i >= left_) return;
    PD_UNROLL for (int j = 0; j < kLoads; j++)
      loaded_[i][j] = load_whole<Eight>(at_ + i * kStepBytes + (kBytes ? j * kWarp * 16 : j * stride_));
  }
  PD_DEVICE void advance(int steps) { at_ += steps * kStepBytes, left_ -= steps; }
  // Of output 8 j + g.
  PD_DEVICE Eight of(int i, int j) const {
    if constexpr (!kBytes) return loaded_[i][j];
    const Eight &two = loaded_[i][kBytes ? j / 2 : 0];
    return widen_eight<E>(two.pairs[j % 2 * 2], two.pairs[j % 2 * 2 + 1]);
  }

 private:
  static constexpr int kLoads = kBytes ? kPanelTiles / 2 : kPanelTiles;
  static constexpr int kStepBytes = kStep * (kBytes ? kPanel : (int)sizeof(E));  // from a step to the next
  Eight loaded_[kDepth][kLoads];
  const char *at_;
  const int64_t stride_;
  int left_;
};
template <int kTiles, bool kBytes>
struct WeightsAhead<float, kTiles, kBytes> {  // are read where they are multiplied
  PD_DEVICE WeightsAhead(const Operands<float> &, int) {}
};

// A chunk's sums. The weights of its first steps are in `ahead`, where then those of the warp's next chunk are.
template <int kTiles, bool kBytes, class E>
PD_DEVICE void multiply_chunk(const Operands<E> &a, int chunk, WeightsAhead<E, kTiles, kBytes> &ahead,
                              Sums<kTiles> &sums) {
  constexpr int kDepth = WeightsAhead<E, kTiles, kBytes>::kDepth;
  const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
  const bool aligned = kTiles == 1 || is_aligned(a.x, a.k);
  const int64_t begin = (int64_t)chunk * kChunk;
  const E *x = a.x + g * a.k + begin + 8 * t;
  int left = (int)(a.k - begin);
  PD_ROLLED for (int first = 0; first < kChunkSteps; first += kDepth) {
    PD_UNROLL for (int step = 0; step < kDepth; step++) {
      const int there = left - step * kStep;
      if (there > 0) {
        Eight w[kPanelTiles];
        PD_UNROLL for (int j = 0; j < kPanelTiles; j++) w[j] = ahead.of(step, j);
        PD_UNROLL for (int tile = 0; tile < kTiles; tile++) {
          Eight of_rows[2];
          PD_UNROLL for (int half = 0; half < 2; half++) {
            const int row = tile * kTileRows + 8 * half;
            of_rows[half] = load_some(x + row * a.k + step * kStep, row + g < a.num_rows ? there - 8 * t : 0, aligned);
          }
          PD_UNROLL for (int part = 0; part < 4; part += 2) {
            const uint32_t of_x[4] = {of_rows[0].pairs[part], of_rows[1].pairs[part], of_rows[0].pairs[part + 1],
                                      of_rows[1].pairs[part + 1]};
            PD_UNROLL for (int j = 0; j < kPanelTiles; j++)
              multiply_add<E>(sums[tile][j], of_x, w[j].pairs[part], w[j].pairs[part + 1]);
          }
        }
      }
      ahead.load(step);
    }
    const bool goes_on = first + 2 * kDepth != kChunkSteps;  // what it has begun to load ends with its chunk
    ahead.advance(goes_on ? kDepth : kDepth + (kWarps - 1) * kChunkSteps);
    x += kDepth * kStep, left -= kDepth * kStep;
  }
}

template <int kTiles, bool kBytes>
PD_DEVICE void multiply_chunk(const Operands<float> &a, int chunk, WeightsAhead<float, kTiles, kBytes> &,
                              Sums<kTiles> &sums) {
  const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
  const auto weight = [&](int output, int64_t k) {
    const int64_t byte = place_of_weight(output, k, a.padded_k);
    if (kBytes) return (float)(int8_t)(((const uint32_t *)a.w)[byte / 4] >> byte % 4 * 8);
    return ((const float *)a.w)[output * a.padded_k + k];
  };
  for (int64_t at = (int64_t)chunk * kChunk, end = at + kChunk; at < end && at < a.k; at++)
    PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
      PD_UNROLL for (int i = 0; i < 4; i++) {
        const int row = tile * kTileRows + i / 2 * 8 + g;
        if (row >= a.num_rows) continue;
        const float x = a.x[row * a.k + at];
        PD_UNROLL for (int j = 0; j < kPanelTiles; j++)
          sums[tile][j][i] = fmaf(x, weight(8 * j + 2 * t + i % 2, at), sums[tile][j][i]);
      }
}

// A panel for up to 16 kTiles rows from `row` on.
template <class E, bool kBytes, int kTiles>
PD_DEVICE void run_panel(const pd_gemm_args &a, int row, int num_rows, int panel,
                         const SharedArray<float> &partial) {
  constexpr int kRows = kTiles * kTileRows, kSlots = kSumFloats / (kRows * kSumStride);
  constexpr int kOwn = kRows * kPanel / kThreads;  // outputs of a thread: column `lane` of rows warp, warp + 8, ...
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, g = lane / 4, t = lane % 4;
  const int64_t padded_k = pad(a.k);
  constexpr int64_t kWidth = kBytes ? 1 : (int64_t)sizeof(E);
  const char *w = (const char *)a.packed + (int64_t)panel * kPanel * padded_k * kWidth;
  const Operands<E> operands{(const E *)a.x + (int64_t)row * a.k, w, a.k, padded_k, num_rows};
  const int num_chunks = (int)((padded_k + kChunk - 1) / kChunk);
  float own[kOwn];
  PD_UNROLL for (int i = 0; i < kOwn; i++) own[i] = 0.0f;
  WeightsAhead<E, kTiles, kBytes> ahead(operands, warp);
  for (int first = 0; first < num_chunks; first += kSlots) {
    const int stop = first + kSlots < num_chunks ? first + kSlots : num_chunks;
    for (int chunk = first + warp; chunk < stop; chunk += kWarps) {
      Sums<kTiles> sums;
      PD_UNROLL for (int i = 0; i < kTiles * kPanelTiles * 4; i++) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
      multiply_chunk<kTiles, kBytes>(operands, chunk, ahead, sums);
      PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
        PD_UNROLL for (int i = 0; i < kPanelTiles * 4; i++) {
          const int at = (chunk - first) * kRows + tile * kTileRows + i / 2 % 2 * 8 + g;
          partial[at * kSumStride + 8 * (i / 4) + 2 * t + i % 2] = sums[tile][i / 4][i % 4];
        }
    }
    sync_block();
    PD_UNROLL_BY(4)
    for (int slot = 0; slot < stop - first; slot++)
      PD_UNROLL for (int i = 0; i < kOwn; i++)
        own[i] = own[i] + partial[(slot * kRows + warp + i * kWarps) * kSumStride + lane];
    sync_block();
  }
  const float scale = kBytes ? weight_scales(a)[panel * kPanel + lane] : 1.0f;
  PD_ROLLED for (int r = warp; r < kRows; r += kWarps) {  // what it takes is found anew: registers are scarce
    finish(a, row + r, panel, kBytes ? own[0] * scale : own[0], r < num_rows);
    PD_UNROLL for (int i = 1; i < kOwn; i++) own[i - 1] = own[i];
  }
}

// kRows rows at a time. Each variant has its own loop: what it needs for all panels would take the other one registers.
template <class E, bool kBytes, int kTiles>
PD_DEVICE void run_panels(const pd_gemm_args &a, const SharedArray<float> &partial) {
  constexpr int kRows = kTiles * kTileRows;
  const int groups = (*a.num_rows + kRows - 1) / kRows, panels = (a.n + kPanel - 1) / kPanel;
  for (int i = block_index(); i < groups * panels; i += num_grid_blocks()) {
    const int row = i % groups * kRows;
    run_panel<E, kBytes, kTiles>(a, row, lower(*a.num_rows - row, kRows), i / groups, partial);
  }
}

template <class E, bool kBytes>
PD_KERNEL_BLOCKS(kThreads, sizeof(E) == 2 ? kBlocks : 1) gemm_kernel(pd_gemm_args a, int most_rows) {
  const int num_rows = *a.num_rows;
  if (num_rows > most_rows) return;
  SHARED_ARRAY(float, partial, kSumFloats);
  const bool is_short = sizeof(E) == 2 && num_rows <= kTileRows && is_aligned(a.x, a.k);  // others need not be fast
  if (is_short) run_panels<E, kBytes, 1>(a, partial);
  else run_panels<E, kBytes, 2>(a, partial);
}

// W row by row, to rows and columns that there are more of.
template <class E>
PD_KERNEL(kThreads) pack_kernel(const E *w, int64_t n, int64_t k, E *packed) {
  const int64_t padded_k = pad(k), rows = (n + kPanel - 1) / kPanel * kPanel;
  for (int64_t i = (int64_t)block_index() * kThreads + thread_index(); i < rows * padded_k;
       i += (int64_t)num_grid_blocks() * kThreads) {
    const int64_t row = i / padded_k, column = i % padded_k;
    packed[i] = row < n && column < k ? w[row * k + column] : from_float<E>(0.0f);
  }
}

}  // namespace
}  // namespace gemm

int enqueue_gemm(pd_context &c, const pd_gemm_args &a) {
  using namespace gemm;
  if (a.quantization == PD_INT8) return enqueue_int8(c, a);
  if (a.quantization == PD_BLOCKS) return enqueue_blocks(c, a);
  const Grid grid(kThreads, kBlocks);
  const bool is_bytes = a.quantization == PD_INT8_WEIGHT_ONLY;
  const auto kernel = of_dtype(a.dtype, [&](auto e) {
    return is_bytes ? gemm_kernel<decltype(e), true> : gemm_kernel<decltype(e), false>;
  });
  // A list that was recorded for few rows has this one alone, which is right with any number, and slower.
  if (a.dtype == PD_F32 || is_for_few(c)) return launch(c, "pd_gemm", kernel, grid, a, INT32_MAX);
  // How many rows there are is known on the device only: of these two, one returns at once.
  return launch(c, "pd_gemm", kernel, grid, a, kFewRows) ? -1 : enqueue_many(c, a);
}

}  // namespace pagedec

using namespace pagedec;
using namespace pagedec::gemm;

extern "C" {
int64_t pd_packed_bytes(int64_t n, int64_t k, int32_t dtype) {
  if (check_size("pd_packed_bytes", n, k) || check_dtype("pd_packed_bytes", dtype)) return -1;
  return (n + kPanel - 1) / kPanel * kPanel * ((k + kStep - 1) / kStep * kStep) * (dtype == PD_F32 ? 4 : 2);
}
int pd_pack(pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  if (check_pack("pd_pack", context, w, packed) || pd_packed_bytes(n, k, dtype) < 0) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_pack: another thread works in this context");
  return of_dtype(dtype, [&](auto e) {
    using E = decltype(e);
    return launch(*context, "pd_pack", pack_kernel<E>, kThreads, (const E *)w, n, k, (E *)packed);
  });
}
}
