// Attention of many packed rows, as on a prompt or where beams share one: a warp has a tile of 16 rows, and of a unit
// all positions for them. Its logits and probabilities stay in registers, from the products with K to those with V, and
// warps only meet where a unit's K and V have come, which a fifth warp brings.
//
// Order    As in attention_work.h: what a row's sum of probabilities is made of is kept apart by quarters of units.
#pragma once
#include "cuda/attention_units.h"

namespace pagedec::attention {
namespace {

template <class S>
class Many {
 public:
  using E = typename S::E;
  using M = typename S::M;
  using P = typename S::P;
  static constexpr int kRows = most_rows_of(PD_BF16, S::kColumns), kPieces = S::kColumns / 8, kQuarters = TILE / kStepTokens;
  static constexpr int kQueryStride = S::kColumns + 8, kProbabilityStride = TILE + 8;
  static constexpr int kMostStages = S::kMostStages < 3 ? S::kMostStages : 3;
  static constexpr int64_t kBeginsAt = kMostStages * sizeof(Mark), kEndsAt = kBeginsAt + 4 * kRows;
  static constexpr int64_t kQueryAt = kEndsAt + 4 * kRows;
  static constexpr int64_t kStagesAt = kQueryAt + kRows * kQueryStride * 2;
  static constexpr int64_t bytes(int stages) { return kStagesAt + stages * S::kStageBytes; }
  static_assert(kQueryAt % 16 == 0 && kStagesAt % 16 == 0);

  PD_DEVICE Many(const Work &w, const SharedMemory &memory)
      : w_(w), p_{*(const plan::Header *)w.words, w.words}, h_(p_.header), warp_(thread_index() / kWarp),
        lane_(thread_index() % kWarp), stages_(memory, kStagesAt, w.num_stages),
        marks_(memory.part<Mark>(0, kMostStages)), begins_(memory.part<int32_t>(kBeginsAt, kRows)),
        ends_(memory.part<int32_t>(kEndsAt, kRows)), q_(memory.part<E>(kQueryAt, kRows * kQueryStride)),
        whole_q_(memory.part<Words>(kQueryAt, kRows * kQueryStride * 2 / 16)) {}

  // The span i; the one behind it.
  PD_DEVICE int run(int i, int);

 private:
  PD_DEVICE void begin_rows();
  PD_DEVICE void bring(int stage, const plan::Unit *next);
  PD_DEVICE Sight sight_of(int start, int row0, int row1) const;
  PD_DEVICE void bring_span();
  PD_DEVICE void compute_span();
  PD_DEVICE void run_unit(int stage);
  PD_DEVICE void add_logits(int stage, float (&s)[kQuarters][2][4]) const;
  PD_DEVICE void scale_logits(int stage, float (&s)[kQuarters][2][4]) const;
  PD_DEVICE void hide(const Mark &mark, const Sight &sight, float (&s)[kQuarters][2][4]) const;
  PD_DEVICE void weigh(float (&s)[kQuarters][2][4]);
  PD_DEVICE void pair_up(int stage, const Mark &mark, const Sight &sight, const float (&s)[kQuarters][2][4],
                         uint32_t (&a)[kQuarters][4]) const;
  template <bool kAllRows>
  PD_DEVICE void add_values(int stage, const Sight &sight, const uint32_t (&a)[kQuarters][4]);
  PD_DEVICE void add_poison(int stage, const Mark &mark, const Sight &sight, const uint32_t (&a)[kQuarters][4]);
  PD_DEVICE void end_chunk(int chunk, bool is_first_item, bool is_last_item);

  PD_DEVICE int row_of(int half) const { return warp_ * kTileRows + half * 8 + lane_ / 4; }
  PD_DEVICE int column_of(int piece) const { return 8 * piece + 2 * (lane_ % 4); }
  PD_DEVICE float &total(int half, int piece, int i) const {
    const int64_t place = ((int64_t)block_index() * 2 + half) * (kPieces + 1) + piece;
    return w_.totals[(place * 2 + i) * kThreads + thread_index()];
  }

