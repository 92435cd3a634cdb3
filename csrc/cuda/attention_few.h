// Attention of few packed rows: at most as many as one tile of the tensor cores has, as where tokens are decoded.
//
// Work     The four warps have the logits of 16 positions of a unit each, agree on each row's maximum, put the
//          probabilities into shared memory, and have each a quarter of the head's columns of the result. Queries stay
//          in registers. Two barriers a unit: behind the first, nobody looks any more where the unit before was, and
//          another begins to come; behind the second, the next unit is there.
// Ahead    Units come in a row, whatever spans they are of: while one is computed, the next ones are under way, and the
//          record of the one behind them is read.
// Order    As in attention_work.h.
#pragma once
#include "cuda/attention_units.h"

namespace pagedec::attention {
namespace {

// What the warps have found of a row.
struct alignas(16) OfWarps { float of[kWarps]; };

template <class S>
class Few {
 public:
  using E = typename S::E;
  using M = typename S::M;
  using P = typename S::P;
  static constexpr int kPieces = S::kColumns / (8 * kWarps), kSteps = S::kColumns / 16;
  static constexpr int kKept = kSteps <= 8 ? kSteps : 1;  // the largest heads lack the registers
  static constexpr int kQueryStride = S::kColumns + 8, kProbabilityStride = TILE + 8;
  static constexpr int kMostStages = S::kMostStages;
  static constexpr int64_t kTopsAt = kMostStages * sizeof(Mark), kSumsAt = kTopsAt + kTileRows * sizeof(OfWarps);
  static constexpr int64_t kQueryAt = kSumsAt + kTileRows * sizeof(OfWarps);
  static constexpr int64_t kProbabilityAt = kQueryAt + kTileRows * kQueryStride * 2;
  static constexpr int64_t kStagesAt = kProbabilityAt + kTileRows * kProbabilityStride * 2;
  static constexpr int64_t bytes(int stages) { return kStagesAt + S::kFixedBytes + stages * S::kStageBytes; }

  PD_DEVICE Few(const Work &w, const SharedMemory &memory)
      : w_(w), p_{*(const plan::Header *)w.words, w.words}, h_(p_.header), warp_(thread_index() / kWarp),
        lane_(thread_index() % kWarp), stages_(memory, kStagesAt, w.few_stages),
        marks_(memory.part<Mark>(0, kMostStages)),
        tops_(memory.part<float>(kTopsAt, kTileRows * kWarps)), sums_(memory.part<float>(kSumsAt, kTileRows * kWarps)),
        all_tops_(memory.part<OfWarps>(kTopsAt, kTileRows)), all_sums_(memory.part<OfWarps>(kSumsAt, kTileRows)),
        q_(memory.part<E>(kQueryAt, kTileRows * kQueryStride)),
        whole_q_(memory.part<Words>(kQueryAt, kTileRows * kQueryStride * 2 / 16)),
        p_of_(memory.part<uint32_t>(kProbabilityAt, kTileRows * kProbabilityStride / 2)) {}

  // Of spans i .. last - 1 those that have few rows; whether others have more.
  PD_DEVICE bool run(int i, int last);

 private:
  struct Side {  // what a span is to those who bring its units, and to those who compute them
    PackedRows rows;
    int begin, end;          // positions that the packed row `lane` sees
    int all_begin, all_end;  // that all rows see
  };
  PD_DEVICE bool open(Side &side, int i) const;
  PD_DEVICE void look_ahead();
  PD_DEVICE void bring(int stage);
  PD_DEVICE void run_span(int &stage);
  PD_DEVICE void run_unit(int stage, bool is_last);
  PD_DEVICE void add_logits(int stage, float (&s)[2][4]) const;
  PD_DEVICE void scale_logits(int stage, float (&s)[2][4]) const;
  PD_DEVICE void find_tops(const Mark &mark, const Sight &sight, float (&s)[2][4]) const;
  PD_DEVICE void weigh(int stage, float (&s)[2][4]);
  PD_DEVICE void add_values(int stage, float (&o)[kPieces][4]) const;
  PD_DEVICE void add_poison(int stage, const Sight &sight, int start);
  PD_DEVICE void sum_up();
  PD_DEVICE void end_chunk(int chunk, bool is_last_item);

