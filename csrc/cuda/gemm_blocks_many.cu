// Linear layers with weights in blocks, of many rows: a block of eight warps has a tile of rows x outputs of a segment,
// as gemm_int8_many.cu has. W comes to shared memory as it is packed; rows of x and the numbers of W's blocks come to
// registers and become int8 and factors a group before they are needed.
//
// Shared   x [2][rows][4 lanes] of 8 bytes and its groups' scales; factors [2][outputs] in the order of lanes; W of a
//          group [3][panels][up to 64] of 16 bytes. Lanes read side by side, so they meet no bank twice.
// Stream   Operands run two groups ahead, over the ends of tiles.
#include "cuda/gemm_blocks.h"
#include "cuda/gemm_tiles.h"

namespace pagedec::gemm {
namespace {

constexpr int kLongestGroup = 64;  // pieces of a panel

PD_DEVICE int num_outputs(const Segments::One &segment) { return (int)(segment.end - segment.begin) * kPanel; }

template <class S>
struct Parts {  // of shared memory
  static constexpr int kPanels = S::kColumns / kPanel, kWPieces = kPanels * kLongestGroup;
  static constexpr int64_t kX = kStages * kWPieces * (int64_t)sizeof(Piece);
  static constexpr int64_t kScales = kX + kBuffers * S::kRows * 4 * (int64_t)sizeof(uint64_t);
  static constexpr int64_t kFactors = kScales + kBuffers * S::kRows * (int64_t)sizeof(GroupScale);
  static constexpr int64_t kSums = kFactors + 2 * kBuffers * S::kColumns * (int64_t)sizeof(float);
  static constexpr int64_t kBytes = kSums + kWarps * kWarpSums * (int64_t)sizeof(float);
};
constexpr int64_t kSharedBytes = Parts<Wide>::kBytes;  // 44 KB
static_assert(Parts<Narrow>::kBytes <= kSharedBytes);

template <class S, BlockKind kKind, class Items>
class BlockTiles {
  static constexpr int kRowTiles = S::kRowTiles, kColumnTiles = S::kColumnTiles, kWarpPanels = kColumnTiles / 4;
  static constexpr int kPieces = kKind == BlockKind::BYTES ? 64 : kKind == BlockKind::SIX ? 48 : 32;  // of a panel
  static constexpr int kTasks = S::kRows * 4 / kThreads;  // eights of x of a thread
  using P = Parts<S>;
  using Sums = float[kRowTiles][kColumnTiles][4];

 public:
  PD_DEVICE BlockTiles(const pd_gemm_args &a, const Segments::One &segment, const Items &items,
                       const SharedMemory &memory)
      : a_(a), segment_(segment), items_(items), num_groups_(a.k / X_GROUP), n_(num_outputs(segment)),
        num_tiles_(items.number), is_aligned_((uintptr_t)a.x % 16 == 0),
        w_(memory.part<Piece>(0, kStages * P::kWPieces)), high_(memory.part<uint64_t>(0, kStages * P::kWPieces * 2)),
        x_(memory.part<uint64_t>(P::kX, kBuffers * S::kRows * 4)),
        scales_(memory.part<GroupScale>(P::kScales, kBuffers * S::kRows)),
        factors_(memory.part<float>(P::kFactors, 2 * kBuffers * S::kColumns)),
        lane_factors_(memory.part<Piece>(P::kFactors, 2 * kBuffers * S::kColumns / 4)),
        sums_(memory.part<float>(P::kSums, kWarps * kWarpSums)), next_x_(a.x), next_base_(segment.base),
        next_num_rows_(items.num_rows) {}

  // Tiles from `first` on.
  PD_DEVICE void run(int first) {
    if (first >= num_tiles_) return;
    next_tile_ = first;
    bring(0);
    keep(0);
    bring(1);
    for (int tile = first; tile < num_tiles_; tile += num_grid_blocks()) run_tile(tile);
    await_copies<0>();
    sync_block();  // what comes next has this memory for itself
  }
  PD_DEVICE void bring(int stage);
  PD_DEVICE void keep(int buffer);
  PD_DEVICE void multiply(Current current, Sums &sums) const;

 private:
  // Of a tile's first group, and of 6 bits anew each time, where it is simple: sums leave no registers to keep it in.
  PD_DEVICE void find_next() {
    if (next_group_ && (kKind != BlockKind::SIX || !Items::kIsKnown)) return;
    const auto found = items_.find(next_tile_);
    const TilePlace place = S::place(found.at, found.num_rows, n_);
    next_x_ = found.a.x, next_num_rows_ = found.num_rows;
    next_base_ = segment_.base + ((const char *)found.a.packed - (const char *)a_.packed);
    next_row_ = place.row, next_panel_ = place.column / kPanel;
  }
  PD_DEVICE int num_panels() const { return n_ / kPanel; }
  PD_DEVICE const char *panel(int index) const { return next_base_ + index * segment_.panel_bytes; }
  // Of eights that were brought last: rows of which a quarter of the threads has one each.
  PD_DEVICE RowPlace place(int task) const {
    const int row = place_.row + task * (kThreads / 4);
    return {next_x_, row, place_.at, row < next_num_rows_, is_aligned_};
  }
  PD_DEVICE void run_tile(int tile);
  PD_DEVICE void multiply_panel(Current current, int index, const uint32_t (&x)[kRowTiles][4],
                                const GroupScale (&scales)[kRowTiles][2], Sums &sums) const;
  static PD_DEVICE int lane() { return thread_index() % kWarp; }