  const Work &w_;
  const Sections p_;
  const plan::Header &h_;
  const int warp_, lane_;
  const S stages_;
  const SharedArray<Mark> marks_;
  const SharedArray<int32_t> begins_, ends_;  // positions that packed rows see
  const SharedArray<E> q_;
  const SharedArray<Words> whole_q_;
  PackedRows rows_;
  UnitAhead<S> ahead_;
  const plan::Unit *units_, *units_end_;
  int all_begin_, all_end_;                   // that all rows see
  int begin_[2], end_[2];                     // that this thread's do
  float o_[kPieces][4], m_[2], l_[kQuarters][2];  // of the chunk
};

template <class S>
PD_DEVICE void Many<S>::begin_rows() {
  sync_block();  // of the span before
  for (int r = thread_index(); r < kRows; r += kThreadsWithCopier) {
    const bool is_there = r < rows_.num_packed;
    const plan::Row &row = rows_.row(p_, is_there ? r : 0);
    begins_[r] = is_there ? row.begin : 0, ends_[r] = is_there ? row.end : 0;
  }
  sync_block();
  all_begin_ = 0, all_end_ = 1 << 30;
  for (int r = lane_; r < rows_.num_packed; r += kWarp)
    all_begin_ = upper<int>(all_begin_, begins_[r]), all_end_ = lower<int>(all_end_, ends_[r]);
  for (int mask = kWarp / 2; mask; mask /= 2) {
    all_begin_ = upper(all_begin_, shuffle_xor(all_begin_, mask));
    all_end_ = lower(all_end_, shuffle_xor(all_end_, mask));
  }
  PD_UNROLL for (int half = 0; half < 2; half++) {
    const bool is_there = row_of(half) < rows_.num_packed;
    begin_[half] = is_there ? (int)begins_[row_of(half)] : 0, end_[half] = is_there ? (int)ends_[row_of(half)] : 0;
  }
}

// Of packed rows row0 .. row1 - 1 in a tile that begins at `start`.
template <class S>
PD_DEVICE Sight Many<S>::sight_of(int start, int row0, int row1) const {
  Sight sight{row0, row1, TILE, 0, 0, TILE};
  for (int r = row0 + lane_; r < row1; r += kWarp) sight.meet(begins_[r] - start, ends_[r] - start);
  sight.meet_lanes();
  return sight;
}

// Begins the copies of the unit ahead, and reads the next one's record.
template <class S>
PD_DEVICE void Many<S>::bring(int stage, const plan::Unit *next) {
  const int start = ahead_.tile * TILE, row0 = ahead_.row0 * rows_.heads, row1 = ahead_.row1 * rows_.heads;
  Sight sight{row0, row1, 0, TILE, 0, TILE};
  const bool is_whole = ahead_.is_whole(sight, rows_.num_packed, all_begin_, all_end_);
  if (!is_whole) sight = sight_of(start, row0, row1);
  if (lane_ == 0) marks_[stage] = Mark::of(start, sight, is_whole);
  ahead_.copy(w_, p_, stages_, stage, rows_.kv_head, sight.first, sight.last);
  if (next) ahead_.read(*next, w_.block_shift);
}

template <class S>
PD_DEVICE void Many<S>::add_logits(int stage, float (&s)[kQuarters][2][4]) const {
  const int of_q = (warp_ * kTileRows + lane_ % 16) * kQueryStride + lane_ / 16 * 8;
  PD_UNROLL for (int column = 0; column < S::kColumns; column += kLoadedColumns) {
    uint32_t a[2][4];
    PD_UNROLL for (int step = 0; step < 2; step++) load_matrices(a[step], q_.at(of_q + column + 16 * step));
    PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) {
      uint32_t b[2][4];
      stages_.load_keys(stage, quarter * kStepTokens, column, b);
      PD_UNROLL for (int step = 0; step < 2; step++)
        PD_UNROLL for (int n = 0; n < 2; n++)
          multiply_add<E>(s[quarter][n], a[step], b[step][2 * n], b[step][2 * n + 1]);
    }
  }
}

// Logits in units of log 2. A soft cap is long: its code is that of a quarter, to whose registers the others move.
template <class S>
PD_DEVICE void Many<S>::scale_logits(int stage, float (&s)[kQuarters][2][4]) const {
  const bool has_cap = w_.soft_cap > 0.0f;
  const float by = has_cap ? w_.inner_scale : w_.scale;
  PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) {
    const auto scales = stages_.scales(stage, false, quarter * kStepTokens);
    PD_UNROLL for (int i = 0; i < 8; i++) {
      float &x = s[quarter][i / 4][i % 4];
      x = scales.times(i / 4 * 2 + i % 2, x) * by;
    }
  }
  if (!has_cap) return;
  PD_ROLLED for (int n = 0; n < 2 * kQuarters; n++) {
    float capped[4];
    PD_UNROLL for (int i = 0; i < 4; i++) capped[i] = w_.soft_cap * hyperbolic_tangent(s[0][0][i]);
    PD_UNROLL for (int to = 0; to < 2 * kQuarters - 1; to++)
      PD_UNROLL for (int i = 0; i < 4; i++) s[to / 2][to % 2][i] = s[(to + 1) / 2][(to + 1) % 2][i];
    PD_UNROLL for (int i = 0; i < 4; i++) s[kQuarters - 1][1][i] = capped[i];
  }
}

