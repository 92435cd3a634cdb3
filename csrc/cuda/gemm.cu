// Linear layers: which kernel takes one; weights as kernels read them; and fp32, of any number of rows, 32 at a time: a
// block of eight warps has a panel of 32 outputs, of which warps have every eighth chunk of k.
#include "cuda/gemm.h"

#include "cuda/gemm_experts.h"
#include "cuda/gemm_weight_only.h"

namespace pagedec {
namespace gemm {
namespace {

constexpr int kTiles = 2, kRows = kTiles * kTileRows;  // that a block takes at a time
constexpr int kOwn = kRows * kPanel / kThreads;        // outputs of a thread: column `lane` of rows warp, warp + 8, ...
using Sums = float[kTiles][kPanelTiles][4];

// Where a warp finds what it multiplies.
struct Operands {
  const float *x;  // from the first row
  const char *w;   // the panel's
  int64_t k, padded_k;
  int num_rows;
};

template <bool kBytes>
PD_DEVICE void multiply_chunk(const Operands &a, int chunk, Sums &sums) {
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

// An item: a panel for up to kRows rows.
template <bool kBytes, class Items>
PD_DEVICE void run_item(const Items &items, int item, const SharedArray<float> &partial) {
  const auto found = items.find(item);
  const auto &a = found.a;
  const int groups = Panels<kRows>::groups(found.num_rows), row = found.at % groups * kRows;
  const int num_rows = lower(found.num_rows - row, kRows), panel = found.at / groups;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, g = lane / 4, t = lane % 4;
  const int64_t padded_k = pad(a.k);
  const char *w = (const char *)a.packed + (int64_t)panel * kPanel * padded_k * (kBytes ? 1 : (int)sizeof(float));
  const Operands operands{(const float *)a.x + (int64_t)row * a.k, w, a.k, padded_k, num_rows};
  const int num_chunks = (int)((padded_k + kChunk - 1) / kChunk);
  float own[kOwn] = {};
  for (int first = 0; first < num_chunks; first += kWarps) {
    const int chunk = first + warp, num_slots = lower(num_chunks - first, kWarps);
    if (chunk < num_chunks) {
      Sums sums;
      PD_UNROLL for (int i = 0; i < kTiles * kPanelTiles * 4; i++) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
      multiply_chunk<kBytes>(operands, chunk, sums);
      PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
        PD_UNROLL for (int i = 0; i < kPanelTiles * 4; i++) {
          const int at = warp * kRows + tile * kTileRows + i / 2 % 2 * 8 + g;
          partial[at * kSumStride + 8 * (i / 4) + 2 * t + i % 2] = sums[tile][i / 4][i % 4];
        }
    }
    sync_block();
    PD_UNROLL_BY(4)
    for (int slot = 0; slot < num_slots; slot++)
      PD_UNROLL for (int i = 0; i < kOwn; i++)
        own[i] = own[i] + partial[(slot * kRows + warp + i * kWarps) * kSumStride + lane];
    sync_block();
  }
  const auto last = items.find(item);  // again: registers are scarcer than instructions
  const float scale = kBytes ? weight_scales(last.a)[panel * kPanel + lane] : 1.0f;
  PD_ROLLED for (int r = warp; r < kRows; r += kWarps) {  // one body: activations are long
    finish(last.a, row + r, panel, kBytes ? own[0] * scale : own[0], r < num_rows);
    PD_UNROLL for (int i = 1; i < kOwn; i++) own[i - 1] = own[i];
  }
}

template <bool kBytes>
PD_KERNEL(kThreads) gemm_fp32_kernel(pd_gemm_args a) {
  SHARED_ARRAY(float, partial, kWarps * kRows * kSumStride);
  const OneLayer items{a, *a.num_rows, Panels<kRows>::of(*a.num_rows, a.n)};
  for (int i = block_index(); i < items.number; i += num_grid_blocks()) run_item<kBytes>(items, i, partial);
}

template <bool kBytes>
PD_KERNEL_BLOCKS(kThreads, 1) experts_fp32_kernel(pd_experts_args a) {
  SHARED_ARRAY(float, partial, kWarps * kRows * kSumStride);
  if (*a.gemm.num_rows < 1) return;
  const Experts<Panels<kRows>> items(a, 1);
  for (int i = block_index(); i < items.number; i += num_grid_blocks()) run_item<kBytes>(items, i, partial);
}

// W row by row, to rows and columns that there are more of.
template <class E>
PD_KERNEL(kThreads) pack_kernel(const E *w, int64_t n, int64_t k, E *packed) {
  const int64_t padded_k = pad(k), rows = (n + kPanel - 1) / kPanel * kPanel;
  for (int64_t i = (int64_t)block_index() * kThreads + thread_index(); i < rows * padded_k;
       i += (int64_t)num_grid_blocks() * kThreads) {
    const int64_t row = i / padded_k, column = i % padded_k;
    const E x = row < n && column < k ? w[row * k + column] : from_float<E>(0.0f);
    packed[sizeof(E) == 2 ? place_of_half(row, column, padded_k) : i] = x;
  }
}

}  // namespace
}  // namespace gemm

int enqueue_gemm(pd_context &c, const pd_gemm_args &a) {
  using namespace gemm;
  if (a.quantization == PD_INT8) return enqueue_int8(c, a);
  if (a.quantization == PD_BLOCKS) return enqueue_blocks(c, a);
  if (a.dtype == PD_F32) {
    const bool is_bytes = a.quantization == PD_INT8_WEIGHT_ONLY;
    return launch(c, "pd_gemm", is_bytes ? gemm_fp32_kernel<true> : gemm_fp32_kernel<false>, Grid(kThreads, 1), a);
  }
  // A list that was recorded for few rows has this one alone, which is right with any number, and slower.
  if (is_for_few(c)) return enqueue_few(c, a, INT32_MAX);
  // How many rows there are is known on the device only: of these two, one returns at once.
  const int few = few_rows(c, a);
  if (enqueue_few(c, a, few)) return -1;
  return is_for_hopper(c, a) ? enqueue_hopper(c, a, few) : enqueue_many(c, a);
}

int enqueue_experts(pd_context &c, const pd_experts_args &a) {
  using namespace gemm;
  if (a.gemm.quantization == PD_INT8) return enqueue_experts_int8(c, a);
  if (a.gemm.quantization == PD_BLOCKS) return enqueue_experts_blocks(c, a);
  if (a.gemm.dtype == PD_F32) {
    const bool is_bytes = a.gemm.quantization == PD_INT8_WEIGHT_ONLY;
    return launch(c, "pd_experts", is_bytes ? experts_fp32_kernel<true> : experts_fp32_kernel<false>,
                  Grid(kThreads, 1), a);
  }
  // No expert has more rows than there are; and this kernel is right with any number, too.
  if (is_for_few(c)) return enqueue_experts_few(c, a, INT32_MAX);
  return enqueue_experts_few(c, a, kFewOfExpert) ? -1 : enqueue_experts_many(c, a);
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