  PD_DEVICE void load_fragment(int step, uint32_t (&a)[4]) const {
    load_matrices(a, q_.at(lane_ % 16 * kQueryStride + lane_ / 16 * 8 + 16 * step));
  }
  // Of the largest heads, on a device with less shared memory.
  static constexpr bool kMayHaveOne = 2 * S::kStageBytes > (96 << 10);
  PD_DEVICE int column_of(int piece) const { return S::kColumns / kWarps * warp_ + 8 * piece + 2 * (lane_ % 4); }

  const Work &w_;
  const Sections p_;
  const plan::Header &h_;
  const int warp_, lane_;
  const S stages_;
  const SharedArray<Mark> marks_;
  const SharedArray<float> tops_, sums_;  // by row, then by warp
  const SharedArray<OfWarps> all_tops_, all_sums_;
  const SharedArray<E> q_;
  const SharedArray<Words> whole_q_;
  const SharedArray<uint32_t> p_of_;      // probabilities, pairs
  Side brought_, now_;
  UnitAhead<S> ahead_;
  bool has_ahead_, has_many_ = false;
  int unit_, units_end_;  // that are left of the span that is brought
  int brought_span_, last_span_;
  uint32_t fragments_[kKept][4];          // of queries
  float o_[kPieces][4], m_[2], l_[2];     // of the chunk
};

template <class S>
PD_DEVICE bool Few<S>::open(Side &side, int i) const {
  PackedRows &rows = side.rows;
  rows.open(p_, p_.template of<plan::Span>(h_.spans)[i]);
  if (rows.num_packed > kTileRows) return false;
  side.begin = 0, side.end = 0, side.all_begin = 0, side.all_end = 1 << 30;
  if (lane_ < rows.num_packed) {
    const plan::Row &row = rows.row(p_, lane_);
    side.begin = side.all_begin = row.begin, side.end = side.all_end = row.end;
  }
  for (int mask = kWarp / 2; mask; mask /= 2) {
    side.all_begin = upper(side.all_begin, shuffle_xor(side.all_begin, mask));
    side.all_end = lower(side.all_end, shuffle_xor(side.all_end, mask));
  }
  return true;
}

template <class S>
PD_DEVICE void Few<S>::look_ahead() {
  if (unit_ == units_end_) {
    while (++brought_span_ < last_span_ && !open(brought_, brought_span_)) has_many_ = true;
    has_ahead_ = brought_span_ < last_span_;
    if (!has_ahead_) return;
    const plan::Span &span = *brought_.rows.span;
    const plan::Item *items = p_.template of<plan::Item>(h_.items) + span.item0;
    const plan::Item &end = items[span.num_items - 1];
    unit_ = items[0].unit0, units_end_ = end.unit0 + end.num_units;
  }
  ahead_.read(p_, unit_++, w_.block_shift);
}

template <class S>
PD_DEVICE void Few<S>::bring(int stage) {
  if (has_ahead_) {
    const int start = ahead_.tile * TILE, heads = brought_.rows.heads;
    Sight sight{ahead_.row0 * heads, ahead_.row1 * heads, 0, TILE, 0, TILE};
    const bool is_whole = ahead_.is_whole(sight, brought_.rows.num_packed, brought_.all_begin, brought_.all_end);
    if (!is_whole) {
      sight.first = TILE, sight.last = 0;
      if (sight.has_row(lane_)) sight.meet(brought_.begin - start, brought_.end - start);
      sight.meet_lanes();
    }
    if (thread_index() == 0) marks_[stage] = Mark::of(start, sight, is_whole);
    ahead_.copy(w_, p_, stages_, stage, brought_.rows.kv_head, sight.first, sight.last);
    look_ahead();
  }
  end_copy_group();
}

template <class S>
PD_DEVICE void Few<S>::add_logits(int stage, float (&s)[2][4]) const {
  PD_UNROLL for (int column = 0; column < S::kColumns; column += kLoadedColumns) {
    uint32_t b[2][4];
    stages_.load_keys(stage, warp_ * kWarpTokens, column, b);
    PD_UNROLL for (int step = 0; step < 2; step++) {
      uint32_t a[4];
      if constexpr (kKept < kSteps) load_fragment(column / 16 + step, a);
      else PD_UNROLL for (int i = 0; i < 4; i++) a[i] = fragments_[column / 16 + step][i];
      PD_UNROLL for (int n = 0; n < 2; n++) multiply_add<E>(s[n], a, b[step][2 * n], b[step][2 * n + 1]);
    }
  }
}

// Logits in units of log 2.
template <class S>
PD_DEVICE void Few<S>::scale_logits(int stage, float (&s)[2][4]) const {
  const auto scales = stages_.scales(stage, false, warp_ * kWarpTokens);
  const bool has_cap = w_.soft_cap > 0.0f;
  PD_UNROLL for (int i = 0; i < 8; i++) {
    float &x = s[i / 4][i % 4];
    x = scales.times(i / 4 * 2 + i % 2, x) * (has_cap ? w_.inner_scale : w_.scale);
  }
  if (has_cap) {
    PD_ROLLED for (int n = 0; n < 8; n++) {  // its code is long: of one value, to whose register the others move
      const float x = w_.soft_cap * hyperbolic_tangent(s[0][0]);
      PD_UNROLL for (int i = 1; i < 8; i++) s[(i - 1) / 4][(i - 1) % 4] = s[i / 4][i % 4];
      s[1][3] = x;
    }
  }
}

// What rows do not see becomes -inf; each warp's largest of a row into `tops_`.
template <class S>
PD_DEVICE void Few<S>::find_tops(const Mark &mark, const Sight &sight, float (&s)[2][4]) const {
  if (!mark.is_whole) {
    const int first = mark.start + warp_ * kWarpTokens + 2 * (lane_ % 4);
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int row = lane_ / 4 + 8 * half;
      const int begin = shuffle(now_.begin, row), of_row = shuffle(now_.end, row);
      const int end = sight.has_row(row) ? of_row : 0;
      PD_UNROLL for (int i = 0; i < 4; i++) {
        const int at = first + 8 * (i / 2) + i % 2;
        if (at < begin || at >= end) s[i / 2][2 * half + i % 2] = -INFINITY;
      }
    }
  }
  PD_UNROLL for (int half = 0; half < 2; half++) {
    float top = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    if (lane_ % 4 == 0) tops_[(lane_ / 4 + 8 * half) * kWarps + warp_] = top;
  }
}

// Logits to probabilities, which go to shared memory; results and sums so far come down to the new maximum.
template <class S>
PD_DEVICE void Few<S>::weigh(int stage, float (&s)[2][4]) {
  const auto scales = stages_.scales(stage, true, warp_ * kWarpTokens);
  const int column = warp_ * kWarpTokens + 2 * (lane_ % 4);
  PD_UNROLL for (int half = 0; half < 2; half++) {
    const int row = lane_ / 4 + 8 * half;
    const OfWarps tops = all_tops_[row];
    const float before = m_[half];
    const float top = fmaxf(before, fmaxf(fmaxf(tops.of[0], tops.of[1]), fmaxf(tops.of[2], tops.of[3])));
    const float by = top == before ? 1.0f : power_of_two(before - top), shift = top == -INFINITY ? 0.0f : top;
    m_[half] = top;
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) o_[j][2 * half + i] = o_[j][2 * half + i] * by;
    float p[4], sum = l_[half] * by;
    PD_UNROLL for (int i = 0; i < 4; i++) p[i] = power_of_two(s[i / 2][2 * half + i % 2] - shift);
    PD_UNROLL for (int n = 0; n < 2; n++) sum = sum + (p[2 * n] + p[2 * n + 1]);
    l_[half] = sum;
    PD_UNROLL for (int i = 0; i < 4; i++) p[i] = scales.times_probability(i, p[i]);
    PD_UNROLL for (int n = 0; n < 2; n++)
      p_of_[(row * kProbabilityStride + column + 8 * n) / 2] = pair_of<P>(p[2 * n], p[2 * n + 1]);
  }
}

