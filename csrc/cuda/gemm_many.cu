// Linear layers of many rows: a block of eight warps has a tile of rows x outputs, for which x and W come to shared
// memory while what came before is multiplied.
//
// Tiles    128 x 128, of which a warp has 32 x 64; or 64 x 64 and 16 x 32, where there are few of the others. A thread
//          has each of its outputs twice, the chunk's sum and that of the chunks before, which bounds a warp's tile.
// Shared   A step of 32 of k is x [rows][32], then W [outputs][32], with nothing in between: what a warp loads of eight
//          rows at a time is 512 bytes in a row, 16 a lane, so it meets no bank twice. A stage is two steps.
// Stream   Copies run ahead over the ends of tiles: while a tile's outputs are written, the next one's operands come.
#include "cuda/gemm.h"

namespace pagedec::gemm {
namespace {

constexpr int kRowWarps = 4, kColumnWarps = kWarps / kRowWarps;
constexpr int kPieces = kStep / 8;          // of 16 bytes, of a row in a step
constexpr int kLines = kThreads / kPieces;  // rows that all threads copy at a time
constexpr int kStageSteps = 2;
constexpr int kBand = 8;                    // tiles of rows that go through all outputs before the next ones do
constexpr int kSumStride = kPanel + 8;      // of the sums that a warp writes: rows begin in different banks
constexpr int kWarpSums = kTileRows * kSumStride;
constexpr int64_t kStagesBytes = 96 << 10, kSharedBytes = kStagesBytes + kWarps * kWarpSums * (int64_t)sizeof(float);

PD_DEVICE int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

struct TilePlace {
  int row, column;  // its first
};

template <int kWarpRowTiles, int kWarpColumnTiles>  // of a warp, 16 rows and 8 outputs each
struct Shape {
  static constexpr int kRowTiles = kWarpRowTiles, kColumnTiles = kWarpColumnTiles;
  static constexpr int kRows = kRowWarps * kTileRows * kRowTiles, kColumns = kColumnWarps * 8 * kColumnTiles;
  static constexpr int kStepPieces = (kRows + kColumns) * kPieces, kStagePieces = kStageSteps * kStepPieces;
  static constexpr int kStages = kStagesBytes / (kStagePieces * (int)sizeof(Eight));
  static_assert(kStages >= 2 && kRows % kLines == 0 && kColumns % kLines == 0 && 8 * kColumnTiles % kPanel == 0);

  static PD_DEVICE int row_tiles(int num_rows) { return (num_rows + kRows - 1) / kRows; }
  static PD_DEVICE int column_tiles(int n) { return (n + kColumns - 1) / kColumns; }
  static PD_DEVICE TilePlace place(int tile, int num_rows, int n) {
    const int columns = column_tiles(n), band = tile / (kBand * columns), in_band = tile % (kBand * columns);
    const int height = lower(kBand, row_tiles(num_rows) - band * kBand);
    return {(band * kBand + in_band % height) * kRows, in_band / height * kColumns};
  }
};
using Wide = Shape<2, 8>;
using Narrow = Shape<1, 4>;

// A wide tile has four times the products of a narrow one and takes about twice as long: it reads half as many bytes a
// product from the second cache and from shared memory, which are what bounds both.
PD_DEVICE bool worth_wide(int num_rows, int n, int blocks) {
  const int wide = Wide::row_tiles(num_rows) * Wide::column_tiles(n);
  const int narrow = Narrow::row_tiles(num_rows) * Narrow::column_tiles(n);
  return 2 * ((wide + blocks - 1) / blocks) <= (narrow + blocks - 1) / blocks;
}

// What becomes of a warp's 16 rows of a panel: `sums` [16][kSumStride], from `first` on. A lane has a column of y, and
// where it is gated, as y has half as many, of every other row.
PD_DEVICE void finish_panel(const pd_gemm_args &a, int num_rows, int row, int panel, const SharedArray<float> &sums,
                            int first) {
  const bool gated = is_gated(a.epilogue);
  const int lane = thread_index() % kWarp, outputs = gated ? kPanel / 2 : kPanel, width = gated ? a.n / 2 : a.n;
  const int place = lane % outputs, column = panel * outputs + place, above = gated ? lane / outputs : 0;
  if (column >= width) return;
  const float *bias = a.bias ? a.bias + panel * kPanel + place : nullptr;
  const float of_x = bias ? bias[0] : 0.0f, of_up = bias && gated ? bias[kPanel / 2] : 0.0f;
  const int64_t start = (int64_t)row * width + column;
  float before[kTileRows];  // what is added to: all under way before the first is needed
  PD_UNROLL for (int i = 0; i < kTileRows; i++)
    before[i] = a.epilogue == PD_ADD && row + i < num_rows ? ((const float *)a.y)[start + (int64_t)i * width] : 0.0f;
  PD_UNROLL for (int i = 0; i < kTileRows; i++) {
    const int r = gated ? 2 * i + above : i;
    if (r >= kTileRows || row + r >= num_rows) break;
    float x = sums[first + r * kSumStride + place], up = 0.0f;
    if (gated) up = sums[first + r * kSumStride + place + kPanel / 2];
    if (bias) x = x + of_x, up = up + of_up;
    x = activated(a.epilogue, x, up);
    if (a.epilogue == PD_ADD) x = before[i] + x;
    const int64_t at = start + (int64_t)r * width;
    if (a.y_dtype == PD_BF16) ((bf16 *)a.y)[at] = from_float<bf16>(x);
    else ((float *)a.y)[at] = x;
  }
}

template <class S, bool kAligned>
class Tiles {
  static constexpr int kRowTiles = S::kRowTiles, kColumnTiles = S::kColumnTiles;
  using Sums = float[kRowTiles][kColumnTiles][4];

