// Attention of many packed rows, as on a prompt or where beams share one: a warp has a tile of 16 rows, and of a unit
// all positions for them. Its logits and probabilities stay in registers, from the products with K to those with V, and
// warps only meet where a unit's K and V have come. Of the largest heads two warps have the same rows, and each half of
// the results' columns, which are as many as there are registers for.
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
  static constexpr int kRows = most_rows_of(PD_BF16, S::kColumns), kQuarters = TILE / kStepTokens;
  static constexpr int kWarpsATile = kWarps * kTileRows / kRows, kPieces = S::kColumns / (8 * kWarpsATile);
  static constexpr int kQueryStride = S::kColumns + 8;
  static constexpr int kMostStages = S::kMostStages < 3 ? S::kMostStages : 3;
  static constexpr int64_t kBeginsAt = kMostStages * sizeof(Mark), kEndsAt = kBeginsAt + 4 * kRows;
  static constexpr int64_t kQueryAt = kEndsAt + 4 * kRows;
  static constexpr int64_t kStagesAt = kQueryAt + kRows * kQueryStride * 2;
  static constexpr int64_t bytes(int stages) { return kStagesAt + S::kFixedBytes + stages * S::kStageBytes; }
  static_assert(kQueryAt % 16 == 0 && kStagesAt % 16 == 0);

  PD_DEVICE Many(const Work &w, const SharedMemory &memory)
      : w_(w), p_{*(const plan::Header *)w.words, w.words}, h_(p_.header), warp_(thread_index() / kWarp),
        lane_(thread_index() % kWarp), stages_(memory, kStagesAt, w.num_stages),
        marks_(memory.part<Mark>(0, kMostStages)), begins_(memory.part<int32_t>(kBeginsAt, kRows)),
        ends_(memory.part<int32_t>(kEndsAt, kRows)), q_(memory.part<E>(kQueryAt, kRows * kQueryStride)),
        whole_q_(memory.part<Words>(kQueryAt, kRows * kQueryStride * 2 / 16)) {}

  // The span i, if it has many rows.
  PD_DEVICE void run(int i);

 private:
  PD_DEVICE void begin_rows();
  PD_DEVICE void bring(int stage, int units_end);
  PD_DEVICE Sight sight_of(int start, int row0, int row1) const;
  PD_DEVICE void run_unit(int stage);
  PD_DEVICE void add_logits(int stage, float (&s)[kQuarters][2][4]) const;
  PD_DEVICE void scale_logits(int stage, float (&s)[kQuarters][2][4]) const;
  PD_DEVICE void hide(const Mark &mark, const Sight &sight, float (&s)[kQuarters][2][4]) const;
  PD_DEVICE void weigh(float (&s)[kQuarters][2][4]);
  PD_DEVICE void pair_up(int stage, const float (&s)[kQuarters][2][4], uint32_t (&a)[kQuarters][4]) const;
  PD_DEVICE void add_values(int stage, const uint32_t (&a)[kQuarters][4]);
  PD_DEVICE void add_poison(int stage, const Mark &mark, const Sight &sight, const uint32_t (&a)[kQuarters][4]);
  PD_DEVICE void end_chunk(int chunk, bool is_last_item);

  PD_DEVICE int tile() const { return warp_ / kWarpsATile; }
  PD_DEVICE int first_column() const { return warp_ % kWarpsATile * 8 * kPieces; }
  PD_DEVICE int row_of(int half) const { return tile() * kTileRows + half * 8 + lane_ / 4; }
  PD_DEVICE int column_of(int piece) const { return first_column() + 8 * piece + 2 * (lane_ % 4); }

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
  int all_begin_, all_end_;                   // that all rows see
  float o_[kPieces][4], m_[2], l_[kQuarters][2];  // of the chunk
};