template <class S>
PD_DEVICE void Few<S>::add_values(int stage, float (&o)[kPieces][4]) const {
  const int of_p = lane_ % 16 * kProbabilityStride + lane_ / 16 * 8;
  PD_UNROLL for (int token = 0; token < TILE; token += kLoadedTokens) {
    uint32_t a[2][4];
    PD_UNROLL for (int step = 0; step < 2; step++)
      load_matrices(a[step], p_of_.at((of_p + token + kStepTokens * step) / 2));
    PD_UNROLL for (int j = 0; j < kPieces; j += 2) {
      uint32_t b[2][4];
      stages_.load_values(stage, token, S::kColumns / kWarps * warp_ + 8 * j, b);
      PD_UNROLL for (int step = 0; step < 2; step++)
        PD_UNROLL for (int n = 0; n < 2; n++)
          multiply_add<P>(o[j + n], a[step], b[step][2 * n], b[step][2 * n + 1]);
    }
  }
}

// Where V is poisoned, rows first meet what of it they see, which makes them infinite or NaN whatever comes then, and
// it leaves: what a row does not see changes none of its bits.
template <class S>
PD_DEVICE void Few<S>::add_poison(int stage, const Sight &sight, int start) {
  if constexpr (!S::kHasScales) {
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int row = lane_ / 4 + 8 * half;
      const int begin = within(shuffle(now_.begin, row) - start, 0, TILE);
      const int end = within(shuffle(now_.end, row) - start, 0, TILE);
      PD_ROLLED for (int token = begin; token < (sight.has_row(row) ? end : 0); token++) {
        const uint32_t pair = p_of_[(row * kProbabilityStride + token) / 2];
        const float by = to_float(E{(uint16_t)(pair >> 16 * (token % 2))});
        PD_UNROLL for (int j = 0; j < kPieces; j++)
          PD_UNROLL for (int i = 0; i < 2; i++) {
            if (column_of(j) >= w_.head_dim) continue;
            const E x = stages_.value(stage, token, column_of(j) + i);
            if (!S::is_finite(x)) o_[j][2 * half + i] += by * to_float(x);
          }
      }
    }
    sync_block();
    stages_.clear_poison(stage, sight, w_.head_dim);
    sync_block();
  }
}

