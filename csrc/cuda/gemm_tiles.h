// Tiles of rows x outputs that a block of eight warps has, 4 x 2 of them: which there are, and how sums leave them.
#pragma once
#include "cuda/gemm_experts.h"

namespace pagedec::gemm {

constexpr int kRowWarps = 4, kColumnWarps = kWarps / kRowWarps;
constexpr int kBand = 8;                            // tiles of rows that go through all outputs before the next ones do
constexpr int kWarpSums = kTileRows * kSumStride;   // that a warp writes at a time

PD_DEVICE int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

struct TilePlace {
  int row, column;  // its first
};

template <int kWarpRowTiles, int kWarpColumnTiles>  // of a warp, 16 rows and 8 outputs each
struct Shape {
  static constexpr int kRowTiles = kWarpRowTiles, kColumnTiles = kWarpColumnTiles;
  static constexpr int kRows = kRowWarps * kTileRows * kRowTiles, kColumns = kColumnWarps * 8 * kColumnTiles;
  static constexpr int kSharing = kColumnTiles < kPanelTiles ? kPanelTiles / kColumnTiles : 1;  // warps of a panel
  static_assert(8 * kColumnTiles * kSharing % kPanel == 0 && (kSharing == 1 || kRowTiles == 1));

  static PD_DEVICE int first_row() { return thread_index() / kWarp / kColumnWarps * kRowTiles * kTileRows; }
  static PD_DEVICE int first_column() { return thread_index() / kWarp % kColumnWarps * kColumnTiles * 8; }
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
using Slim = Shape<1, 2>;

// A wide tile has four times the products of a narrow one and takes about twice as long: it reads half as many bytes a
// product from the second cache and from shared memory, which are what bounds both.
PD_DEVICE int num_rounds(int tiles, int blocks) { return (tiles + blocks - 1) / blocks; }
PD_DEVICE bool worth_wide(int wide, int narrow) {  // so many tiles
  return 2 * num_rounds(wide, num_grid_blocks()) <= num_rounds(narrow, num_grid_blocks());
}
// A slim tile reads three quarters of what a narrow one does, so it is for where half the blocks would have none.
PD_DEVICE bool worth_slim(int slim, int narrow) {
  return 3 * num_rounds(slim, num_grid_blocks()) < 4 * num_rounds(narrow, num_grid_blocks());
}
template <class S>
struct TilesOf {
  static PD_DEVICE int of(int rows, int n) { return S::row_tiles(rows) * S::column_tiles(n); }
};
template <class S>
using ExpertTiles = Experts<TilesOf<S>>;

// The sums of a warp's tile.
template <int kRowTiles, int kColumnTiles>
PD_DEVICE void clear(float (&sums)[kRowTiles][kColumnTiles][4]) {
  PD_UNROLL for (int i = 0; i < kRowTiles * kColumnTiles * 4; i++)
    sums[i / 4 / kColumnTiles][i / 4 % kColumnTiles][i % 4] = 0.0f;
}
// Times the outputs' scales.
template <class S>
PD_DEVICE void scale_outputs(const float *scales, int n, TilePlace place,
                             float (&sums)[S::kRowTiles][S::kColumnTiles][4]) {
  PD_UNROLL for (int j = 0; j < S::kColumnTiles; j++)
    PD_UNROLL for (int i = 0; i < 2; i++) {
      const int column = place.column + S::first_column() + 8 * j + thread_index() % 4 * 2 + i;
      const float scale = column < padded(n) ? scales[column] : 0.0f;
      PD_UNROLL for (int of = 0; of < 2 * S::kRowTiles; of++)
        sums[of / 2][j][of % 2 * 2 + i] = sums[of / 2][j][of % 2 * 2 + i] * scale;
    }
}

// How groups of k follow one another where x becomes int8 on its way: W is copied to stages of shared memory and x
// loaded to registers two groups ahead, what x becomes lies in buffers one group ahead.
constexpr int kStages = 3, kBuffers = 2;
struct Current {  // what is multiplied
  int stage = 0, buffer = 0;

