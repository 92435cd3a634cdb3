// What a launch of attention is given, and what walks (attention.h) and merges have in common.
#pragma once
#include "cuda/launch.h"
#include "cuda/matrix.h"
#include "plan/words.h"

namespace pagedec::attention {

// Warps that compute; where there are tensor cores, one more brings K and V.
constexpr int kWarps = 4, kThreads = kWarps * kWarp, kThreadsWithCopier = kThreads + kWarp;
constexpr int kTileRows = 16, kRowTiles = ROWS_MAX / kTileRows;
constexpr int kWarpTokens = TILE / kWarps;
static_assert(ROWS_MAX % kTileRows == 0 && kWarpTokens == 16);

// Where tiles begin in shared memory, behind what walks have of packed rows, which positions they see and what warps
// have found of each, and of each stage.
constexpr int kMostStages = 4;
constexpr int64_t kSightsAt = (8 + 4 * kWarps) * ROWS_MAX, kTilesAt = kSightsAt + 128;
static_assert(kMostStages * sizeof(uint32_t) <= kTilesAt - kSightsAt);
static_assert(kTilesAt % 128 == 0);

struct Work {
  const int32_t *words;
  const void *q, *k_cache, *v_cache;
  void *out;
  float *partials;                     // [num_split_partials][q_heads][head_dim + 2]: o, m, l
  float *totals;                       // what threads have folded, by block
  float scale, soft_cap, inner_scale;  // as in cpu/attention.h: in units of log 2
  int kv_heads, head_dim, block_shift; // a block has 1 << block_shift slots
  int num_stages, few_stages;          // of tiles, where there are many packed rows, and where there are few
};

// A plan's words, section by section.
struct Sections {
  const plan::Header &header;
  const int32_t *words;
  template <class R>
  PD_DEVICE const R *of(const plan::Section &s) const {
    return (const R *)(words + s.offset);
  }
};

// Where the tokens of a unit lie, and which of them any row sees.
struct Place {
  const int32_t *blocks, *path;           // path: slots of lanes from path_lane on
  int start, path_lane, shift, first, last;  // lanes first .. last - 1 are seen