template <class S>
PD_DEVICE void Few<S>::run_unit(int stage, bool is_last) {
  const int num_stages = w_.few_stages;
  if (kMayHaveOne && num_stages == 1) {
    sync_block();
    bring(0);
    await_copies<0>();
    sync_block();
  }
  const Mark mark = marks_[stage];
  const Sight sight = mark.sight();
  float s[2][4] = {};
  add_logits(stage, s);
  scale_logits(stage, s);
  find_tops(mark, sight, s);
  // What a row does not see may be anything, and 0 times infinity is NaN.
  const bool is_poisoned =
      !S::kHasScales && sight.is_ragged() && any_of_block(stages_.has_poison(stage, sight, w_.head_dim));
  sync_block();
  if (!kMayHaveOne || num_stages > 1) bring(stage ? stage - 1 : num_stages - 1);
  weigh(stage, s);
  if (is_last) sum_up();
  if (!kMayHaveOne || num_stages > 1) await_all_but<kMostStages - 2>(num_stages - 2);
  sync_block();
  if (mark.is_whole) {
    add_values(stage, o_);
    return;
  }
  if (is_poisoned) add_poison(stage, sight, mark.start);
  float o[kPieces][4];
  PD_UNROLL for (int i = 0; i < 4 * kPieces; i++) o[i / 4][i % 4] = o_[i / 4][i % 4];
  add_values(stage, o);
  PD_UNROLL for (int half = 0; half < 2; half++)  // other rows' probabilities are 0, which times infinity is NaN
    if (sight.has_row(lane_ / 4 + 8 * half))
      PD_UNROLL for (int j = 0; j < kPieces; j++)
        PD_UNROLL for (int i = 0; i < 2; i++) o_[j][2 * half + i] = o[j][2 * half + i];
}