  PD_DEVICE int last_stage() const { return stage ? stage - 1 : kStages - 1; }  // that was multiplied before
  PD_DEVICE void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    buffer = 1 - buffer;
  }
};
template <class Tiles, class Sums>
PD_DEVICE void multiply_groups(Tiles &tiles, int num_groups, Current &current, Sums &sums) {
  clear(sums);
  PD_ROLLED for (int group = 0; group < num_groups; group++) {
    await_copies<kStages - 2>();
    sync_block();  // what has come and what was kept is seen, and nobody looks any more at the group before
    tiles.keep(1 - current.buffer);
    tiles.bring(current.last_stage());
    tiles.multiply(current, sums);
    current.advance();
  }
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
  const auto sum = [&](int r, int at, float of) {
    const float x = sums[first + r * kSumStride + at];
    return bias ? x + of : x;
  };
  if (a.epilogue == PD_ADD) {
    float *y = (float *)a.y + start, before[kTileRows];  // all under way before the first is needed
    PD_UNROLL for (int r = 0; r < kTileRows; r++) before[r] = row + r < num_rows ? y[(int64_t)r * width] : 0.0f;
    PD_UNROLL for (int r = 0; r < kTileRows; r++) {
      if (row + r >= num_rows) break;
      y[(int64_t)r * width] = before[r] + sum(r, place, of_x);
    }
    return;
  }
  PD_UNROLL_BY(2)  // activations are long, and this is inlined for every tile
  for (int r = above; r < kTileRows && row + r < num_rows; r += gated ? 2 : 1) {
    const float up = gated ? sum(r, place + kPanel / 2, of_up) : 0.0f;
    store(a, start + (int64_t)r * width, activated(a.epilogue, sum(r, place, of_x), up));
  }
}

// The sums of a block's tile: panel by panel through the warp's own part of shared memory [warps][kWarpSums], or one
// for the warps that share a panel, of which the first goes on with it. Registers have no index, so what is left moves
// up to where the first one was: one body, which fits the instructions' cache, for all. end: the panel behind the last
// that the tile may have.
template <class S>
PD_DEVICE void finish_tile(const pd_gemm_args &a, int num_rows, TilePlace place,
                           float (&sums)[S::kRowTiles][S::kColumnTiles][4], const SharedArray<float> &shared,
                           int end = INT32_MAX) {
  constexpr int kPanels = S::kColumnTiles * S::kSharing / kPanelTiles;
  const int warp = thread_index() / kWarp, first = warp / S::kSharing * kWarpSums;
  const int g = thread_index() % kWarp / 4, at = S::first_column() % kPanel + 2 * (thread_index() % 4);
  const auto meet = [] { S::kSharing == 1 ? sync_warp() : sync_block(); };
  PD_ROLLED for (int i = 0; i < S::kRowTiles * kPanels; i++) {
    PD_UNROLL for (int j = 0; j < kPanelTiles / S::kSharing; j++)
      PD_UNROLL for (int of = 0; of < 4; of++)
        shared[first + (of / 2 * 8 + g) * kSumStride + 8 * j + at + of % 2] = sums[0][j][of];
    meet();
    const int panel = (place.column + S::first_column()) / kPanel + i % kPanels;
    if (panel < end && warp % S::kSharing == 0)
      finish_panel(a, num_rows, place.row + S::first_row() + i / kPanels * kTileRows, panel, shared, first);
    meet();  // nobody looks at this panel any more
    PD_UNROLL for (int n = kPanelTiles; n < S::kRowTiles * S::kColumnTiles; n++)
      PD_UNROLL for (int of = 0; of < 4; of++) {
        const int to = n - kPanelTiles;
        sums[to / S::kColumnTiles][to % S::kColumnTiles][of] = sums[n / S::kColumnTiles][n % S::kColumnTiles][of];
      }
  }
}

}  // namespace pagedec::gemm
