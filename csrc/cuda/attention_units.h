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

// The unit that is brought next. A lane has the block of the token that it finds for its warp.
template <class S>
struct UnitAhead {
  using M = typename S::M;
  int at, tile, row0, row1, path, block;  // at: among all units

  PD_DEVICE void read(const Sections &p, int unit, int block_shift) {
    const plan::Unit &u = p.of<plan::Unit>(p.header.units)[unit];
    at = unit, tile = u.tile, row0 = u.row0, row1 = u.row1, path = u.path, block = u.blocks[token() >> block_shift];
  }
  // Of a span whose rows all see positions all_begin .. all_end - 1.
  PD_DEVICE bool is_whole(const Sight &sight, int num_packed, int all_begin, int all_end) const {
    return path < 0 && sight.row0 == 0 && sight.row1 == num_packed && tile * TILE >= all_begin &&
           tile * TILE + TILE <= all_end;
  }
  PD_DEVICE void copy(const Work &, const Sections &, const S &stages, int stage, int kv_head, int first,
                      int last) const;
  static PD_DEVICE int token() { return thread_index() / kWarp * kWarpTokens + thread_index() % kWarpTokens; }
};

// Begins its copies, of which lanes first .. last - 1 are seen.
template <class S>
PD_DEVICE void UnitAhead<S>::copy(const Work &w, const Sections &p, const S &stages, int stage, int kv_head, int first,
                                  int last) const {
  const int shift = w.block_shift, in_block = (1 << shift) - 1, dim = w.head_dim;
  const uint32_t of_block = (uint32_t)(dim + (S::kHasScales ? kScaleBytes : 0)) << shift;
  const M *k = (const M *)w.k_cache, *v = (const M *)w.v_cache;
  const bool is_seen = token() >= first && token() < last;
  int of = block, offset = (tile * TILE + token()) & in_block;
  if (path >= 0) {
    const int path_lane = p.of<plan::Unit>(p.header.units)[at].path_lane;
    if (is_seen && token() >= path_lane) {
      const int slot = p.of<int32_t>(p.header.paths)[path + token() - path_lane];
      of = slot >> shift, offset = slot & in_block;
    }
  }
  // where its block's head begins
  const int64_t start = (int64_t)((uint64_t)(uint32_t)(of * w.kv_heads + kv_head) * of_block);
  if constexpr (S::kHasScales) {
    const bool is_v = thread_index() % kWarp >= kWarpTokens;
    stages.begin_scale(stage, token(), is_v, is_seen, start + (dim << shift) + offset * kScaleBytes, is_v ? v : k);
  }
  stages.begin(stage, start + offset * dim, first, last, dim, k, v);
}

// Until no more than `left` groups of copies are under way, at most kMost.
template <int kMost>
PD_DEVICE void await_all_but(int left) {
  if constexpr (kMost <= 0) await_copies<0>();
  else if (left >= kMost) await_copies<kMost>();
  else await_all_but<kMost - 1>(left);
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
