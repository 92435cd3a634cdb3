// Linear layers of many rows: a block of eight warps has a tile of rows x outputs, for which x and W come to shared
// memory while what came before is multiplied.
//
// Tiles    128 x 128, of which a warp has 32 x 64; or 64 x 64 and 16 x 32, or 64 x 32 and 16 x 16, where there are few
//          of the others. A thread has each of its outputs twice, the chunk's sum and that of the chunks before, which
//          bounds a warp's tile.
// Shared   A step of 32 of k is x [four pieces of 8 of k][rows][8], then W as it lies, panel by panel: what a warp
//          loads of eight rows of a piece is 128 bytes in a row, so it meets no bank twice. A stage is two steps.
// Stream   Copies run ahead over the ends of tiles: while a tile's outputs are written, the next one's operands come.
#include "cuda/gemm_tiles.h"
#include "cuda/gemm_weight_only.h"

namespace pagedec::gemm {
namespace {

constexpr int kPieces = kStep / 8;          // of 16 bytes, of a row in a step
constexpr int kLines = kThreads / kPieces;  // rows that all threads copy at a time
constexpr int kStageSteps = 2;
// Of all stages. On some devices (SM86, SM89, SM120) a block has 99 KB at most.
constexpr int kMostBytes = 96 << 10, kLeastBytes = 64 << 10;
constexpr int64_t shared_bytes(int stages) { return stages + kWarps * kWarpSums * (int64_t)sizeof(float); }

template <class S, bool kBytes>
struct Stages {  // of shared memory, of tiles of a shape
  static constexpr int kWPieces = kBytes ? kPieces / 2 : kPieces;  // of an output in a step
  static constexpr int kStepPieces = S::kRows * kPieces + S::kColumns * kWPieces;
  static constexpr int kStagePieces = kStageSteps * kStepPieces;
  static constexpr int number(int bytes) { return bytes / (kStagePieces * (int)sizeof(Eight)); }
  static constexpr int kMost = number(kMostBytes), kLeast = number(kLeastBytes);
  static_assert(kLeast >= 2 && S::kRows % kLines == 0);
};

template <class E, class S, bool kAligned, bool kBytes, class Items>
class Tiles {
  static constexpr int kRowTiles = S::kRowTiles, kColumnTiles = S::kColumnTiles;
  using P = Stages<S, kBytes>;
  using Sums = float[kRowTiles][kColumnTiles][4];

 public:
  PD_DEVICE Tiles(const pd_gemm_args &a, const Items &items, int bytes, const SharedMemory &memory)
      : a_(a), items_(items), num_steps_((a.k + kStep - 1) / kStep), num_tiles_(items.number),
        last_stage_((bytes == kMostBytes ? P::kMost - 1 : P::kLeast - 1) * P::kStagePieces),
        pieces_(memory.part<Eight>(0, last_stage_ + P::kStagePieces)),
        sums_(memory.part<float>(bytes, kWarps * kWarpSums)), next_tile_(block_index()), next_x_((const E *)a.x),
        next_w_((const char *)a.packed), next_num_rows_(items.num_rows), stage_(last_stage_) {}

  PD_DEVICE void run() {
    if (next_tile_ < num_tiles_) find_next();
    for (int stage = 0; stage < last_stage_; stage += P::kStagePieces) bring(stage);
    for (int tile = block_index(); tile < num_tiles_; tile += num_grid_blocks()) run_tile(tile);
  }

 private:
  PD_DEVICE void find_next() {
    const auto found = items_.find(next_tile_);
    const TilePlace place = S::place(found.at, found.num_rows, a_.n);
    next_x_ = (const E *)found.a.x, next_w_ = (const char *)found.a.packed, next_num_rows_ = found.num_rows;
    next_row_ = place.row + thread_index() / kWarp * 8 + thread_index() % 8;
    next_column_ = place.column;
    next_step_ = 0;
  }
  PD_DEVICE bool has_most() const { return last_stage_ == (P::kMost - 1) * P::kStagePieces; }
  PD_DEVICE void bring(int stage);
  PD_DEVICE void bring_weights(int stage);
  // Of outputs 8 j + g of the warp's, as instructions take them: two numbers each.
  PD_DEVICE void load_weights(int step, int j, uint32_t (&w)[4]) const {
    const int of_w = step + S::kRows * kPieces;
    if constexpr (kBytes) {
      const Eight two = pieces_[of_w + (S::first_column() / 16 + j / 2) * kWarp + lane()];
      const Eight one = widen_eight<E>(two.pairs[j % 2 * 2], two.pairs[j % 2 * 2 + 1]);
      PD_UNROLL for (int i = 0; i < 4; i++) w[i] = one.pairs[i];
    } else {
      const int output = S::first_column() + 8 * j;
      load_matrices(w, pieces_.at(of_w + output * kPieces + lane()));
    }
  }
  PD_DEVICE void run_tile(int tile);
  PD_DEVICE void multiply(int step, Sums &sums) const;
  static PD_DEVICE int lane() { return thread_index() % kWarp; }

