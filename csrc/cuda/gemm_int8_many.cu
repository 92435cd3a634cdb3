// Linear layers with int8 weights, of many rows: a block of eight warps has a tile of rows x outputs, as
// gemm_many.cu's are. W comes to shared memory beside the multiplication; x comes to registers, becomes int8 a group
// before it is multiplied, and lies in shared memory as the instructions take it.
//
// Shared   x [2][rows / 16][2 instructions][32 lanes], 16 bytes each, and its groups' scales [2][rows]; W of a group
//          [3][outputs][64]. What a warp loads at a time is 512 bytes in a row, so it meets no bank twice.
// Stream   Operands run two groups ahead, over the ends of tiles.
#include "cuda/gemm_int8.h"
#include "cuda/gemm_tiles.h"

namespace pagedec::gemm {
namespace {

constexpr int kPieces = kGroup / 16;        // of an output's group
constexpr int kLines = kThreads / kPieces;  // outputs whose group all threads copy at a time

template <class S>
struct Parts {  // of shared memory
  static constexpr int kWPieces = S::kColumns * kPieces, kXPieces = S::kRows * kPieces;
  static constexpr int64_t kX = kStages * kWPieces * (int64_t)sizeof(Piece);
  static constexpr int64_t kScales = kX + kBuffers * kXPieces * (int64_t)sizeof(Piece);
  static constexpr int64_t kSums = kScales + kBuffers * S::kRows * (int64_t)sizeof(float);
  static constexpr int64_t kBytes = kSums + kWarps * kWarpSums * (int64_t)sizeof(float);
  static_assert(S::kColumns % kLines == 0);
};
constexpr int64_t kSharedBytes = Parts<Wide>::kBytes;  // 61 KB: less than a block has at most on all devices
static_assert(Parts<Narrow>::kBytes <= kSharedBytes);

template <class S, class E, class Items>
class Int8Tiles {
  static constexpr int kRowTiles = S::kRowTiles, kColumnTiles = S::kColumnTiles;
  using P = Parts<S>;
  using Sums = float[kRowTiles][kColumnTiles][4];

 public:
  PD_DEVICE Int8Tiles(const pd_gemm_args &a, const Items &items, const SharedMemory &memory)
      : a_(a), items_(items), num_groups_((a.k + kGroup - 1) / kGroup), num_tiles_(items.number),
        is_aligned_(begins_aligned((const E *)a.x, a.k)),
        w_(memory.part<Piece>(0, kStages * P::kWPieces)), x_(memory.part<Piece>(P::kX, kBuffers * P::kXPieces)),
        scales_(memory.part<float>(P::kScales, kBuffers * S::kRows)),
        sums_(memory.part<float>(P::kSums, kWarps * kWarpSums)), next_tile_(block_index()),
        next_x_((const E *)a.x), next_w_((const char *)a.packed), next_num_rows_(items.num_rows) {}

  PD_DEVICE void run() {
    if (next_tile_ < num_tiles_) find_next();
    bring(0);
    keep(0);
    bring(1);
    for (int tile = block_index(); tile < num_tiles_; tile += num_grid_blocks()) run_tile(tile);
  }
  PD_DEVICE void bring(int stage);
  PD_DEVICE void keep(int buffer);
  PD_DEVICE void multiply(Current current, Sums &sums) const;

 private:
  PD_DEVICE void find_next() {
    const auto found = items_.find(next_tile_);
    const TilePlace place = S::place(found.at, found.num_rows, a_.n);
    next_x_ = (const E *)found.a.x, next_w_ = (const char *)found.a.packed, next_num_rows_ = found.num_rows;
    next_row_ = place.row + warp() * kTileRows + lane() / 4, next_column_ = place.column + thread_index() / kPieces;
    next_group_ = 0;
  }
  PD_DEVICE void run_tile(int tile);
  static PD_DEVICE int lane() { return thread_index() % kWarp; }
  static PD_DEVICE int warp() { return thread_index() / kWarp; }
  static PD_DEVICE bool has_rows() { return warp() < S::kRows / kTileRows; }  // that it makes int8: 16 of the tile