// Of the chunk, behind its last probabilities.
template <class S>
PD_DEVICE void Few<S>::sum_up() {
  PD_UNROLL for (int half = 0; half < 2; half++) {
    float sum = l_[half];
    sum = sum + shuffle_xor(sum, 1);
    sum = sum + shuffle_xor(sum, 2);
    if (lane_ % 4 == 0) sums_[(lane_ / 4 + 8 * half) * kWarps + warp_] = sum;
  }
}

template <class S>
PD_DEVICE void Few<S>::end_chunk(int chunk, bool is_last_item) {
  PD_ROLLED for (int half = 0; half < 2; half++) {  // the second moves to the registers of the first
    const int packed = lane_ / 4 + 8 * half;
    if (8 * half >= now_.rows.num_packed) break;
    if (packed < now_.rows.num_packed) {
      const OfWarps sums = all_sums_[packed];
      const float l = ((sums.of[0] + sums.of[1]) + sums.of[2]) + sums.of[3];
      const auto o = [&](int piece, int i) -> float & { return o_[piece][i]; };
      const auto column = [&](int piece) { return column_of(piece); };
      const bool has_ml = warp_ == 0 && lane_ % 4 == 0;
      end_row<E, 2, kPieces>(w_, p_, now_.rows, packed, half, chunk, is_last_item, has_ml, m_[0], l, o, column);
    }
    m_[0] = m_[1];
    PD_UNROLL for (int i = 0; i < 2 * kPieces; i++) o_[i / 2][i % 2] = o_[i / 2][2 + i % 2];
  }
}

template <class S>
PD_DEVICE void Few<S>::run_span(int &stage) {
  load_queries<S>(w_, p_, now_.rows, kTileRows, whole_q_);
  sync_block();
  if constexpr (kKept == kSteps)
    PD_UNROLL for (int step = 0; step < kSteps; step++) load_fragment(step, fragments_[step]);
  const plan::Span &span = *now_.rows.span;
  const plan::Item *items = p_.template of<plan::Item>(h_.items) + span.item0;
  for (int item = 0; item < span.num_items; item++) {
    PD_UNROLL for (int half = 0; half < 2; half++) m_[half] = -INFINITY, l_[half] = 0.0f;
    PD_UNROLL for (int n = 0; n < 4 * kPieces; n++) o_[n / 4][n % 4] = 0.0f;
    const int num_units = items[item].num_units;
    for (int u = 0; u < num_units; u++) {
      run_unit(stage, u + 1 == num_units);
      stage = stage + 1 == w_.few_stages ? 0 : stage + 1;
    }
    end_chunk(items[item].chunk, item + 1 == span.num_items);
  }
}

template <class S>
PD_DEVICE bool Few<S>::run(int i, int last) {
  unit_ = units_end_ = 0, brought_span_ = i - 1, last_span_ = last;
  look_ahead();
  if (!has_ahead_) return has_many_;
  sync_block();  // of what had the memory before
  await_kernels();
  stages_.clear_columns(w_.few_stages, w_.head_dim, (const M *)w_.k_cache);
  PD_ROLLED for (int s = 0; s + 1 < w_.few_stages; s++) bring(s);
  if (w_.few_stages > 1) await_all_but<kMostStages - 2>(w_.few_stages - 2);
  for (int stage = 0; i < last; i++)
    if (open(now_, i)) run_span(stage);
  return has_many_;
}

}  // namespace
}  // namespace pagedec::attention