// What rows do not see becomes -inf.
template <class S>
PD_DEVICE void Many<S>::hide(const Mark &mark, const Sight &sight, float (&s)[kQuarters][2][4]) const {
  PD_UNROLL for (int half = 0; half < 2; half++) {
    const int begin = begin_[half], end = sight.has_row(row_of(half)) ? end_[half] : 0;
    PD_UNROLL for (int n = 0; n < 2 * kQuarters; n++)
      PD_UNROLL for (int i = 0; i < 2; i++) {
        const int at = mark.start + 8 * n + 2 * (lane_ % 4) + i;
        if (at < begin || at >= end) s[n / 2][n % 2][2 * half + i] = -INFINITY;
      }
  }
}

// Logits to probabilities; results and sums so far come down to the new maximum.
template <class S>
PD_DEVICE void Many<S>::weigh(float (&s)[kQuarters][2][4]) {
  float by[2];
  PD_UNROLL for (int half = 0; half < 2; half++) {
    float top = -INFINITY;
    PD_UNROLL for (int n = 0; n < 2 * kQuarters; n++)
      top = fmaxf(top, fmaxf(s[n / 2][n % 2][2 * half], s[n / 2][n % 2][2 * half + 1]));
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    const float before = m_[half];
    top = fmaxf(before, top);
    by[half] = top == before ? 1.0f : power_of_two(before - top);
    const float shift = top == -INFINITY ? 0.0f : top;
    m_[half] = top;
    PD_UNROLL for (int n = 0; n < 2 * kQuarters; n++)
      PD_UNROLL for (int i = 0; i < 2; i++) {
        float &x = s[n / 2][n % 2][2 * half + i];
        x = power_of_two(x - shift);
      }
  }
  if (ballot(by[0] != 1.0f || by[1] != 1.0f)) {  // times 1 changes nothing
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 4; i++) o_[j][i] = o_[j][i] * by[i / 2];
    PD_UNROLL for (int i = 0; i < 2 * kQuarters; i++) l_[i / 2][i % 2] = l_[i / 2][i % 2] * by[i % 2];
  }
  PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++)
    PD_UNROLL for (int half = 0; half < 2; half++) {
      float &sum = l_[quarter][half];
      PD_UNROLL for (int n = 0; n < 2; n++)
        sum = sum + (s[quarter][n][2 * half] + s[quarter][n][2 * half + 1]);
    }
}

// Probabilities as the instruction takes them, with V's scales.
template <class S>
PD_DEVICE void Many<S>::pair_up(int stage, const Mark &mark, const Sight &sight, const float (&s)[kQuarters][2][4],
                                uint32_t (&a)[kQuarters][4]) const {
  PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) {
    [[maybe_unused]] const auto scales = stages_.scales(stage, true, quarter * kStepTokens);
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int begin = begin_[half] - mark.start, end = (sight.has_row(row_of(half)) ? end_[half] : 0) - mark.start;
      PD_UNROLL for (int n = 0; n < 2; n++) {
        float p[2];
        PD_UNROLL for (int i = 0; i < 2; i++) {
          const int at = quarter * kStepTokens + 8 * n + 2 * (lane_ % 4) + i;
          p[i] = scales.times_seen(2 * n + i, s[quarter][n][2 * half + i], mark.is_whole || (at >= begin && at < end));
        }
        a[quarter][2 * n + half] = pair_of<P>(p[0], p[1]);
      }
    }
  }
}