  PD_DEVICE Place(const plan::Unit &u, const int32_t *paths, int shift, int first, int last)
      : blocks(u.blocks), path(paths + u.path - u.path_lane), start(u.tile * TILE),
        path_lane(u.path < 0 ? TILE : u.path_lane), shift(shift), first(first), last(last) {}
  PD_DEVICE bool is_seen(int lane) const { return lane >= first && lane < last; }
  // Of a lane that is not seen, that of one which is. Without a branch, so that a thread's are found at a time.
  PD_DEVICE int slot(int lane) const {
    lane = is_seen(lane) ? lane : first < last ? first : 0;
    const bool is_in_block = lane < path_lane;
    const int found = *(is_in_block ? blocks + (lane >> shift) : path + lane);
    return is_in_block ? found << shift | ((start + lane) & ((1 << shift) - 1)) : found;
  }
};

// Which packed rows of a unit see which of its lanes: all see those that all do; those in between only some.
struct Sight {
  int row0, row1;          // packed rows
  int first, last;         // lanes that some row sees
  int all_first, all_last; // lanes that all do
  PD_DEVICE bool has_row(int row) const { return row >= row0 && row < row1; }
  PD_DEVICE bool has_tile(int tile) const { return tile * kTileRows < row1 && (tile + 1) * kTileRows > row0; }
  PD_DEVICE bool is_ragged() const { return first < all_first || last > all_last; }
  // A row sees lanes begin .. end - 1 besides; what all lanes of the warp have met.
  PD_DEVICE void meet(int begin, int end) {
    begin = within(begin, 0, TILE), end = within(end, 0, TILE);
    if (begin < end) first = lower(first, begin), last = upper(last, end);
    all_first = upper(all_first, begin), all_last = lower(all_last, end);
  }
  PD_DEVICE void meet_lanes() {
    for (int mask = kWarp / 2; mask; mask /= 2) {
      first = lower(first, shuffle_xor(first, mask)), last = upper(last, shuffle_xor(last, mask));
      all_first = upper(all_first, shuffle_xor(all_first, mask));
      all_last = lower(all_last, shuffle_xor(all_last, mask));
    }
  }
  // Its lanes in a word, and back.
  PD_DEVICE uint32_t lanes() const { return pack_bytes(first, last, all_first, all_last); }
  static PD_DEVICE Sight of(int row0, int row1, uint32_t lanes) {
    const auto byte = [&](int i) { return (int)(lanes >> 8 * i & 255); };
    return {row0, row1, byte(0), byte(1), byte(2), byte(3)};
  }
};

// What the four logits that a thread has of a row are multiplied by, and their probabilities: of a plain cache nothing.
struct NoScales {
  PD_DEVICE float times(int, float x) const { return x; }
  PD_DEVICE float times_seen(int, float x, bool) const { return x; }
};
struct Scales {
  float by[4];
  PD_DEVICE float times(int i, float x) const { return x * by[i]; }
  // What is not seen may have any scale, and 0 times infinity is NaN.
  PD_DEVICE float times_seen(int i, float x, bool is_seen) const { return is_seen ? x * by[i] : 0.0f; }
};

// Whether any thread of the block says so, to all of them: with the warp that copies.
PD_DEVICE bool any_of_block(bool mine) {
  SHARED_ARRAY(uint32_t, votes, kWarps + 1);
  const uint32_t vote = ballot(mine);
  sync_block();
  if (thread_index() % kWarp == 0) votes[thread_index() / kWarp] = vote;
  sync_block();
  uint32_t all = 0;
  for (int w = 0; w < kWarps; w++) all |= votes[w];
  return all != 0;
}

// (o, m, l) += (bo, bm, bl): how chunks are put together, always from left to right.
struct Fold {
  float top, x, y;
  PD_DEVICE Fold(float m, float bm) : top(m > bm ? m : bm), x(power_of_two(m - top)), y(power_of_two(bm - top)) {}
  PD_DEVICE float of(float a, float b) const { return a * x + b * y; }
};
PD_DEVICE float weight_of(float l) { return l > 0.0f || l != l ? quotient(1.0f, l) : 0.0f; }

// A worker's spans: those of few rows to the first, which leaves the others to the second.
template <class Few, class Many>
PD_DEVICE void walk_spans(const Work &w, const Few &run_few, const Many &run_many) {
  const Sections p{*(const plan::Header *)w.words, w.words};
  const int32_t *indptr = p.of<int32_t>(p.header.worker_indptr);
  for (int worker = block_index(); worker < p.header.num_workers; worker += num_grid_blocks())
    for (int i = indptr[worker], last = indptr[worker + 1]; i < last;) {
      i = run_few(i, last);
      if (i < last) i = run_many(i, last);
    }
}

// That a kernel of a dtype and such heads has.
inline int columns_of(int dtype, int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 && dtype != PD_F32 ? 128 : 256;
}
// Packed rows of a piece: of four tiles, one a warp, where shared memory and registers suffice.
constexpr int kMostRows = 64;
constexpr int most_rows_of(int dtype, int columns) { return dtype == PD_F32 || columns > 128 ? ROWS_MAX : kMostRows; }
inline int most_rows(int dtype, int head_dim) { return most_rows_of(dtype, columns_of(dtype, head_dim)); }
int enqueue_bf16(pd_context &, const Work &, int head_dim);
int enqueue_fp16(pd_context &, const Work &, int head_dim);
int enqueue_bf16_of_bytes(pd_context &, const Work &, int head_dim, int kv_kind);
int enqueue_fp16_of_bytes(pd_context &, const Work &, int head_dim, int kv_kind);
int enqueue_fp32(pd_context &, const Work &, int head_dim, int kv_kind);

}  // namespace pagedec::attention
