// Linear layers with weights in blocks, of few rows, up to 32: a block of eight warps has a panel of 32 outputs.
//
// Threads  A round is some groups of k: warps have every eighth of them, straight from memory to registers, and give
//          what tensor cores make of them, integers, to shared memory. There a thread adds those of its own outputs in
//          order: it has a column, as numbers of blocks lie in memory, so that they become factors once.
// x        Rows take a step for each eight, with the same weights in registers. What a step needs becomes int8 in
//          shared memory when the step before has been added.
// Stream   Weights of the next round and rows of the next step are under way meanwhile, over the ends of panels.
#include "cuda/gemm_blocks.h"

#include "cuda/gemm_experts.h"

namespace pagedec::gemm {
namespace {

constexpr int kBlocks = 2;       // of a multiprocessor
constexpr int kRows = 8;         // of a step, one for each warp
constexpr int kPlaces = 256;     // of a row and a group, or half of one, in a step
constexpr int kPlaceFloats = kPanel + 4;  // rows that lanes write at a time begin in other banks
constexpr int kSlotsMost = kPlaces / kRows;  // groups of a round

struct FewParts {  // of shared memory
  static constexpr int64_t kX = kPlaces * kPlaceFloats * (int64_t)sizeof(float);
  static constexpr int64_t kScales = kX + kPlaces * (X_GROUP / 8) * (int64_t)sizeof(uint64_t);
  static constexpr int64_t kFactors = kScales + 2 * kPlaces * (int64_t)sizeof(GroupScale);
  static constexpr int64_t kTotals = kFactors + kSlotsMost * kPanel * (int64_t)sizeof(Factors);
  static constexpr int64_t kBytes = kTotals + kFewRows * kPanel * (int64_t)sizeof(float);  // 60 KB
};

template <BlockKind kKind, class Items>
class FewBlocks {
  static constexpr bool kIsLong = kKind == BlockKind::SIX || kKind == BlockKind::BYTES;  // has twice the registers
  static constexpr int kSums = kSumsOf<kKind>, kSlots = kSlotsMost / (kIsLong ? 2 : 1), kGroups = kSlots / kWarps;
  static constexpr int kTasks = kSlots * kRows * (X_GROUP / 8) / kThreads;  // eights of x of a thread in a step
  static_assert(kSlots * (X_GROUP / 8) % kWarp == 0);                       // a warp's are of one row

  struct Step {
    int item;
    int first;  // group
    int row;
  };

 public:
  PD_DEVICE FewBlocks(const pd_gemm_args &a, const Segments::One &segment, const Items &items,
                      const SharedMemory &memory)
      : a_(a), segment_(segment), items_(items), num_groups_(a.k / X_GROUP),
        stride_(stride_of_groups(segment.shape, kWarps)), is_aligned_((uintptr_t)a.x % 16 == 0),
        pieces_(memory.part<Piece>(0, kPlaces * kPlaceFloats / 4)),
        sums_(memory.part<float>(0, kPlaces * kPlaceFloats)),
        x_(memory.part<uint64_t>(FewParts::kX, kPlaces * (X_GROUP / 8))),
        scales_(memory.part<GroupScale>(FewParts::kScales, 2 * kPlaces)),
        factors_(memory.part<Factors>(FewParts::kFactors, kSlotsMost * kPanel)),
        totals_(memory.part<float>(FewParts::kTotals, kFewRows * kPanel)), rows_(a.x), num_rows_(items.num_rows) {}

  // The panels of the segment that are this block's, from an item on.
  PD_DEVICE void run(int first_item) {
    Step step = {first_item, 0, 0};
    if (step.item >= items_.number) return;
    find(step);
    load(step);
    bring(step);
    keep(step, 0);
    sync_block();
    for (int buffer = 0; step.item < items_.number; buffer = 1 - buffer) {
      const int num_rows = num_rows_;
      const Step next = after(step);
      const bool is_last = next.item >= items_.number, ends_round = next.row == 0;
      if (!is_last && next.item != step.item) find(next);
      if (!is_last) bring(next);
      multiply(step, num_rows);
      if (ends_round && !is_last) load(next);
      sync_block();
      add(step, num_rows, buffer);
      if (!is_last) keep(next, 1 - buffer);
      sync_block();
      step = next;
    }
  }

