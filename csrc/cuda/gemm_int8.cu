// Linear layers with int8 weights: how they are packed, and few rows, as gemm.cu has them: a block of eight warps has a
// panel of 32 outputs for up to 32 rows.
//
// Threads  Warps have every eighth group, straight from memory to registers; the weights of the next ones are under way
//          while products meet in shared memory, where a thread adds those of its own outputs in order. Of 16 rows
//          products are as many bytes as the weights they come from.
#include "cuda/gemm_int8.h"

#include "cuda/gemm_experts.h"
#include "cuda/gemm_weight_only.h"

namespace pagedec {
namespace gemm {
namespace {

constexpr int kBlocks = 2;  // of a multiprocessor: what the registers have room for, but for experts' rows in fp32
constexpr int kSlotFloats = 16 * kTileRows * kSumStride;  // 40 KB: 16 groups of 16 rows or 8 of 32

template <class E>
struct Few {
  const E *x;
  const char *w;  // from the panel's first output on
  int64_t k, padded_k;
  int num_rows;
  bool is_aligned;

  // Its part of a group of the panel.
  PD_DEVICE void load(int group, Piece (&pieces)[kPanelTiles]) const {
    const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
    if ((int64_t)group * kGroup >= padded_k) return;
    const char *from = w + g * padded_k + group * (int64_t)kGroup + kOwnValues * t;
    PD_UNROLL for (int j = 0; j < kPanelTiles; j++) pieces[j] = load_whole<Piece>(from + 8 * j * padded_k);
  }
  // Its products with 16 rows, from `first` on, of what there are: to `at` in products.
  PD_DEVICE void multiply(int group, int first, const Piece (&pieces)[kPanelTiles], const SharedArray<float> &products,
                          int at) const {
    const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
    const bool has_second = first + 8 < num_rows;
    const int64_t begin = (int64_t)group * kGroup + kOwnValues * t;
    Values<E> values[2];
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int row = first + 8 * half + g;
      values[half].load(x + row * k + begin, row < num_rows ? k - begin : 0, is_aligned);
    }
    const Rows rows = quantize_rows(values, has_second);
    PD_UNROLL for (int j = 0; j < kPanelTiles; j++) {
      float own[4];
      multiply_group(rows.q, rows.scales, pieces[j], own);
      PD_UNROLL for (int i = 0; i < 4; i++)
        if (i < 2 || has_second) products[at + (i / 2 * 8 + g) * kSumStride + 8 * j + 2 * t + i % 2] = own[i];
    }
  }
};

// A panel for up to 16 kTiles rows.
template <class E, int kTiles>
PD_DEVICE void run_panel(const pd_gemm_args &a, int num_rows, int64_t panel, const SharedArray<float> &products) {
  constexpr int kRows = kTiles * kTileRows, kSlots = kSlotFloats / (kRows * kSumStride), kGroups = kSlots / kWarps;
  constexpr int kOwn = kRows * kPanel / kThreads;  // outputs of a thread: column `lane` of rows warp, warp + 8, ...
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  const int64_t padded_k = pad_groups(a.k);
  const E *x = (const E *)a.x;
  const Few<E> few{x, (const char *)a.packed + panel * kPanel * padded_k, a.k, padded_k, num_rows,
                   begins_aligned(x, a.k)};
  const int num_groups = (int)(padded_k / kGroup);
  float own[kOwn];
  PD_UNROLL for (int i = 0; i < kOwn; i++) own[i] = 0.0f;
  Piece pieces[kGroups][kPanelTiles];
  PD_UNROLL for (int i = 0; i < kGroups; i++) few.load(warp + i * kWarps, pieces[i]);
  for (int first = 0; first < num_groups; first += kSlots) {
    PD_UNROLL for (int i = 0; i < kGroups; i++) {
      const int slot = warp + i * kWarps;
      if (first + slot >= num_groups) break;
      PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
        few.multiply(first + slot, tile * kTileRows, pieces[i], products,
                     (slot * kRows + tile * kTileRows) * kSumStride);
      few.load(first + slot + kSlots, pieces[i]);
    }
    sync_block();
    const int num_slots = lower(kSlots, num_groups - first);
    PD_UNROLL for (int i = 0; i < kOwn; i++)
      for (int slot = 0; slot < num_slots && warp + i * kWarps < num_rows; slot++)
        own[i] = own[i] + products[(slot * kRows + warp + i * kWarps) * kSumStride + lane];
    sync_block();
  }
  const float scale = scales_of(a)[panel * kPanel + lane];
  PD_UNROLL for (int i = 0; i < kOwn; i++) {
    const int r = warp + i * kWarps;
    finish(a, r, panel, own[i] * scale, r < num_rows);
  }
}

template <class E>
PD_KERNEL(kThreads) gemm_int8_kernel(pd_gemm_args a) {
  const int num_rows = *a.num_rows;
  if (num_rows < 1 || num_rows > kFewRows) return;
  SHARED_ARRAY(float, products, kSlotFloats);
  const int64_t panels = pad_outputs(a.n) / kPanel;
  for (int64_t panel = block_index(); panel < panels; panel += num_grid_blocks()) {
    if (num_rows <= kTileRows) run_panel<E, 1>(a, num_rows, panel, products);
    else run_panel<E, 2>(a, num_rows, panel, products);
  }
}

template <class E>
PD_KERNEL_BLOCKS(kThreads, sizeof(E) == 2 ? kBlocks : 1) experts_int8_kernel(pd_experts_args a) {
  if (*a.gemm.num_rows < 1) return;
  SHARED_ARRAY(float, products, kSlotFloats);
  const Experts<Panels<kFewOfExpert>> items(a, 1, kFewOfExpert);
  for (int item = block_index(); item < items.number; item += num_grid_blocks()) {
    const OfExpert own = items.find(item);
    run_panel<E, 1>(own.a, own.num_rows, own.at, products);
  }
}

// A warp an output: its largest magnitude, then its bytes. kOnly: as a weight beside rows in their own dtype.
template <class E, bool kOnly>
PD_KERNEL(kThreads) pack_int8_kernel(const E *w, int64_t n, int64_t k, char *packed) {
  const int64_t padded_k = kOnly ? pad(k) : pad_groups(k), padded_n = pad_outputs(n);
  const int64_t step = (int64_t)num_grid_blocks() * kWarps;
  const int lane = thread_index() % kWarp;
  for (int64_t row = (int64_t)block_index() * kWarps + thread_index() / kWarp; row < padded_n; row += step) {
    const E *from = w + row * k;
    uint32_t max_bits = 0;
    for (int64_t i = lane; i < k && row < n; i += kWarp) max_bits = upper(max_bits, magnitude(to_float(from[i])));
    for (int mask = kWarp / 2; mask; mask /= 2) max_bits = upper(max_bits, shuffle_xor(max_bits, mask));
    const float max = bits_float(max_bits), by = int8_factor(max);
    for (int64_t i = lane; i < padded_k; i += kWarp)
      packed[kOnly ? place_of_weight(row, i, padded_k) : row * padded_k + i] =
          row < n && i < k && by != 0.0f ? (char)int8_bits(to_float(from[i]) * by) : 0;
    if (lane == 0) ((float *)(packed + padded_n * padded_k))[row] = quotient(max, 127.0f);
  }
}

// Of either kind, in whose name.
template <bool kOnly>
int pack(const char *name, pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  if (check_pack(name, context, w, packed) || check_dtype(name, dtype) || check_size(name, n, k)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("%s: another thread works in this context", name);
  return of_dtype(dtype, [&](auto e) {
    using E = decltype(e);
    return launch(*context, name, pack_int8_kernel<E, kOnly>, kThreads, (const E *)w, n, k, (char *)packed);
  });
}
int64_t packed_bytes(int64_t n, int64_t k, int64_t unit) {  // unit: that k is padded to
  return (n + kPanel - 1) / kPanel * kPanel * ((k + unit - 1) / unit * unit + (int64_t)sizeof(float));
}

}  // namespace

int enqueue_int8(pd_context &c, const pd_gemm_args &a) {
  const auto kernel = of_dtype(a.dtype, [](auto e) { return gemm_int8_kernel<decltype(e)>; });
  // How many rows there are is known on the device only: of these two, one returns at once.
  return launch(c, "pd_gemm", kernel, Grid(kThreads, kBlocks), a) ? -1 : enqueue_int8_many(c, a);
}
int enqueue_experts_int8(pd_context &c, const pd_experts_args &a) {
  const auto kernel = of_dtype(a.gemm.dtype, [](auto e) { return experts_int8_kernel<decltype(e)>; });
  return launch(c, "pd_experts", kernel, Grid(kThreads, kBlocks), a) ? -1 : enqueue_experts_int8_many(c, a);
}

}  // namespace gemm
}  // namespace pagedec

