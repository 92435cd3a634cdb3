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

// A lane's values of W of a step, which are numbers or bytes.
template <bool kBytes, class E>
PD_DEVICE void load_step(const Operands<E> &a, int64_t begin, Eight (&w)[kPanelTiles]) {
  const int lane = thread_index() % kWarp, g = lane / 4, t = lane % 4;
  if constexpr (kBytes) {
    PD_UNROLL for (int j = 0; j < kPanelTiles; j += 2) {
      const Eight two = load_whole<Eight>(a.w + begin * kPanel + (j / 2 * kWarp + lane) * 16);
      PD_UNROLL for (int i = 0; i < 2; i++) w[j + i] = widen_eight<E>(two.pairs[2 * i], two.pairs[2 * i + 1]);
    }
  } else {
    PD_UNROLL for (int j = 0; j < kPanelTiles; j++)
      w[j] = load_whole<Eight>((const E *)a.w + (8 * j + g) * a.padded_k + begin + 8 * t);
  }
}

template <int kTiles, bool kBytes, class E>
PD_DEVICE void multiply_chunk(const Operands<E> &a, int64_t begin, int64_t end, Sums<kTiles> &sums) {
  const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
  const bool aligned = is_aligned(a.x, a.k);
  PD_UNROLL for (int step = 0; step < kChunk / kStep; step++) {
    const int64_t at = begin + step * kStep + 8 * t;
    if (begin + step * kStep >= end) break;
    Eight w[kPanelTiles];
    load_step<kBytes>(a, begin + step * kStep, w);
    PD_UNROLL for (int tile = 0; tile < kTiles; tile++) {
      Eight x[2];
      PD_UNROLL for (int half = 0; half < 2; half++) {
        const int row = tile * kTileRows + 8 * half + g;
        x[half] = load_some(a.x + row * a.k + at, row < a.num_rows ? a.k - at : 0, aligned);
      }
      PD_UNROLL for (int part = 0; part < 4; part += 2) {
        const uint32_t of_x[4] = {x[0].pairs[part], x[1].pairs[part], x[0].pairs[part + 1], x[1].pairs[part + 1]};
        PD_UNROLL for (int j = 0; j < kPanelTiles; j++)
          multiply_add<E>(sums[tile][j], of_x, w[j].pairs[part], w[j].pairs[part + 1]);
      }
    }
  }
}

template <int kTiles, bool kBytes>
PD_DEVICE void multiply_chunk(const Operands<float> &a, int64_t begin, int64_t end, Sums<kTiles> &sums) {
  const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
  const auto weight = [&](int output, int64_t k) {
    const int64_t byte = place_of_weight(output, k, a.padded_k);
    if (kBytes) return (float)(int8_t)(((const uint32_t *)a.w)[byte / 4] >> byte % 4 * 8);
    return ((const float *)a.w)[output * a.padded_k + k];
  };
  for (int64_t at = begin; at < end && at < a.k; at++)
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
PD_DEVICE void run_panel(const pd_gemm_args &a, int64_t row, int num_rows, int64_t panel,
                         const SharedArray<float> &partial) {
  constexpr int kRows = kTiles * kTileRows, kSlots = kSumFloats / (kRows * kSumStride);
  constexpr int kOwn = kRows * kPanel / kThreads;  // outputs of a thread: column `lane` of rows warp, warp + 8, ...
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, g = lane / 4, t = lane % 4;
  const int64_t padded_k = pad(a.k);
  constexpr int64_t kWidth = kBytes ? 1 : (int64_t)sizeof(E);
  const char *w = (const char *)a.packed + panel * kPanel * padded_k * kWidth;
  const Operands<E> operands{(const E *)a.x + row * a.k, w, a.k, padded_k, num_rows};
  const int num_chunks = (int)((padded_k + kChunk - 1) / kChunk);
  float own[kOwn];
  PD_UNROLL for (int i = 0; i < kOwn; i++) own[i] = 0.0f;
  for (int first = 0; first < num_chunks; first += kSlots) {
    const int stop = first + kSlots < num_chunks ? first + kSlots : num_chunks;
    for (int chunk = first + warp; chunk < stop; chunk += kWarps) {
      Sums<kTiles> sums;
      PD_UNROLL for (int i = 0; i < kTiles * kPanelTiles * 4; i++) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
      const int64_t begin = (int64_t)chunk * kChunk, end = begin + kChunk;
      multiply_chunk<kTiles, kBytes>(operands, begin, end < padded_k ? end : padded_k, sums);
      PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
        PD_UNROLL for (int i = 0; i < kPanelTiles * 4; i++) {
          const int at = (chunk - first) * kRows + tile * kTileRows + i / 2 % 2 * 8 + g;
          partial[at * kSumStride + 8 * (i / 4) + 2 * t + i % 2] = sums[tile][i / 4][i % 4];
        }
    }
    sync_block();
    PD_UNROLL for (int i = 0; i < kOwn; i++)
      for (int slot = 0; slot < stop - first; slot++)
        own[i] = own[i] + partial[(slot * kRows + warp + i * kWarps) * kSumStride + lane];
    sync_block();
  }
  const float scale = kBytes ? weight_scales(a)[panel * kPanel + lane] : 1.0f;
  PD_UNROLL for (int i = 0; i < kOwn; i++) {
    const int r = warp + i * kWarps;
    finish(a, row + r, panel, kBytes ? own[i] * scale : own[i], r < num_rows);
  }
}

template <class E, bool kBytes>
PD_KERNEL(kThreads) gemm_kernel(pd_gemm_args a, int most_rows) {
  if (*a.num_rows > most_rows) return;
  SHARED_ARRAY(float, partial, kSumFloats);
  const int64_t groups = ((int64_t)*a.num_rows + kFewRows - 1) / kFewRows;
  const int64_t panels = ((int64_t)a.n + kPanel - 1) / kPanel;
  for (int64_t i = block_index(); i < groups * panels; i += num_grid_blocks()) {
    const int64_t row = i % groups * kFewRows, left = *a.num_rows - row;
    const int num_rows = left < kFewRows ? (int)left : kFewRows;
    const bool is_short = sizeof(E) == 2 && num_rows <= kTileRows;  // fp32 need not be fast
    if (is_short) run_panel<E, kBytes, 1>(a, row, num_rows, i / groups, partial);
    else run_panel<E, kBytes, 2>(a, row, num_rows, i / groups, partial);
  }
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
  constexpr int kBlocks = 2;  // what the registers have room for
  const Grid grid(kThreads, kBlocks);
  const bool is_bytes = a.quantization == PD_INT8_WEIGHT_ONLY;
  const auto kernel = of_dtype(a.dtype, [&](auto e) {
    return is_bytes ? gemm_kernel<decltype(e), true> : gemm_kernel<decltype(e), false>;
  });
  if (a.dtype == PD_F32 || !has_room_for_many(c)) return launch(c, "pd_gemm", kernel, grid, a, INT32_MAX);
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