template <class S>
template <bool kAllRows>
PD_DEVICE void Many<S>::add_values(int stage, const Sight &sight, const uint32_t (&a)[kQuarters][4]) {
  PD_UNROLL for (int j = 0; j < kPieces; j += 2) {
    float o[2][4];
    PD_UNROLL for (int i = 0; i < 8; i++) o[i / 4][i % 4] = o_[j + i / 4][i % 4];
    PD_UNROLL for (int token = 0; token < TILE; token += kLoadedTokens) {
      uint32_t b[2][4];
      stages_.load_values(stage, token, 8 * j, b);
      PD_UNROLL for (int step = 0; step < 2; step++)
        PD_UNROLL for (int n = 0; n < 2; n++)
          multiply_add<P>(o[n], a[token / kStepTokens + step], b[step][2 * n], b[step][2 * n + 1]);
    }
    PD_UNROLL for (int i = 0; i < 8; i++)  // other rows' probabilities are 0, which times infinity is NaN
      if (kAllRows || sight.has_row(row_of(i % 4 / 2))) o_[j + i / 4][i % 4] = o[i / 4][i % 4];
  }
}

// As Few's. Seldom taken: probabilities lie where K was, and sums in memory, where loops can count them.
template <class S>
PD_DEVICE void Many<S>::add_poison(int stage, const Mark &mark, const Sight &sight,
                                   const uint32_t (&a)[kQuarters][4]) {
  if constexpr (!S::kHasScales) {
    sync_block();  // nobody needs K any more
    const bool is_mine = sight.has_tile(warp_);
    if (is_mine) {
      PD_UNROLL for (int i = 0; i < 4 * kQuarters; i++)
        stages_.put_pair(stage, row_of(i % 2), i / 4 * kStepTokens + i / 2 % 2 * 8 + 2 * (lane_ % 4), a[i / 4][i % 4]);
      sync_warp();
      float sums[kPieces][4];
      PD_UNROLL for (int i = 0; i < 4 * kPieces; i++) sums[i / 4][i % 4] = o_[i / 4][i % 4];
      PD_ROLLED for (int half = 0; half < 2; half++) {
        const int row = row_of(half);
        if (!sight.has_row(row)) continue;
        const int begin = within(begins_[row] - mark.start, 0, TILE), end = within(ends_[row] - mark.start, 0, TILE);
        PD_ROLLED for (int token = begin; token < end; token++) {
          const float by = to_float(stages_.number(stage, row, token));
          PD_ROLLED for (int i = 0; i < 2 * kPieces; i++) {
            const int column = column_of(i / 2) + i % 2;
            if (column >= w_.head_dim) break;
            const E x = stages_.value(stage, token, column);
            if (!S::is_finite(x)) sums[i / 2][half * 2 + i % 2] += by * to_float(x);
          }
        }
      }
      PD_UNROLL for (int i = 0; i < 4 * kPieces; i++) o_[i / 4][i % 4] = sums[i / 4][i % 4];
    }
    sync_block();
    stages_.clear_poison(stage, sight, w_.head_dim);
    sync_block();
  }
}

template <class S>
PD_DEVICE void Many<S>::run_unit(int stage) {
  const Mark mark = marks_[stage];
  const Sight sight = mark.sight();
  // What a row does not see may be anything, and 0 times infinity is NaN.
  const bool is_poisoned =
      !S::kHasScales && sight.is_ragged() && any_of_block(stages_.has_poison(stage, sight, w_.head_dim));
  const bool is_mine = sight.has_tile(warp_);
  if (!is_mine && !is_poisoned) return;
  float s[kQuarters][2][4] = {};
  uint32_t a[kQuarters][4] = {};
  if (is_mine) {
    add_logits(stage, s);
    scale_logits(stage, s);
    if (!mark.is_whole) hide(mark, sight, s);
    weigh(s);
    pair_up(stage, mark, sight, s, a);
  }
  if (is_poisoned) add_poison(stage, mark, sight, a);
  if (!is_mine) return;
  if (mark.is_whole) add_values<true>(stage, sight, a);
  else add_values<false>(stage, sight, a);
}