using namespace pagedec;
using namespace pagedec::gemm;

extern "C" {
int64_t pd_packed_int8_bytes(int64_t n, int64_t k) {
  return check_size("pd_packed_int8_bytes", n, k) ? -1 : packed_bytes(n, k, gemm::kGroup);
}
int pd_pack_int8(pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  return pack<false>("pd_pack_int8", context, w, n, k, dtype, packed);
}
int64_t pd_packed_int8_weight_only_bytes(int64_t n, int64_t k) {
  return check_size("pd_packed_int8_weight_only_bytes", n, k) ? -1 : packed_bytes(n, k, kStep);
}
int pd_pack_int8_weight_only(pd_context *context, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed) {
  return pack<true>("pd_pack_int8_weight_only", context, w, n, k, dtype, packed);
}
// What a device's kernels do not have.
int64_t pd_packed_fp8_bytes(int64_t, int64_t) { return fail("pd_packed_fp8_bytes: a device's kernels have no fp8"); }
int pd_pack_fp8(pd_context *, const void *, int64_t, int64_t, void *) {
  return fail("pd_pack_fp8: a device's kernels have no fp8");
}
// There is but one way here.
int pd_allow_vnni(pd_context *context, int32_t) { return context ? 0 : fail("pd_allow_vnni: context is NULL"); }
}