 private:
  static PD_DEVICE int lane() { return thread_index() % kWarp; }
  static PD_DEVICE int warp() { return thread_index() / kWarp; }

  PD_DEVICE Step after(Step step) const {
    step.row += kRows;
    if (step.row < num_rows_) return step;
    step.row = 0, step.first += kSlots;
    if (step.first < num_groups_) return step;
    return {step.item + num_grid_blocks(), 0, 0};
  }
  // Whose weights are loaded next, and whose rows.
  PD_DEVICE void find(const Step &step) {
    const auto found = items_.find(step.item);
    rows_ = found.a.x, num_rows_ = found.num_rows;
    panel_ = segment_.base + ((const char *)found.a.packed - (const char *)a_.packed) + found.at * segment_.panel_bytes;
  }
  // Its groups of a round.
  PD_DEVICE void load(const Step &step) {
    GroupPlace at = group_place(segment_.shape, panel_, step.first + warp());
    PD_UNROLL for (int i = 0; i < kGroups; i++, at.advance(stride_)) {
      if (step.first + warp() + i * kWarps >= num_groups_) break;
      weights_[i].load(at.data);
      stored_[i] = load_scales<kKind>(segment_.shape, at, lane());
    }
  }
  // Its eights of rows of a step: four lanes have a group.
  static PD_DEVICE int row_of(int task) { return (thread_index() + task * kThreads) / (kSlots * (X_GROUP / 8)); }
  PD_DEVICE RowPlace place(const Step &step, int task) const {
    const int row = step.row + row_of(task), group = step.first + thread_index() / 4 % kSlots;
    return {rows_, row, group * (int64_t)X_GROUP + thread_index() % 4 * 8, row < num_rows_ && group < num_groups_,
            is_aligned_};
  }
  PD_DEVICE void bring(const Step &step) {
    PD_UNROLL for (int i = 0; i < kTasks; i++) eights_[i] = load_eight(a_, place(step, i));
  }
  PD_DEVICE void keep(const Step &step, int buffer) {
    const int slot = thread_index() / 4 % kSlots;
    PD_UNROLL for (int i = 0; i < kTasks; i++) {
      if (step.row + row_of(i) >= num_rows_) break;
      uint64_t q;
      const GroupScale scale = quantize_eight(a_, place(step, i), eights_[i], q);
      x_[(slot * kRows + row_of(i)) * 4 + thread_index() % 4] = q;
      if (thread_index() % 4 == 0) scales_[buffer * kPlaces + slot * kRows + row_of(i)] = scale;
    }
  }
  PD_DEVICE void multiply(const Step &step, int num_rows) const;
  PD_DEVICE void add(const Step &step, int num_rows, int buffer) const;