template <class S>
PD_DEVICE void Many<S>::end_chunk(int chunk, bool is_first_item, bool is_last_item) {
  PD_ROLLED for (int half = 0; half < 2; half++) {  // the second moves to the registers of the first
    float l = 0.0f;
    PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) {
      float sum = l_[quarter][0];
      sum = sum + shuffle_xor(sum, 1);
      sum = sum + shuffle_xor(sum, 2);
      l = quarter ? l + sum : sum;
    }
    const int packed = row_of(half);
    if (packed < rows_.num_packed) {
      float o[kPieces][2];
      PD_UNROLL for (int i = 0; i < 2 * kPieces; i++) o[i / 2][i % 2] = o_[i / 2][i % 2];
      const auto total_of = [&](int piece, int i) -> float & { return total(half, piece, i); };
      const auto column = [&](int piece) { return column_of(piece); };
      end_row<E>(w_, p_, rows_, packed, chunk, is_first_item, is_last_item, lane_ % 4 == 0, m_[0], l, o, total_of,
                 column);
    }
    m_[0] = m_[1];
    PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) l_[quarter][0] = l_[quarter][1];
    PD_UNROLL for (int i = 0; i < 2 * kPieces; i++) o_[i / 2][i % 2] = o_[i / 2][2 + i % 2];
  }
}

// There is one place that brings: its code is long.
template <class S>
PD_DEVICE void Many<S>::bring_span() {
  const int num_stages = w_.num_stages, num_units = (int)(units_end_ - units_);
  ahead_.read(*units_, w_.block_shift);
  stages_.clear_columns(num_stages, w_.head_dim, (const M *)w_.k_cache);
  int num_free = upper(num_stages - 1, 1), free = 0, brought = 0;
  for (int i = 0, stage = 0; i < num_units; i++, stage = stage + 1 == num_stages ? 0 : stage + 1) {
    if (num_stages == 1) sync_block();
    PD_ROLLED for (; num_free > 0; num_free--, free = free + 1 == num_stages ? 0 : free + 1) {
      if (brought < num_units) brought++, bring(free, brought < num_units ? units_ + brought : nullptr);
      end_copy_group();
    }
    await_all_but<(kMostStages > 2 ? kMostStages - 2 : 0)>(upper(num_stages - 2, 0));
    sync_block();  // what has been brought is seen, and nobody looks any more where the next will be
    num_free = 1;
    if (S::kHasScales || !((Mark)marks_[stage]).sight().is_ragged() || !any_of_block(false)) continue;
    for (int n = 0; n < 3; n++) sync_block();  // of add_poison
  }
}

template <class S>
PD_DEVICE void Many<S>::compute_span() {
  load_queries<S>(w_, p_, rows_, kRows, whole_q_);
  const plan::Span &span = *rows_.span;
  const plan::Item *items = p_.template of<plan::Item>(h_.items) + span.item0;
  for (int item = 0, stage = 0; item < span.num_items; item++) {
    PD_UNROLL for (int half = 0; half < 2; half++) m_[half] = -INFINITY;
    PD_UNROLL for (int n = 0; n < 2 * kQuarters; n++) l_[n / 2][n % 2] = 0.0f;
    PD_UNROLL for (int n = 0; n < 4 * kPieces; n++) o_[n / 4][n % 4] = 0.0f;
    const int num_units = items[item].num_units;
    for (int u = 0; u < num_units; u++, stage = stage + 1 == w_.num_stages ? 0 : stage + 1) {
      sync_block();
      if (w_.num_stages == 1) sync_block();
      run_unit(stage);
    }
    end_chunk(items[item].chunk, item == 0, item + 1 == span.num_items);
  }
}

template <class S>
PD_DEVICE int Many<S>::run(int i, int) {
  const plan::Span &span = p_.template of<plan::Span>(h_.spans)[i];
  rows_.open(p_, span);
  const plan::Item *items = p_.template of<plan::Item>(h_.items) + span.item0;
  const plan::Item &end = items[span.num_items - 1];
  units_ = p_.template of<plan::Unit>(h_.units) + items[0].unit0;
  units_end_ = units_ + (end.unit0 + end.num_units - items[0].unit0);
  begin_rows();
  if (warp_ == kWarps) bring_span();
  else compute_span();
  return i + 1;
}

}  // namespace
}  // namespace pagedec::attention
