// Attention over a plan's words (plan/plan.h) on a device: a block of threads is a worker, which walks its spans, a
// unit of 64 positions at a time. Here is what a launch is given, and what walks (attention_few.h, attention_many.h,
// attention_fp32.cu) and merges have in common.
//
// Order    Inside a chunk of 512 positions units follow each other: a row's results and sums come down to the unit's
//          maximum, and it adds its own. A sum of probabilities is that of threads, then of quarters of units: 16
//          positions have four threads, which are added by a tree, and the first quarter comes first. Chunks are folded
//          from left to right: those of a span by the walk, in memory where the thread that has an element put it;
//          those of several spans by merge_kernel. Nothing depends on other rows, nor on which walk has a row.
#pragma once
#include "cuda/launch.h"
#include "cuda/matrix.h"
#include "plan/words.h"

namespace pagedec::attention {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kTileRows = 16, kWarpTokens = TILE / kWarps;
static_assert(kWarpTokens == 16);

constexpr float kLog2E = 1.44269504f;

struct Work {
  const int32_t *words;
  const void *q, *k_cache, *v_cache;
  void *out;
  const float *sinks;                  // [q_heads] or NULL
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
  PD_DEVICE float times_probability(int, float x) const { return x; }
};
// What is not seen may have any scale, and 0 times infinity is NaN: a probability of 0 stays one.
PD_DEVICE float scaled_probability(float x, float by) { return x == 0.0f ? 0.0f : x * by; }
struct Scales {
  float by[4];
  PD_DEVICE float times(int i, float x) const { return x * by[i]; }
  PD_DEVICE float times_probability(int i, float x) const { return scaled_probability(x, by[i]); }
};

// Whether any thread of the block says so, to all of them.
PD_DEVICE bool any_of_block(bool mine) {
  SHARED_ARRAY(uint32_t, votes, kWarps);
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
// As cpu/attention_state.h has it.
PD_DEVICE float weight_of(const Work &w, int head, float m, float l) {
  if (!w.sinks) return l > 0.0f || l != l ? quotient(1.0f, l) : 0.0f;
  const Fold fold(m, w.sinks[head] * kLog2E);
  return quotient(fold.x, fold.of(l, 1.0f));
}

// That a kernel of a dtype and such heads has.
inline int columns_of(int dtype, int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 && dtype != PD_F32 ? 128 : 256;
}
// Packed rows of a piece: of four tiles, one a warp, or two of the largest heads, as attention_many.h has them.
constexpr int most_rows_of(int dtype, int columns) { return dtype == PD_F32 ? ROWS_MAX : columns > 128 ? 32 : 64; }
inline int most_rows(int dtype, int head_dim) { return most_rows_of(dtype, columns_of(dtype, head_dim)); }
int enqueue_bf16(pd_context &, const Work &, int head_dim);
int enqueue_fp16(pd_context &, const Work &, int head_dim);
int enqueue_bf16_of_bytes(pd_context &, const Work &, int head_dim, int kv_kind);
int enqueue_fp16_of_bytes(pd_context &, const Work &, int head_dim, int kv_kind);
int enqueue_fp32(pd_context &, const Work &, int head_dim, int kv_kind);

}  // namespace pagedec::attention