template <class S>
PD_DEVICE void Many<S>::begin_rows() {
  sync_block();  // of the span before
  for (int r = thread_index(); r < kRows; r += kThreads) {
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
PD_DEVICE void Many<S>::bring(int stage, int units_end) {
  const int start = ahead_.tile * TILE, row0 = ahead_.row0 * rows_.heads, row1 = ahead_.row1 * rows_.heads;
  Sight sight{row0, row1, 0, TILE, 0, TILE};
  const bool is_whole = ahead_.is_whole(sight, rows_.num_packed, all_begin_, all_end_);
  if (!is_whole) {
    sight = sight_of(start, row0, row1);
    // Of a tile that has other rows, too, it is to be known that their probabilities, which are 0, meet no infinity.
    if (row0 % kTileRows || (row1 % kTileRows && row1 < rows_.num_packed)) sight.all_first = TILE, sight.all_last = 0;
  }
  if (thread_index() == 0) marks_[stage] = Mark::of(start, sight, is_whole);
  ahead_.copy(w_, p_, stages_, stage, rows_.kv_head, sight.first, sight.last);
  if (ahead_.at + 1 < units_end) ahead_.read(p_, ahead_.at + 1, w_.block_shift);
  else ahead_.at = units_end;
}

template <class S>
PD_DEVICE void Many<S>::add_logits(int stage, float (&s)[kQuarters][2][4]) const {
  const int of_q = (tile() * kTileRows + lane_ % 16) * kQueryStride + lane_ / 16 * 8;
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
    if (S::kHasScales) sync_warp();  // before the next scales are loaded: registers are scarce
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
    const int row = row_of(half), begin = begins_[row], end = sight.has_row(row) ? (int)ends_[row] : 0;
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
PD_DEVICE void Many<S>::pair_up(int stage, const float (&s)[kQuarters][2][4], uint32_t (&a)[kQuarters][4]) const {
  PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) {
    if (S::kHasScales) sync_warp();
    const auto scales = stages_.scales(stage, true, quarter * kStepTokens);
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const int n = i / 2, half = i % 2;
      const float *p = &s[quarter][n][2 * half];
      a[quarter][i] = pair_of<P>(scales.times_probability(2 * n, p[0]), scales.times_probability(2 * n + 1, p[1]));
    }
  }
}

template <class S>
PD_DEVICE void Many<S>::add_values(int stage, const uint32_t (&a)[kQuarters][4]) {
  PD_UNROLL for (int j = 0; j < kPieces; j += 2)
    PD_UNROLL for (int token = 0; token < TILE; token += kLoadedTokens) {
      uint32_t b[2][4];
      stages_.load_values(stage, token, first_column() + 8 * j, b);
      PD_UNROLL for (int step = 0; step < 2; step++)
        PD_UNROLL for (int n = 0; n < 2; n++)
          multiply_add<P>(o_[j + n], a[token / kStepTokens + step], b[step][2 * n], b[step][2 * n + 1]);
    }
}

// As Few's. Seldom taken: probabilities lie where K was, and sums in memory, where loops can count them.
template <class S>
PD_DEVICE void Many<S>::add_poison(int stage, const Mark &mark, const Sight &sight,
                                   const uint32_t (&a)[kQuarters][4]) {
  if constexpr (!S::kHasScales) {
    sync_block();  // nobody needs K any more
    const bool is_mine = sight.has_tile(tile());
    if (is_mine) {
      PD_UNROLL for (int i = 0; i < 4 * kQuarters; i++)
        stages_.put_pair(stage, warp_ % kWarpsATile * kRows + row_of(i % 2),
                         i / 4 * kStepTokens + i / 2 % 2 * 8 + 2 * (lane_ % 4), a[i / 4][i % 4]);
      sync_warp();
      float sums[kPieces][4];
      PD_UNROLL for (int i = 0; i < 4 * kPieces; i++) sums[i / 4][i % 4] = o_[i / 4][i % 4];
      PD_ROLLED for (int half = 0; half < 2; half++) {
        const int row = row_of(half);
        if (!sight.has_row(row)) continue;
        const int begin = within(begins_[row] - mark.start, 0, TILE), end = within(ends_[row] - mark.start, 0, TILE);
        PD_ROLLED for (int token = begin; token < end; token++) {
          const float by = to_float(stages_.number(stage, warp_ % kWarpsATile * kRows + row, token));
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
    stages_.clear_poison(stage, sight, w_.head_dim), stages_.clear_numbers(stage, w_.head_dim);
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
  const bool is_mine = sight.has_tile(tile());
  if (!is_mine && !is_poisoned) return;
  float s[kQuarters][2][4] = {};
  uint32_t a[kQuarters][4] = {};
  if (is_mine) {
    add_logits(stage, s);
    scale_logits(stage, s);
    if (!mark.is_whole) hide(mark, sight, s);
    weigh(s);
    pair_up(stage, s, a);
  }
  if (is_poisoned) add_poison(stage, mark, sight, a);
  if (!is_mine) return;
  add_values(stage, a);
}

template <class S>
PD_DEVICE void Many<S>::end_chunk(int chunk, bool is_last_item) {
  PD_ROLLED for (int half = 0; half < 2; half++) {  // the second moves to the registers of the first
    float l = 0.0f;
    PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) {
      float sum = l_[quarter][0];
      sum = sum + shuffle_xor(sum, 1);
      sum = sum + shuffle_xor(sum, 2);
      l = quarter ? l + sum : sum;
    }
    const int packed = row_of(half);
    const bool has_ml = lane_ % 4 == 0 && first_column() == 0;
    if (packed < rows_.num_packed) {
      const auto o = [&](int piece, int i) -> float & { return o_[piece][i]; };
      const auto column = [&](int piece) { return column_of(piece); };
      end_row<E, 2, kPieces>(w_, p_, rows_, packed, half, chunk, is_last_item, has_ml, m_[0], l, o, column);
    }
    m_[0] = m_[1];
    PD_UNROLL for (int quarter = 0; quarter < kQuarters; quarter++) l_[quarter][0] = l_[quarter][1];
    PD_UNROLL for (int i = 0; i < 2 * kPieces; i++) o_[i / 2][i % 2] = o_[i / 2][2 + i % 2];
  }
}

template <class S>
PD_DEVICE void Many<S>::run(int i) {
  const int num_stages = w_.num_stages;
  rows_.open(p_, p_.template of<plan::Span>(h_.spans)[i]);
  if (rows_.num_packed <= kTileRows) return;
  const int item0 = rows_.span->item0, num_items = rows_.span->num_items;
  const auto item_of = [&](int item) -> const plan::Item & {
    return p_.template of<plan::Item>(h_.items)[item0 + item];
  };
  const int units_end = item_of(num_items - 1).unit0 + item_of(num_items - 1).num_units;
  ahead_.read(p_, item_of(0).unit0, w_.block_shift);
  begin_rows();
  await_kernels();
  stages_.clear_columns(num_stages, w_.head_dim, (const M *)w_.k_cache);
  const auto bring_next = [&](int stage) {
    if (ahead_.at < units_end) bring(stage, units_end);
    end_copy_group();
  };
  PD_ROLLED for (int stage = 0; stage + 1 < num_stages; stage++) bring_next(stage);
  load_queries<S>(w_, p_, rows_, kRows, whole_q_);
  for (int item = 0, stage = 0; item < num_items; item++) {
    PD_UNROLL for (int half = 0; half < 2; half++) m_[half] = -INFINITY;
    PD_UNROLL for (int n = 0; n < 2 * kQuarters; n++) l_[n / 2][n % 2] = 0.0f;
    PD_UNROLL for (int n = 0; n < 4 * kPieces; n++) o_[n / 4][n % 4] = 0.0f;
    for (int left = item_of(item).num_units; left > 0; left--, stage = stage + 1 == num_stages ? 0 : stage + 1) {
      if (num_stages > 1) await_all_but<(kMostStages > 2 ? kMostStages - 2 : 0)>(num_stages - 2);
      sync_block();  // what has been brought is seen, and nobody looks any more where the next will be
      bring_next(stage ? stage - 1 : num_stages - 1);
      if (num_stages == 1) {
        await_copies<0>();
        sync_block();
      }
      run_unit(stage);
    }
    rows_.open(p_, p_.template of<plan::Span>(h_.spans)[i]);  // found anew: registers are scarce
    end_chunk(item_of(item).chunk, item + 1 == num_items);
  }
}

}  // namespace
}  // namespace pagedec::attention