 public:
  PD_DEVICE Tiles(const pd_gemm_args &a, int num_rows, const SharedMemory &memory)
      : a_(a), num_rows_(num_rows), num_steps_((a.k + kStep - 1) / kStep),
        num_tiles_(S::row_tiles(num_rows) * S::column_tiles(a.n)),
        pieces_(memory.part<Eight>(0, S::kStages * S::kStagePieces)),
        sums_(memory.part<float>(kStagesBytes, kWarps * kWarpSums)), next_tile_(block_index()) {}

  PD_DEVICE void run() {
    if (next_tile_ < num_tiles_) find_next();
    for (int i = 0; i < S::kStages - 1; i++) bring(i * S::kStagePieces);
    for (int tile = block_index(); tile < num_tiles_; tile += num_grid_blocks()) run_tile(tile);
  }

 private:
  PD_DEVICE void find_next() {
    const TilePlace place = S::place(next_tile_, num_rows_, a_.n);
    next_row_ = place.row + thread_index() / kPieces, next_column_ = place.column + thread_index() / kPieces;
    next_step_ = 0;
  }
  PD_DEVICE void bring(int stage);
  PD_DEVICE void run_tile(int tile);
  PD_DEVICE void multiply(int step, Sums &sums) const;
  PD_DEVICE void finish(TilePlace place, Sums &sums) const;
  static PD_DEVICE int lane() { return thread_index() % kWarp; }
  static PD_DEVICE int first_row() { return thread_index() / kWarp / kColumnWarps * kRowTiles * kTileRows; }
  static PD_DEVICE int first_column() { return thread_index() / kWarp % kColumnWarps * kColumnTiles * 8; }

