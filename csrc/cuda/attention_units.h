// Units on their way to shared memory: what is read of a plan for them, and what stays beside them.
#pragma once
#include "cuda/attention_rows.h"
#include "cuda/attention_stages.h"
#include "cuda/kv_bytes.h"

namespace pagedec::attention {
namespace {

// What is to be known of a unit in a stage.
struct alignas(16) Mark {
  int start;
  uint32_t lanes;  // as Sight's
  int rows;        // packed rows, 16 bits each
  int is_whole;    // all rows of the span see all of it

  static PD_DEVICE Mark of(int start, const Sight &sight, bool is_whole) {
    return {start, sight.lanes(), sight.row0 | sight.row1 << 16, is_whole};
  }
  PD_DEVICE Sight sight() const { return Sight::of(rows & 0xffff, rows >> 16, lanes); }
};

// The unit that is brought next. A thread has of its block ids those that it needs.
template <class S>
struct UnitAhead {
  using Found = FoundTokens<S::kThreadsAToken>;
  using M = typename S::M;
  const plan::Unit *unit;
  int tile, row0, row1, path;
  int blocks[Found::kTokens], block_of_scale;

  PD_DEVICE void read(const plan::Unit &u, int block_shift) {
    unit = &u, tile = u.tile, row0 = u.row0, row1 = u.row1, path = u.path;
    PD_UNROLL for (int n = 0; n < Found::kTokens; n++) blocks[n] = u.blocks[Found::token(n) >> block_shift];
    if (S::kHasScales) block_of_scale = u.blocks[thread_index() % TILE >> block_shift];
  }
  // Of a span whose rows all see positions all_begin .. all_end - 1.
  PD_DEVICE bool is_whole(const Sight &sight, int num_packed, int all_begin, int all_end) const {
    return path < 0 && sight.row0 == 0 && sight.row1 == num_packed && tile * TILE >= all_begin &&
           tile * TILE + TILE <= all_end;
  }
  PD_DEVICE void copy(const Work &, const Sections &, const S &stages, int stage, int kv_head, int first,
                      int last) const;
};

// Begins its copies, of which lanes first .. last - 1 are seen.
template <class S>
PD_DEVICE void UnitAhead<S>::copy(const Work &w, const Sections &p, const S &stages, int stage, int kv_head, int first,
                                  int last) const {
  const int shift = w.block_shift, in_block = (1 << shift) - 1, dim = w.head_dim, start = tile * TILE;
  Found found{};
  PD_UNROLL for (int i = 0; i < Found::kTokens; i++) {
    const int token = Found::token(i);
    found.slots[i] = blocks[i] << shift | ((start + token) & in_block);
    found.is_seen |= (uint32_t)(token >= first && token < last) << i;
  }
  int slot_of_scale = 0;
  const int scaled = thread_index() % TILE;
  if constexpr (S::kHasScales) slot_of_scale = block_of_scale << shift | ((start + scaled) & in_block);
  if (path >= 0) {
    const int path_lane = unit->path_lane;
    const int32_t *slots = p.of<int32_t>(p.header.paths) + path - path_lane;
    PD_UNROLL for (int i = 0; i < Found::kTokens; i++) {
      const int token = Found::token(i);
      if (token >= path_lane && (found.is_seen >> i & 1)) found.slots[i] = slots[token];
    }
    if (S::kHasScales && scaled >= path_lane && scaled >= first && scaled < last) slot_of_scale = slots[scaled];
  }
  const int kv_heads = w.kv_heads;
  const uint32_t of_block = (uint32_t)(dim + (S::kHasScales ? kScaleBytes : 0)) << shift;
  const auto block = [&](int slot) {  // where its head begins
    return (int64_t)((uint64_t)(uint32_t)((slot >> shift) * kv_heads + kv_head) * of_block);
  };
  const M *k = (const M *)w.k_cache, *v = (const M *)w.v_cache;
  stages.begin(stage, found, dim, [&](int slot) { return block(slot) + (slot & in_block) * dim; }, k, v);
  if constexpr (S::kHasScales)
    stages.begin_scale(stage, scaled >= first && scaled < last,
                        block(slot_of_scale) + (dim << shift) + (slot_of_scale & in_block) * kScaleBytes, k, v);
}

// Until the oldest of the stages that are under way is there.
template <int kMostStages>
PD_DEVICE void await_stage(int stages) {
  if constexpr (kMostStages <= 2) await_copies<0>();
  else if (stages >= kMostStages) await_copies<kMostStages - 2>();
  else await_stage<kMostStages - 1>(stages);
}

// 16 bytes of a row of queries.
struct alignas(16) Words { uint32_t of[4]; };

// Into rows of shared memory that are 16 bytes longer than a head. Of rows and columns that are not there, zeros.
template <class S>
PD_DEVICE void load_queries(const Work &w, const Sections &p, const PackedRows &rows, int num_rows,
                            const SharedArray<Words> &to) {
  constexpr int kCopied = kCopiedBytes / 2, kCopies = S::kColumns / kCopied;
  for (int i = thread_index(); i < num_rows * kCopies; i += kThreads) {
    const int row = i / kCopies, at = i % kCopies;
    Words words{};
    if (row < rows.num_packed && at * kCopied < w.head_dim) {
      const int64_t of_row = (int64_t)rows.row(p, row).row_id * p.header.q_heads + rows.head(row);
      words = load_whole<Words>((const typename S::E *)w.q + of_row * w.head_dim + at * kCopied);
    }
    to[row * (kCopies + 1) + at] = words;
  }
}

}  // namespace
}  // namespace pagedec::attention