  const pd_gemm_args &a_;
  const Segments::One &segment_;
  const Items &items_;
  const int num_groups_, n_, num_tiles_;
  const bool is_aligned_;
  const SharedArray<Piece> w_;                // [stages][panels][kLongestGroup], as are
  const SharedArray<uint64_t> high_;
  const SharedArray<uint64_t> x_;             // [buffers][rows][4]
  const SharedArray<GroupScale> scales_;      // [buffers][rows]
  const SharedArray<float> factors_;          // [buffers][a, b][outputs], as are
  const SharedArray<Piece> lane_factors_;
  const SharedArray<float> sums_;
  int next_tile_ = 0, next_group_ = 0;        // whose operands come next
  const void *next_x_;                        // of its layer
  const char *next_base_;
  int next_num_rows_;
  int next_row_ = 0, next_panel_ = 0;         // of the segment
  Current current_;
  struct { int row, at; } place_ = {};        // of a thread's first eight
  Piece eights_[kTasks];                       // of rows that are not yet int8
  StoredScales stored_ = {};                  // of an output
};

// Begins the copies of W's next group, and loads that of x and the numbers of blocks.
template <class S, BlockKind kKind, class Items>
PD_DEVICE void BlockTiles<S, kKind, Items>::bring(int stage) {
  if (next_tile_ < num_tiles_) {
    find_next();
    PD_UNROLL for (int i = 0; i < P::kPanels * kPieces; i += kThreads) {
      const int piece = i + thread_index(), of = piece / kPieces, at = piece % kPieces;
      if (of >= P::kPanels) break;
      begin_copy(w_.at(stage * P::kWPieces + of * kLongestGroup + at),
                 group_place(segment_.shape, panel(next_panel_ + of), next_group_).data + at * 16,
                 next_panel_ + of < num_panels());
    }
    place_ = {next_row_ + thread_index() / 4, next_group_ * X_GROUP + thread_index() % 4 * 8};
    PD_UNROLL for (int i = 0; i < kTasks; i++) eights_[i] = load_eight(a_, place(i));
    const int own = next_panel_ + thread_index() / kPanel;
    stored_ = {};
    if (thread_index() < S::kColumns && own < num_panels())
      stored_ = load_scales<kKind>(segment_.shape, group_place(segment_.shape, panel(own), next_group_), lane());
    if (++next_group_ == num_groups_) next_group_ = 0, next_tile_ += num_grid_blocks();
  }
  end_copy_group();
}

// What was loaded last, as int8 and as factors.
template <class S, BlockKind kKind, class Items>
PD_DEVICE void BlockTiles<S, kKind, Items>::keep(int buffer) {
  PD_UNROLL for (int i = 0; i < kTasks; i++) {
    const int row = buffer * S::kRows + thread_index() / 4 + i * (kThreads / 4);
    uint64_t q;
    const GroupScale scale = quantize_eight(a_, place(i), eights_[i], q);
    x_[row * 4 + thread_index() % 4] = q;
    if (thread_index() % 4 == 0) scales_[row] = scale;
  }
  if (thread_index() >= S::kColumns) return;
  const Factors by = unit_factors<kKind>(segment_.shape, stored_);
  const int at = 2 * buffer * S::kColumns + thread_index() / kPanel * kPanel + place_of_output(lane());
  factors_[at] = by.a, factors_[at + S::kColumns] = by.b;
}

template <class S, BlockKind kKind, class Items>
PD_DEVICE void BlockTiles<S, kKind, Items>::multiply(Current current, Sums &sums) const {
  uint32_t x[kRowTiles][4];
  GroupScale scales[kRowTiles][2];
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int row = current.buffer * S::kRows + S::first_row() + tile * kTileRows + 8 * half + lane() / 4;
      const uint64_t q = x_[row * 4 + lane() % 4];
      x[tile][half] = (uint32_t)q, x[tile][2 + half] = (uint32_t)(q >> 32);
      scales[tile][half] = scales_[row];
    }
  PD_UNROLL for (int i = 0; i < kWarpPanels; i++) multiply_panel(current, i, x, scales, sums);
}

// Panel `index` of the warp's.
template <class S, BlockKind kKind, class Items>
PD_DEVICE void BlockTiles<S, kKind, Items>::multiply_panel(Current current, int index,
                                                           const uint32_t (&x)[kRowTiles][4],
                                                           const GroupScale (&scales)[kRowTiles][2],
                                                           Sums &sums) const {
  const int of = S::first_column() / kPanel + index, first = current.stage * P::kWPieces + of * kLongestGroup;
  LaneWeights<kKind> w{};
  PD_UNROLL for (int i = 0; i < w.kPieces; i++) w.pieces[i] = w_[first + i * kWarp + lane()];
  if constexpr (kKind == BlockKind::SIX) w.high = high_[(first + kWarp) * 2 + lane()];
  PD_UNROLL for (int pair = 0; pair < kPanelTiles / 2; pair++) {
    const int at = (2 * current.buffer * S::kColumns + of * kPanel) / 4 + lane() % 4 * 2 + pair;
    const Piece as = lane_factors_[at];
    Piece bs{};
    if (kKind == BlockKind::NIBBLES_MIN || kKind == BlockKind::SIX) bs = lane_factors_[at + S::kColumns / 4];
    PD_UNROLL for (int j = 0; j < 2; j++) {
      const int column = index * kPanelTiles + 2 * pair + j;
      const LaneBytes<kKind> bytes(w, 2 * pair + j);
      PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
        int32_t products[kSumsOf<kKind>][4];
        multiply_eight<kKind>(x[tile], bytes, products);
        PD_UNROLL for (int i = 0; i < 4; i++) {
          const Factors by = {bits_float(as.words[2 * j + i % 2]), bits_float(bs.words[2 * j + i % 2])};
          float own[kSumsOf<kKind>];
          PD_UNROLL for (int half = 0; half < kSumsOf<kKind>; half++)
            own[half] = bits_float((uint32_t)products[half][i]);
          sums[tile][column][i] =
              sums[tile][column][i] + group_product<kKind>(by, shifts(by), own, scales[tile][i / 2]);
        }
      }
    }
  }
}