  const pd_gemm_args &a_;
  const Segments::One &segment_;
  const Items &items_;
  const int num_groups_, stride_;
  const bool is_aligned_;
  const SharedArray<Piece> pieces_;        // [slots][sums][rows][kPlaceFloats / 4], as are
  const SharedArray<float> sums_;
  const SharedArray<uint64_t> x_;          // [slots][rows][4]
  const SharedArray<GroupScale> scales_;   // [2][slots][rows]
  const SharedArray<Factors> factors_;     // [slots][outputs]
  const SharedArray<float> totals_;        // [rows][outputs]
  const void *rows_;
  const char *panel_ = nullptr;
  int num_rows_;
  LaneWeights<kKind> weights_[kGroups];
  StoredScales stored_[kGroups];
  Piece eights_[kTasks];
};

// The integers of its groups: a lane writes eight outputs of a row side by side.
template <BlockKind kKind, class Items>
PD_DEVICE void FewBlocks<kKind, Items>::multiply(const Step &step, int num_rows) const {
  const int g = lane() / 4, t = lane() % 4;
  PD_UNROLL for (int i = 0; i < kGroups; i++) {
    const int slot = warp() + i * kWarps;
    if (step.first + slot >= num_groups_) break;
    if (step.row == 0) factors_[slot * kPanel + lane()] = unit_factors<kKind>(segment_.shape, stored_[i]);
    const uint64_t row = x_[(slot * kRows + g) * 4 + t];
    const uint32_t x[4] = {(uint32_t)row, 0, (uint32_t)(row >> 32), 0};  // eight rows more would go with it
    PD_UNROLL for (int pair = 0; pair < kPanelTiles / 2; pair++) {
      int32_t sums[2][kSums][4];
      PD_UNROLL for (int j = 0; j < 2; j++) multiply_eight<kKind>(x, {weights_[i], 2 * pair + j}, sums[j]);
      PD_UNROLL for (int of = 0; of < kSums && step.row + g < num_rows; of++)
        pieces_[((slot * kSums + of) * kRows + g) * (kPlaceFloats / 4) + 2 * t + pair] = Piece{
            {(uint32_t)sums[0][of][0], (uint32_t)sums[0][of][1], (uint32_t)sums[1][of][0], (uint32_t)sums[1][of][1]}};
    }
  }
}

// What the groups of a step add to this thread's output: column `lane` of row `warp`.
template <BlockKind kKind, class Items>
PD_DEVICE void FewBlocks<kKind, Items>::add(const Step &step, int num_rows, int buffer) const {
  const int num_slots = lower(kSlots, num_groups_ - step.first), at = place_of_output(lane());
  const int row = step.row + warp(), total = row * kPanel + lane();
  if (row >= num_rows) return;
  float own = step.first ? totals_[total] : 0.0f;
  PD_UNROLL_BY(4)
  for (int slot = 0; slot < num_slots; slot++) {
    const Factors by = factors_[slot * kPanel + lane()];
    float sums[kSums];
    PD_UNROLL for (int of = 0; of < kSums; of++)
      sums[of] = sums_[((slot * kSums + of) * kRows + warp()) * kPlaceFloats + at];
    const GroupScale scale = scales_[buffer * kPlaces + slot * kRows + warp()];
    own = own + group_product<kKind>(by, shifts(by), sums, scale);
  }
  if (step.first + kSlots < num_groups_) {
    totals_[total] = own;
  } else {
    const auto found = items_.find(step.item);
    finish(found.a, row, segment_.begin + found.at, own, true);
  }
}

template <BlockKind kKind>
PD_KERNEL_BLOCKS(kThreads, kBlocks) gemm_blocks_kernel(pd_gemm_args a, Segments segments) {
  const int num_rows = *a.num_rows;
  if (num_rows < 1 || num_rows > kFewRows) return;
  LAUNCHED_SHARED(memory);
  for (int i = 0; i < segments.count; i++) {
    const Segments::One &segment = segments.one[i];
    const OneLayer items{a, num_rows, (int)(segment.end - segment.begin)};
    if (segment.shape.kind != kKind) continue;
    FewBlocks<kKind, OneLayer>(a, segment, items, memory).run(first_item((int)segment.begin));
  }
}

template <BlockKind kKind>
PD_KERNEL_BLOCKS(kThreads, kBlocks) experts_blocks_kernel(pd_experts_args a, Segments segments) {
  if (*a.gemm.num_rows < 1) return;
  LAUNCHED_SHARED(memory);
  const Experts<Panels<kFewRows>> items(a, 1, kFewRows);
  FewBlocks<kKind, Experts<Panels<kFewRows>>>(a.gemm, segments.one[0], items, memory).run(block_index());
}

}  // namespace

int enqueue_blocks(pd_context &c, const pd_gemm_args &a) {
  const Segments segments(a.packed, a.segments, a.num_segments, a.n, a.k);
  // How many rows there are is known on the device only: of a kind's two kernels, one returns at once.
  const int status = for_kinds(segments, [&](auto of) {
    const Grid grid(kThreads, kBlocks, FewParts::kBytes);
    return launch(c, "pd_gemm", gemm_blocks_kernel<decltype(of)::kKind>, grid, a, segments);
  });
  return status ? -1 : enqueue_blocks_many(c, a, segments);
}
int enqueue_experts_blocks(pd_context &c, const pd_experts_args &a) {
  const pd_gemm_args &g = a.gemm;
  const Segments segments(g.packed, g.segments, g.num_segments, g.n, g.k);
  const int status = for_kinds(segments, [&](auto of) {
    const Grid grid(kThreads, kBlocks, FewParts::kBytes);
    return launch(c, "pd_experts", experts_blocks_kernel<decltype(of)::kKind>, grid, a, segments);
  });
  return status ? -1 : enqueue_experts_blocks_many(c, a, segments);
}

}  // namespace pagedec::gemm