  const pd_gemm_args &a_;
  const int num_rows_, num_steps_, num_tiles_;
  const SharedArray<Eight> pieces_;  // [stages][x rows, outputs][kPieces]
  const SharedArray<float> sums_;    // [warps][kTileRows][kSumStride]
  int next_tile_, next_step_ = 0;    // whose operands come next
  int next_row_ = 0, next_column_ = 0;              // of those, this thread's first
  int stage_ = (S::kStages - 1) * S::kStagePieces;  // that is multiplied: its first piece
};

// Begins the copies of the stage that follows the last one's.
template <class S, bool kAligned>
PD_DEVICE void Tiles<S, kAligned>::bring(int stage) {
  if (next_tile_ < num_tiles_) {
    const int at = next_step_ * kStep + thread_index() % kPieces * 8, padded_k = num_steps_ * kStep;
    PD_UNROLL for (int i = 0; i < S::kRows / kLines; i++) {
      const int row = next_row_ + i * kLines;
      const bf16 *from = (const bf16 *)a_.x + (int64_t)row * a_.k + at;
      PD_UNROLL for (int step = 0; step < kStageSteps; step++) {
        const int to = stage + step * S::kStepPieces + thread_index() + i * kThreads;
        const int left = row < num_rows_ ? a_.k - at - step * kStep : 0;
        if (kAligned) begin_copy(pieces_.at(to), from + step * kStep, left > 0);
        else pieces_[to] = load_some(from + step * kStep, left, false);
      }
    }
    PD_UNROLL for (int i = 0; i < S::kColumns / kLines; i++) {
      const int row = next_column_ + i * kLines;
      const bf16 *from = (const bf16 *)a_.packed + (int64_t)row * padded_k + at;
      PD_UNROLL for (int step = 0; step < kStageSteps; step++)
        begin_copy(pieces_.at(stage + step * S::kStepPieces + S::kRows * kPieces + thread_index() + i * kThreads),
                   from + step * kStep, row < padded(a_.n) && at + step * kStep < padded_k);
    }
    next_step_ += kStageSteps;
    if (next_step_ >= num_steps_) {
      next_tile_ += num_grid_blocks();
      if (next_tile_ < num_tiles_) find_next();
    }
  }
  end_copy_group();
}

template <class S, bool kAligned>
PD_DEVICE void Tiles<S, kAligned>::multiply(int step, Sums &sums) const {
  // An instruction takes x in four registers in a row, which two loads bring alternately. Without an operation that is
  // not a plain copy to the compiler, it copies them for every instruction anew: so they are ored with 0.
  static_assert(PD_PLAIN == 0);
  const uint32_t zero = (uint32_t)a_.quantization;
  const int of_x = step + first_row() * kPieces + lane();
  const int of_w = step + (S::kRows + first_column()) * kPieces + lane();
  uint32_t x[kRowTiles][2][4];
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
    const Eight low = pieces_[of_x + 2 * tile * kWarp], high = pieces_[of_x + (2 * tile + 1) * kWarp];
    PD_UNROLL for (int i = 0; i < 4; i++) {
      x[tile][i / 2][i % 2 * 2] = low.pairs[i] | zero;
      x[tile][i / 2][i % 2 * 2 + 1] = high.pairs[i] | zero;
    }
  }
  PD_UNROLL for (int j = 0; j < kColumnTiles; j++) {
    const Eight w = pieces_[of_w + j * kWarp];
    PD_UNROLL for (int i = 0; i < 2; i++)
      PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
        multiply_add(sums[tile][j], x[tile][i], w.pairs[2 * i], w.pairs[2 * i + 1]);
  }
}

template <class S, bool kAligned>
PD_DEVICE void Tiles<S, kAligned>::run_tile(int tile) {
  constexpr int kOwn = kRowTiles * kColumnTiles * 4, kEnd = S::kStages * S::kStagePieces;
  Sums own, sums;
  const auto of = [](Sums &all, int i) -> float & { return all[i / 4 / kColumnTiles][i / 4 % kColumnTiles][i % 4]; };
  PD_UNROLL for (int i = 0; i < kOwn; i++) of(own, i) = 0.0f;
  for (int step = 0; step < num_steps_;) {
    PD_UNROLL for (int i = 0; i < kOwn; i++) of(sums, i) = 0.0f;
    PD_ROLLED do {
      if (step % kStageSteps == 0) {
        await_copies<S::kStages - 2>();
        sync_block();  // what has come is seen, and nobody looks any more at the stage before
        bring(stage_);
        stage_ = stage_ + S::kStagePieces == kEnd ? 0 : stage_ + S::kStagePieces;
      }
      multiply(stage_ + step % kStageSteps * S::kStepPieces, sums);
    } while (++step % (kChunk / kStep) && step < num_steps_);
    PD_UNROLL for (int i = 0; i < kOwn; i++) of(own, i) = of(own, i) + of(sums, i);
  }
  finish(S::place(tile, num_rows_, a_.n), own);
}

// Panel by panel through the warp's own part of shared memory. Registers have no index, so what is left moves up to
// where the first one was: one body, which fits the instructions' cache, for all.
template <class S, bool kAligned>
PD_DEVICE void Tiles<S, kAligned>::finish(TilePlace place, Sums &sums) const {
  constexpr int kPanelTiles = kPanel / 8, kPanels = kColumnTiles / kPanelTiles;
  const int first = thread_index() / kWarp * kWarpSums, g = lane() / 4, t = lane() % 4;
  PD_ROLLED for (int i = 0; i < kRowTiles * kPanels; i++) {
    PD_UNROLL for (int j = 0; j < kPanelTiles; j++)
      PD_UNROLL for (int of = 0; of < 4; of++)
        sums_[first + (of / 2 * 8 + g) * kSumStride + 8 * j + 2 * t + of % 2] = sums[0][j][of];
    sync_warp();
    finish_panel(a_, num_rows_, place.row + first_row() + i / kPanels * kTileRows,
                 (place.column + first_column()) / kPanel + i % kPanels, sums_, first);
    sync_warp();  // nobody looks at this panel any more
    PD_UNROLL for (int n = kPanelTiles; n < kRowTiles * kColumnTiles; n++)
      PD_UNROLL for (int of = 0; of < 4; of++) {
        const int to = n - kPanelTiles;
        sums[to / kColumnTiles][to % kColumnTiles][of] = sums[n / kColumnTiles][n % kColumnTiles][of];
      }
  }
}

PD_KERNEL(kThreads) gemm_many_kernel(pd_gemm_args a) {
  const int num_rows = *a.num_rows;
  if (num_rows <= kFewRows) return;
  LAUNCHED_SHARED(memory);
  if (!is_aligned(a.x, a.k)) Tiles<Narrow, false>(a, num_rows, memory).run();
  else if (worth_wide(num_rows, a.n, num_grid_blocks())) Tiles<Wide, true>(a, num_rows, memory).run();
  else Tiles<Narrow, true>(a, num_rows, memory).run();
}

}  // namespace

bool has_room_for_many(const pd_context &c) { return kSharedBytes <= c.max_shared_bytes; }
int enqueue_many(pd_context &c, const pd_gemm_args &a) {
  constexpr int kBlocks = 1;  // what the registers have room for
  return launch(c, "pd_gemm", gemm_many_kernel, Grid(kThreads, kBlocks, kSharedBytes), a);
}

}  // namespace pagedec::gemm