  const pd_gemm_args &a_;
  const Items &items_;
  const int num_steps_, num_tiles_, last_stage_;
  const SharedArray<Eight> pieces_;  // [stages][x rows, outputs][kPieces]
  const SharedArray<float> sums_;    // [warps][kTileRows][kSumStride]
  int next_tile_, next_step_ = 0;    // whose operands come next
  const E *next_x_;                  // of its layer
  const char *next_w_;
  int next_num_rows_;
  int next_row_ = 0, next_column_ = 0;  // of those, the first: of rows this thread's, of outputs the tile's
  int stage_;                           // that is multiplied: its first piece
};

// Begins the copies of the stage that follows the last one's.
template <class E, class S, bool kAligned, bool kBytes, class Items>
PD_DEVICE void Tiles<E, S, kAligned, kBytes, Items>::bring(int stage) {
  if (next_tile_ < num_tiles_) {
    const int piece = lane() / 8, at = next_step_ * kStep + piece * 8;
    PD_UNROLL for (int i = 0; i < S::kRows / kLines; i++) {
      const int row = next_row_ + i * kLines;
      const E *from = next_x_ + (int64_t)row * a_.k + at;
      PD_UNROLL for (int step = 0; step < kStageSteps; step++) {
        const int of_tile = thread_index() / kWarp * 8 + thread_index() % 8 + i * kLines;
        const int to = stage + step * P::kStepPieces + piece * S::kRows + of_tile;
        const int left = row < next_num_rows_ ? a_.k - at - step * kStep : 0;
        if (kAligned) begin_copy(pieces_.at(to), from + step * kStep, left > 0);
        else pieces_[to] = load_some(from + step * kStep, left, false);
      }
    }
    bring_weights(stage);
    next_step_ += kStageSteps;
    if (next_step_ >= num_steps_) {
      next_tile_ += num_grid_blocks();
      if (next_tile_ < num_tiles_) find_next();
    }
  }
  end_copy_group();
}

// Of a panel a step is one run of memory.
template <class E, class S, bool kAligned, bool kBytes, class Items>
PD_DEVICE void Tiles<E, S, kAligned, kBytes, Items>::bring_weights(int stage) {
  constexpr int kOfPanel = kPanel * P::kWPieces, kOfStep = S::kColumns * P::kWPieces, kOfStage = kStageSteps * kOfStep;
  PD_UNROLL for (int i = 0; i < (kOfStage + kThreads - 1) / kThreads; i++) {
    const int piece = i * kThreads + thread_index(), step = piece / kOfStep, in_step = piece % kOfStep;
    if (kOfStage < kThreads && piece >= kOfStage) break;
    const int column = next_column_ + in_step / kOfPanel * kPanel, at = next_step_ + step;
    const int64_t of_w = ((int64_t)column / kPanel * num_steps_ + at) * kOfPanel + in_step % kOfPanel;
    begin_copy(pieces_.at(stage + step * P::kStepPieces + S::kRows * kPieces + in_step),
               next_w_ + of_w * (int64_t)sizeof(Eight), column < padded(a_.n) && at < num_steps_);
  }
}

template <class E, class S, bool kAligned, bool kBytes, class Items>
PD_DEVICE void Tiles<E, S, kAligned, kBytes, Items>::multiply(int step, Sums &sums) const {
  uint32_t x[kRowTiles][2][4];
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
    PD_UNROLL for (int i = 0; i < 2; i++) {
      const int row = S::first_row() + tile * kTileRows + lane() % 16;
      load_matrices(x[tile][i], pieces_.at(step + (2 * i + lane() / 16) * S::kRows + row));
    }
  uint32_t w[2][4];  // loads and products stay in the order in which they stand: the next ones' are under way
  load_weights(step, 0, w[0]);
  PD_UNROLL for (int j = 0; j < kColumnTiles; j++) {
    if (j + 1 < kColumnTiles) load_weights(step, j + 1, w[(j + 1) % 2]);
    PD_UNROLL for (int i = 0; i < 2; i++)
      PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
        multiply_add<E>(sums[tile][j], x[tile][i], w[j % 2][2 * i], w[j % 2][2 * i + 1]);
  }
}

template <class E, class S, bool kAligned, bool kBytes, class Items>
PD_DEVICE void Tiles<E, S, kAligned, kBytes, Items>::run_tile(int tile) {
  constexpr int kOwn = kRowTiles * kColumnTiles * 4;
  Sums own, sums;
  const auto of = [](Sums &all, int i) -> float & { return all[i / 4 / kColumnTiles][i / 4 % kColumnTiles][i % 4]; };
  clear(own);
  for (int step = 0; step < num_steps_;) {
    clear(sums);
    PD_ROLLED do {
      if (step % kStageSteps == 0) {
        if (has_most()) await_copies<P::kMost - 2>();
        else await_copies<P::kLeast - 2>();
        sync_block();  // what has come is seen, and nobody looks any more at the stage before
        bring(stage_);
        stage_ = stage_ == last_stage_ ? 0 : stage_ + P::kStagePieces;
      }
      multiply(stage_ + step % kStageSteps * P::kStepPieces, sums);
    } while (++step % (kChunk / kStep) && step < num_steps_);
    PD_UNROLL for (int i = 0; i < kOwn; i++) of(own, i) = of(own, i) + of(sums, i);
  }
  const auto found = items_.find(tile);
  const TilePlace place = S::place(found.at, found.num_rows, a_.n);
  if constexpr (kBytes) scale_outputs<S>(weight_scales(found.a), a_.n, place, own);
  finish_tile<S>(found.a, found.num_rows, place, own, sums_);
}

template <class E, class S, bool kAligned, bool kBytes>
PD_DEVICE void run_tiles(const pd_gemm_args &a, int num_rows, int bytes, const SharedMemory &memory) {
  const OneLayer items{a, num_rows, TilesOf<S>::of(num_rows, a.n)};
  Tiles<E, S, kAligned, kBytes, OneLayer>(a, items, bytes, memory).run();
}

template <class E, bool kBytes>
PD_KERNEL(kThreads) gemm_many_kernel(pd_gemm_args a, int bytes) {
  const int num_rows = *a.num_rows;
  if (num_rows <= kFewRows) return;
  LAUNCHED_SHARED(memory);
  const int wide = TilesOf<Wide>::of(num_rows, a.n), narrow = TilesOf<Narrow>::of(num_rows, a.n);
  const int slim = TilesOf<Slim>::of(num_rows, a.n);
  if (!is_aligned(a.x, a.k)) run_tiles<E, Narrow, false, kBytes>(a, num_rows, bytes, memory);
  else if (worth_wide(wide, narrow)) run_tiles<E, Wide, true, kBytes>(a, num_rows, bytes, memory);
  else if (worth_slim(slim, narrow)) run_tiles<E, Slim, true, kBytes>(a, num_rows, bytes, memory);
  else run_tiles<E, Narrow, true, kBytes>(a, num_rows, bytes, memory);
}

// Tiles of all experts that have many rows are of one shape.
template <class E, bool kBytes>
PD_KERNEL(kThreads) experts_many_kernel(pd_experts_args a, int bytes) {
  if (*a.gemm.num_rows <= kFewOfExpert) return;  // no expert has more
  LAUNCHED_SHARED(memory);
  const ExpertTiles<Narrow> narrow(a, kFewOfExpert + 1);
  if (!is_aligned(a.gemm.x, a.gemm.k)) {
    Tiles<E, Narrow, false, kBytes, ExpertTiles<Narrow>>(a.gemm, narrow, bytes, memory).run();
  } else if (const ExpertTiles<Wide> wide(a, kFewOfExpert + 1); worth_wide(wide.number, narrow.number)) {
    Tiles<E, Wide, true, kBytes, ExpertTiles<Wide>>(a.gemm, wide, bytes, memory).run();
  } else if (const ExpertTiles<Slim> slim(a, kFewOfExpert + 1); worth_slim(slim.number, narrow.number)) {
    Tiles<E, Slim, true, kBytes, ExpertTiles<Slim>>(a.gemm, slim, bytes, memory).run();
  } else {
    Tiles<E, Narrow, true, kBytes, ExpertTiles<Narrow>>(a.gemm, narrow, bytes, memory).run();
  }
}

constexpr int kBlocks = 1;  // what the registers have room for

}  // namespace

int enqueue_many(pd_context &c, const pd_gemm_args &a) {
  const bool is_bytes = a.quantization == PD_INT8_WEIGHT_ONLY;
  const auto of_bf16 = is_bytes ? gemm_many_kernel<bf16, true> : gemm_many_kernel<bf16, false>;
  const auto of_fp16 = is_bytes ? gemm_many_kernel<fp16, true> : gemm_many_kernel<fp16, false>;
  const auto kernel = a.dtype == PD_F16 ? of_fp16 : of_bf16;
  const int bytes = shared_bytes(kMostBytes) <= target(c).max_shared_bytes ? kMostBytes : kLeastBytes;
  return launch(c, "pd_gemm", kernel, Grid(kThreads, kBlocks, shared_bytes(bytes)), a, bytes);
}

int enqueue_experts_many(pd_context &c, const pd_experts_args &a) {
  const bool is_bytes = a.gemm.quantization == PD_INT8_WEIGHT_ONLY;
  const auto of_bf16 = is_bytes ? experts_many_kernel<bf16, true> : experts_many_kernel<bf16, false>;
  const auto of_fp16 = is_bytes ? experts_many_kernel<fp16, true> : experts_many_kernel<fp16, false>;
  const auto kernel = a.gemm.dtype == PD_F16 ? of_fp16 : of_bf16;
  const int bytes = shared_bytes(kMostBytes) <= target(c).max_shared_bytes ? kMostBytes : kLeastBytes;
  return launch(c, "pd_experts", kernel, Grid(kThreads, kBlocks, shared_bytes(bytes)), a, bytes);
}

}  // namespace pagedec::gemm