template <class S, BlockKind kKind, class Items>
PD_DEVICE void BlockTiles<S, kKind, Items>::run_tile(int tile) {
  Sums sums;
  multiply_groups(*this, num_groups_, current_, sums);
  const auto found = items_.find(tile);
  TilePlace place = S::place(found.at, found.num_rows, n_);
  place.column += (int)segment_.begin * kPanel;
  finish_tile<S>(found.a, found.num_rows, place, sums, sums_, (int)segment_.end);
}

// A segment after the other of those of a kind, its tiles where those of the one before end.
template <class S, BlockKind kKind>
PD_DEVICE void run_tiles(const pd_gemm_args &a, const Segments &segments, int num_rows, const SharedMemory &memory) {
  int before = 0;
  for (int i = 0; i < segments.count; i++) {
    const Segments::One &segment = segments.one[i];
    if (segment.shape.kind != kKind) continue;
    const OneLayer items{a, num_rows, TilesOf<S>::of(num_rows, num_outputs(segment))};
    BlockTiles<S, kKind, OneLayer>(a, segment, items, memory).run(first_item(before));
    before += items.number;
  }
}

template <BlockKind kKind>
PD_KERNEL(kThreads) gemm_blocks_many_kernel(pd_gemm_args a, Segments segments) {
  const int num_rows = *a.num_rows;
  if (num_rows <= kFewRows) return;
  LAUNCHED_SHARED(memory);
  int own = 0;  // outputs
  for (int i = 0; i < segments.count; i++)
    if (segments.one[i].shape.kind == kKind) own += num_outputs(segments.one[i]);
  const int wide = TilesOf<Wide>::of(num_rows, own), narrow = TilesOf<Narrow>::of(num_rows, own);
  if (worth_wide(wide, narrow)) run_tiles<Wide, kKind>(a, segments, num_rows, memory);
  else run_tiles<Narrow, kKind>(a, segments, num_rows, memory);
}

template <BlockKind kKind>
PD_KERNEL(kThreads) experts_blocks_many_kernel(pd_experts_args a, Segments segments) {
  if (*a.gemm.num_rows <= kFewRows) return;  // no expert has more
  LAUNCHED_SHARED(memory);
  const ExpertTiles<Wide> wide(a, kFewRows + 1);
  const ExpertTiles<Narrow> narrow(a, kFewRows + 1);
  if (worth_wide(wide.number, narrow.number))
    BlockTiles<Wide, kKind, ExpertTiles<Wide>>(a.gemm, segments.one[0], wide, memory).run(block_index());
  else
    BlockTiles<Narrow, kKind, ExpertTiles<Narrow>>(a.gemm, segments.one[0], narrow, memory).run(block_index());
}

constexpr int kBlocks = 1;  // what the registers have room for

}  // namespace

int enqueue_blocks_many(pd_context &c, const pd_gemm_args &a, const Segments &segments) {
  return for_kinds(segments, [&](auto of) {
    const Grid grid(kThreads, kBlocks, kSharedBytes);
    return launch(c, "pd_gemm", gemm_blocks_many_kernel<decltype(of)::kKind>, grid, a, segments);
  });
}
int enqueue_experts_blocks_many(pd_context &c, const pd_experts_args &a, const Segments &segments) {
  return for_kinds(segments, [&](auto of) {
    const Grid grid(kThreads, kBlocks, kSharedBytes);
    return launch(c, "pd_experts", experts_blocks_many_kernel<decltype(of)::kKind>, grid, a, segments);
  });
}

}  // namespace pagedec::gemm
