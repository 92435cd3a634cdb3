// Low-rank updates of linear layers, each row's by its own adapter.
//
// Work     Up to eight neighbours with one adapter are a run, which is read the adapter once for. A x: a block has 16
//          ranks of a run, and its warps every eighth step of 32 of k, on tensor cores: the ranks are what these take
//          16 rows of, x what they take 8 columns of. Outputs: a thread has one of a run, or a gate with what it
//          multiplies. Grids go through all rows, however many there are.
// Bits     A warp's sum is a chain of products of 16 of k, of which each lane has eight neighbours in 32; warps are
//          added from the first on. Outputs add up ranks in order. Who stands beside a row changes nothing.
#include "cuda/gemm.h"

namespace pagedec {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kTile = 8;    // rows that a run may have; it begins and ends within as many
constexpr int kRanks = 16;  // of a block, and of B in a thread's registers
constexpr int kStep = 32;   // of k: eight neighbours for each of four lanes
constexpr int kAhead = 8;   // steps that are under way

struct Run {
  int place, count;  // 0: the row is not its first one
};
PD_DEVICE Run run_at(const pd_lora_args &a, int64_t row, int64_t num_rows) {
  const int place = a.adapters[row], lane = thread_index() % kWarp, left = kTile - (int)(row % kTile);
  const uint32_t same = ballot(lane < left && row + lane < num_rows && a.adapters[row + lane] == place);
  const bool is_first = row % kTile == 0 || a.adapters[row - 1] != place;
  return {place, is_first ? count_bits(same & ~(same + 1)) : 0};
}

// What a block has of A x: ranks of one part, of a run.
struct Low {
  int64_t row;
  Run run;
  int part, first, ranks;
};
template <class Visit>
PD_DEVICE void each_low(const pd_lora_args &a, const Visit &visit) {
  const int pieces = (a.rank + kRanks - 1) / kRanks, each = pieces * a.num_parts;
  const int64_t num_rows = *a.num_rows;
  for (int64_t u = block_index(); u < num_rows * each; u += num_grid_blocks()) {
    const int64_t row = u / each;
    const int part = (int)(u % each / pieces), first = (int)(u % pieces) * kRanks;
    const Run run = run_at(a, row, num_rows);
    if (run.count == 0 || run.place < 0) continue;
    const int ranks = lower(kRanks, a.ranks[(int64_t)run.place * a.num_parts + part] - first);
    if (ranks > 0) visit(Low{row, run, part, first, ranks});
  }
}
template <class E>
PD_DEVICE const E *rows_of_a(const pd_lora_args &a, const Low &of) {
  return (const E *)a.a + (((int64_t)of.run.place * a.num_parts + of.part) * a.rank + of.first) * a.k;
}
PD_DEVICE float *place_of(const pd_lora_args &a, const Low &of, int row, int rank) {
  return a.low + ((of.row + row) * a.num_parts + of.part) * a.rank + of.first + rank;
}

// A warp's part of the sums of 16 ranks and eight rows, as tensor cores leave them. kSteps are under way at a time.
template <class E, bool kAligned, int kSteps>
PD_DEVICE void add_products(const pd_lora_args &a, const Low &of, float (&sum)[4]) {
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, g = lane / 4, t = lane % 4;
  const int first = warp * kStep + t * 8;  // of the lane
  const E *w = rows_of_a<E>(a, of) + g * (int64_t)a.k + first, *upper_w = w + 8 * (int64_t)a.k;
  const E *x = (const E *)a.x + (of.row + g) * a.k + first;
  const int left_w = g < of.ranks ? a.k - first : 0, left_upper = g + 8 < of.ranks ? a.k - first : 0;
  const int left_x = g < of.run.count ? a.k - first : 0;
  for (int at = 0; at < a.k - warp * kStep; at += kSteps * kWarps * kStep) {
    gemm::Eight of_a[kSteps][2], of_x[kSteps];
    PD_UNROLL for (int i = 0; i < kSteps; i++) {
      const int step = at + i * kWarps * kStep;
      of_a[i][0] = gemm::load_some(w + step, left_w - step, kAligned);
      of_a[i][1] = gemm::load_some(upper_w + step, left_upper - step, kAligned);
    }
    await_kernels();  // which write x; adapters nobody does
    PD_UNROLL for (int i = 0; i < kSteps; i++) {
      const int step = at + i * kWarps * kStep;
      of_x[i] = gemm::load_some(x + step, left_x - step, kAligned);
    }
    PD_UNROLL for (int i = 0; i < kSteps; i++)
      PD_UNROLL for (int j = 0; j < 4; j += 2) {
        const uint32_t ranks[4] = {of_a[i][0].pairs[j], of_a[i][1].pairs[j], of_a[i][0].pairs[j + 1],
                                   of_a[i][1].pairs[j + 1]};
        multiply_add<E>(sum, ranks, of_x[i].pairs[j], of_x[i].pairs[j + 1]);
      }
  }
}

template <class E>
PD_KERNEL(kThreads) lora_low_kernel(pd_lora_args a) {
  SHARED_ARRAY(float, sums, kWarps * kRanks * kTile);
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, g = lane / 4, t = lane % 4;
  const bool is_aligned = gemm::is_aligned(a.x, a.k) && gemm::is_aligned(a.a, a.k);
  let_next_begin();
  each_low(a, [&](const Low &of) {
    float sum[4] = {};
    if (is_aligned) add_products<E, true, kAhead>(a, of, sum);
    else add_products<E, false, 1>(a, of, sum);
    sync_block();  // those of the run before have been read
    PD_UNROLL for (int i = 0; i < 4; i++)
      sums[(warp * kTile + 2 * t + i % 2) * kRanks + g + i / 2 * 8] = sum[i];
    sync_block();
    const int row = thread_index() / kRanks, rank = thread_index() % kRanks;
    if (row >= of.run.count || rank >= of.ranks) return;
    float total = sums[row * kRanks + rank];
    PD_UNROLL for (int i = 1; i < kWarps; i++) total = total + sums[(i * kTile + row) * kRanks + rank];
    *place_of(a, of, row, rank) = total;
  });
  await_kernels();
}

// In fp32 lanes add up every 32nd product, and are added by a tree.
PD_KERNEL(kThreads) lora_low_fp32_kernel(pd_lora_args a) {
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  let_next_begin();
  await_kernels();
  each_low(a, [&](const Low &of) {
    for (int i = warp; i < of.run.count * of.ranks; i += kWarps) {
      const int row = i / of.ranks, rank = i % of.ranks;
      const float *x = (const float *)a.x + (of.row + row) * a.k, *w = rows_of_a<float>(a, of) + rank * (int64_t)a.k;
      float sum = 0.0f;
      for (int64_t j = lane; j < a.k; j += kWarp) sum = sum + x[j] * w[j];
      PD_UNROLL for (int mask = kWarp / 2; mask; mask /= 2) sum = sum + shuffle_xor(sum, mask);
      if (lane == 0) *place_of(a, of, row, rank) = sum;
    }
  });
}

struct alignas(16) Four {
  float values[4];
};
// What a thread has of a run: kColumns columns of one output, one or a gate and what it multiplies.
template <class E, int kColumns>
struct Outputs {
  int64_t column[kColumns];
  int part[kColumns], ranks[kColumns];
  float scale[kColumns], sum[kColumns][kTile];
};

// low[part][row][rank / 4] of a run, of ranks from `first` on.
PD_DEVICE void bring_low(const pd_lora_args &a, int64_t row, const Run &run, int first, const SharedArray<Four> &low) {
  const int i = thread_index(), rank = first + i % (kRanks / 4) * 4, of = i / (kRanks / 4);
  if (of >= kTile * a.num_parts) return;
  const int part = of / kTile, r = of % kTile;
  const int ranks = r < run.count ? a.ranks[(int64_t)run.place * a.num_parts + part] : 0;
  const float *from = a.low + ((row + r) * a.num_parts + part) * a.rank + rank;
  Four four;
  PD_UNROLL for (int j = 0; j < 4; j++) four.values[j] = rank + j < ranks ? from[j] : 0.0f;
  low[i] = four;
}

template <class E, int kColumns>
PD_DEVICE void add_up(const pd_lora_args &a, int64_t row, const Run &run, bool is_there,
                      Outputs<E, kColumns> &own, const SharedArray<Four> &low) {
  int most = 0;
  for (int part = 0; part < a.num_parts; part++)
    most = upper(most, a.ranks[(int64_t)run.place * a.num_parts + part]);
  for (int first = 0; first < most; first += kRanks) {
    float w[kColumns][kRanks];
    PD_UNROLL for (int c = 0; c < kColumns; c++) {
      const E *b = (const E *)a.b + ((int64_t)run.place * a.rank + first) * a.n + own.column[c];
      PD_UNROLL for (int i = 0; i < kRanks; i++)
        w[c][i] = is_there && first + i < own.ranks[c] ? to_float(b[(int64_t)i * a.n]) : 0.0f;
    }
    await_kernels();
    sync_block();  // what was there has been read
    bring_low(a, row, run, first, low);
    sync_block();
    PD_UNROLL for (int r = 0; r < kTile; r++) {
      if (r >= run.count) break;
      PD_UNROLL for (int c = 0; c < kColumns; c++)
        PD_UNROLL for (int i = 0; i < kRanks; i++) {
          const Four four = low[(own.part[c] * kTile + r) * (kRanks / 4) + i / 4];
          if (first + i < own.ranks[c]) own.sum[c][r] = own.sum[c][r] + four.values[i % 4] * w[c][i];
        }
    }
  }
}

template <class E, class Y, int kColumns>
PD_KERNEL(kThreads) lora_outputs_kernel(pd_lora_args a) {
  SHARED_ARRAY(Four, low, PD_MAX_LORA_PARTS * kTile * kRanks / 4);
  let_next_begin();
  const int64_t num_rows = *a.num_rows, width = a.n / kColumns, pieces = (width + kThreads - 1) / kThreads;
  for (int64_t u = block_index(); u < num_rows * pieces; u += num_grid_blocks()) {
    const int64_t row = u / pieces, out = u % pieces * kThreads + thread_index();
    const Run run = run_at(a, row, num_rows);
    if (run.count == 0 || (kColumns == 1 && run.place < 0)) continue;
    const bool is_there = out < width;
    Outputs<E, kColumns> own = {};
    PD_UNROLL for (int c = 0; c < kColumns; c++) {
      own.column[c] = kColumns == 1 ? out : out / 16 * 32 + out % 16 + c * 16;
      if (run.place < 0 || !is_there) continue;
      own.part[c] = a.parts[own.column[c] / 16];
      const int64_t of = (int64_t)run.place * a.num_parts + own.part[c];
      own.ranks[c] = a.ranks[of], own.scale[c] = a.scales[of];
    }
    if (run.place >= 0) add_up(a, row, run, is_there, own, low);
    await_kernels();
    if (!is_there) continue;
    PD_UNROLL for (int r = 0; r < kTile; r++) {
      if (r >= run.count) break;
      Y *y = (Y *)a.y + (row + r) * width + out;
      float z[kColumns];
      PD_UNROLL for (int c = 0; c < kColumns; c++) {
        const float before = kColumns == 1 ? to_float(*y) : a.z[(row + r) * (int64_t)a.n + own.column[c]];
        z[c] = own.ranks[c] ? before + own.scale[c] * own.sum[c][r] : before;
      }
      *y = from_float<Y>(kColumns == 1 ? z[0] : gemm::activated(a.epilogue, z[0], z[kColumns - 1]));
    }
  }
  await_kernels();
}

// Most blocks of few rows would only begin.
Grid grid_of(const pd_context &c) { return {kThreads, is_for_few(c) ? 2 : kBlocksAMultiprocessor}; }

template <class E, class Y>
int enqueue_outputs(pd_context &c, const pd_lora_args &a) {
  const auto kernel = a.epilogue == PD_ADD ? lora_outputs_kernel<E, Y, 1> : lora_outputs_kernel<E, Y, 2>;
  return launch_early(c, "pd_lora", kernel, grid_of(c), a);
}
template <class E>
int enqueue_low(pd_context &c, const pd_lora_args &a) {
  if constexpr (sizeof(E) == 4) return launch_early(c, "pd_lora", lora_low_fp32_kernel, grid_of(c), a);
  else return launch_early(c, "pd_lora", lora_low_kernel<E>, grid_of(c), a);
}

}  // namespace

int enqueue_lora(pd_context &c, const pd_lora_args &a) {
  return of_dtype(a.dtype, [&](auto e) {
    using E = decltype(e);
    if (enqueue_low<E>(c, a)) return -1;
    return a.y_dtype == PD_F32 ? enqueue_outputs<E, float>(c, a) : enqueue_outputs<E, E>(c, a);
  });
}

}  // namespace pagedec