  const pd_gemm_args &a_;
  const Items &items_;
  const int num_groups_, num_tiles_;
  const bool is_aligned_;
  const SharedArray<Piece> w_, x_;
  const SharedArray<float> scales_, sums_;
  int next_tile_, next_group_ = 0;         // whose operands come next
  const E *next_x_;                        // of its layer
  const char *next_w_;
  int next_num_rows_;
  int next_row_ = 0, next_column_ = 0;     // of those, this thread's first
  Current current_;
  Values<E> values_[2] = {};               // of rows that are not yet int8
};

// Begins the copies of W's next group, and loads that of x.
template <class S, class E, class Items>
PD_DEVICE void Int8Tiles<S, E, Items>::bring(int stage) {
  if (next_tile_ < num_tiles_) {
    const int64_t padded_n = pad_outputs(a_.n), padded_k = pad_groups(a_.k);
    PD_UNROLL for (int i = 0; i < S::kColumns / kLines; i++) {
      const int column = next_column_ + i * kLines;
      begin_copy(w_.at(stage * P::kWPieces + thread_index() + i * kThreads),
                 next_w_ + column * padded_k + next_group_ * kGroup + thread_index() % kPieces * 16,
                 column < padded_n);
    }
    const int64_t at = next_group_ * kGroup + lane() % 4 * kOwnValues;
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int64_t row = next_row_ + 8 * half, left = row < next_num_rows_ ? a_.k - at : 0;
      if (has_rows()) values_[half].load(next_x_ + row * a_.k + at, left, is_aligned_);
    }
    if (++next_group_ == num_groups_) {
      next_tile_ += num_grid_blocks();
      if (next_tile_ < num_tiles_) find_next();
    }
  }
  end_copy_group();
}

// What was loaded last, as int8.
template <class S, class E, class Items>
PD_DEVICE void Int8Tiles<S, E, Items>::keep(int buffer) {
  if (!has_rows()) return;
  const Rows rows = quantize_rows(values_, true);
  PD_UNROLL for (int i = 0; i < 2; i++)
    x_[buffer * P::kXPieces + (warp() * 2 + i) * kWarp + lane()] = {
        {rows.q[i][0], rows.q[i][1], rows.q[i][2], rows.q[i][3]}};
  if (lane() % 4) return;
  PD_UNROLL for (int half = 0; half < 2; half++)
    scales_[buffer * S::kRows + warp() * kTileRows + 8 * half + lane() / 4] = rows.scales[half];
}

template <class S, class E, class Items>
PD_DEVICE void Int8Tiles<S, E, Items>::multiply(Current current, Sums &sums) const {
  uint32_t x[kRowTiles][2][4];
  float scales[kRowTiles][2];
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
    const int first = S::first_row() / kTileRows + tile;
    PD_UNROLL for (int i = 0; i < 2; i++) {
      const Piece piece = x_[current.buffer * P::kXPieces + (first * 2 + i) * kWarp + lane()];
      PD_UNROLL for (int word = 0; word < 4; word++) x[tile][i][word] = piece.words[word];
      scales[tile][i] = scales_[current.buffer * S::kRows + first * kTileRows + 8 * i + lane() / 4];
    }
  }
  PD_UNROLL for (int j = 0; j < kColumnTiles; j++) {
    const Piece w = w_[current.stage * P::kWPieces + (S::first_column() + 8 * j) * kPieces + lane()];
    PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
      float products[4];
      multiply_group(x[tile], scales[tile], w, products);
      PD_UNROLL for (int i = 0; i < 4; i++) sums[tile][j][i] = sums[tile][j][i] + products[i];
    }
  }
}

template <class S, class E, class Items>
PD_DEVICE void Int8Tiles<S, E, Items>::run_tile(int tile) {
  Sums sums;
  multiply_groups(*this, num_groups_, current_, sums);
  const auto found = items_.find(tile);
  const TilePlace place = S::place(found.at, found.num_rows, a_.n);
  scale_outputs<S>(scales_of(found.a), a_.n, place, sums);
  finish_tile<S>(found.a, found.num_rows, place, sums, sums_);
}

template <class S, class E>
PD_DEVICE void run_tiles(const pd_gemm_args &a, int num_rows, const SharedMemory &memory) {
  const OneLayer items{a, num_rows, TilesOf<S>::of(num_rows, a.n)};
  Int8Tiles<S, E, OneLayer>(a, items, memory).run();
}

template <class E>
PD_KERNEL(kThreads) gemm_int8_many_kernel(pd_gemm_args a) {
  const int num_rows = *a.num_rows;
  if (num_rows <= kFewRows) return;
  LAUNCHED_SHARED(memory);
  const int wide = TilesOf<Wide>::of(num_rows, a.n), narrow = TilesOf<Narrow>::of(num_rows, a.n);
  if (worth_wide(wide, narrow)) run_tiles<Wide, E>(a, num_rows, memory);
  else run_tiles<Narrow, E>(a, num_rows, memory);
}

template <class E>
PD_KERNEL(kThreads) experts_int8_many_kernel(pd_experts_args a) {
  if (*a.gemm.num_rows <= kFewOfExpert) return;  // no expert has more
  LAUNCHED_SHARED(memory);
  const ExpertTiles<Wide> wide(a, kFewOfExpert + 1);
  const ExpertTiles<Narrow> narrow(a, kFewOfExpert + 1);
  if (worth_wide(wide.number, narrow.number)) Int8Tiles<Wide, E, ExpertTiles<Wide>>(a.gemm, wide, memory).run();
  else Int8Tiles<Narrow, E, ExpertTiles<Narrow>>(a.gemm, narrow, memory).run();
}

constexpr int kBlocks = 1;  // what the registers have room for

}  // namespace

int enqueue_int8_many(pd_context &c, const pd_gemm_args &a) {
  const auto kernel = of_dtype(a.dtype, [](auto e) { return gemm_int8_many_kernel<decltype(e)>; });
  return launch(c, "pd_gemm", kernel, Grid(kThreads, kBlocks, kSharedBytes), a);
}
int enqueue_experts_int8_many(pd_context &c, const pd_experts_args &a) {
  const auto kernel = of_dtype(a.gemm.dtype, [](auto e) { return experts_int8_many_kernel<decltype(e)>; });
  return launch(c, "pd_experts", kernel, Grid(kThreads, kBlocks, kSharedBytes), a);
}

}  // namespace pagedec::gemm
