// Attention over a plan's words (plan/plan.h) on a device: a block of threads is a worker, which walks its spans.
//
// Work     A unit (64 positions) at a time: the four warps have the logits of 16 positions each for all packed rows,
//          agree on each row's maximum, put the probabilities into shared memory, and have each a quarter of the head's
//          columns of the result. What brings K and V and multiplies them is T: attention_half.h, attention_bytes.h
//          (which widens bytes), attention_fp32.cu.
// Rows     lie in tiles of 16 as the tensor cores take them. A thread has of a row tile rows g and g + 8 (g = lane /
//          4): their maxima and sums, and of their results pieces, two columns that T says.
// Order    Inside a chunk of 512 positions units follow each other; a row's sum is that of lanes by a tree, then of
//          warps from the first on. Chunks are folded from left to right: those of a span here, in memory where the
//          thread that has an element put it; those of several spans by merge_kernel. Nothing depends on other rows.
#pragma once
#include "cuda/attention_work.h"
#include "cuda/kv_bytes.h"

namespace pagedec::attention {

template <class T>
class Walk {
 public:
  static constexpr int kPieces = T::kColumns / (8 * kWarps);  // tiles of 8 columns that a warp has at most
  using E = typename T::E;  // of the layer
  using M = typename T::M;  // of the cache

  PD_DEVICE Walk(const Work &w, const SharedMemory &memory)
      : w_(w), p_{*(const plan::Header *)w.words, w.words}, h_(p_.header), dim_(w.head_dim),
        warp_(thread_index() / kWarp), lane_(thread_index() % kWarp),
        tiles_(memory, num_stages(), h_),
        begins_(memory.part<int32_t>(0, ROWS_MAX)), ends_(memory.part<int32_t>(4 * ROWS_MAX, ROWS_MAX)),
        tops_(memory.part<float>(8 * ROWS_MAX, kWarps * ROWS_MAX)),
        sights_(memory.part<uint32_t>(kSightsAt, kMostStages)) {
    static_assert(T::kStages <= kMostStages);
  }

  // Spans from i on until `last`, or the next one.
  PD_DEVICE int run(int i, int) {
    run_span(p_.template of<plan::Span>(h_.spans)[i]);
    return i + 1;
  }

 private:
  PD_DEVICE void run_span(const plan::Span &span);
  PD_DEVICE void begin_rows();
  PD_DEVICE void load_queries();
  PD_DEVICE void begin_chunk();
  PD_DEVICE Sight sight_of(const plan::Unit &u) const;
  PD_DEVICE typename T::Found find(const plan::Unit &u) const;
  PD_DEVICE void bring(const typename T::Found &found, int stage) const;
  PD_DEVICE void run_unit(const plan::Unit &u, int stage);
  PD_DEVICE void scale_logits(int stage, float (&s)[kRowTiles][2][4]) const;
  PD_DEVICE void find_tops(const plan::Unit &u, const Sight &sight, float (&s)[kRowTiles][2][4]) const;
  PD_DEVICE void weigh(const plan::Unit &u, int stage, const Sight &sight, float (&s)[kRowTiles][2][4]);
  PD_DEVICE void sum_up();
  PD_DEVICE void end_chunk(int chunk, bool is_first_item, bool is_last_item);
  PD_DEVICE void end_row(int tile, int half, int chunk, bool is_first_item, bool is_last_item);
  PD_DEVICE void move_rows();
  // What is seldom needed is found anew: registers are scarce.
  PD_DEVICE const plan::Piece &piece_of_span() const { return p_.template of<plan::Piece>(h_.pieces)[span_->piece]; }
  PD_DEVICE int first_head() const {
    return kv_head_ * h_.group + h_.group * (span_->head % h_.head_parts) / h_.head_parts;
  }
  PD_DEVICE float *partial(int record, int head) const {
    return w_.partials + ((int64_t)record * h_.q_heads + head) * (dim_ + 2);
  }
  // Where this thread keeps what it has folded, neighbours side by side: its pieces, then m and l of both its rows.
  PD_DEVICE float &total(int tile, int piece, int i) const {
    const int64_t place = (((int64_t)block_index() * kRowTiles + tile) * (kPieces + 1) + piece) * 4 + i;
    return w_.totals[place * kThreads + thread_index()];
  }
  PD_DEVICE float &total_m(int tile, int half) const { return total(tile, kPieces, half); }
  PD_DEVICE float &total_l(int tile, int half) const { return total(tile, kPieces, 2 + half); }
  PD_DEVICE int num_stages() const { return T::kAnyStages ? w_.num_stages : T::kStages; }
  PD_DEVICE int row_of(int tile, int half) const { return tile * kTileRows + half * 8 + lane_ / 4; }
  PD_DEVICE int column_of(int piece) const { return T::column_of(piece, warp_) + 2 * (lane_ % 4); }

  const Work &w_;
  const Sections p_;
  const plan::Header &h_;
  const int dim_, warp_, lane_;
  const T tiles_;
  const SharedArray<int32_t> begins_, ends_;  // positions that packed rows see
  const SharedArray<float> tops_;             // what warps have found of each row
  const SharedArray<uint32_t> sights_;        // lanes that are seen of each stage's unit
  const plan::Span *span_ = nullptr;
  int kv_head_ = 0, heads_ = 1;  // of a packed row: the part that its virtual head is
  float o_[kRowTiles][kPieces][4], m_[kRowTiles][2], l_[kRowTiles][2];  // of the chunk
};

template <class T>
PD_DEVICE void Walk<T>::begin_rows() {
  const int part = span_->head % h_.head_parts;
  kv_head_ = span_->head / h_.head_parts;
  heads_ = h_.group * (part + 1) / h_.head_parts - h_.group * part / h_.head_parts;
  const plan::Piece &piece = piece_of_span();
  const plan::Row *rows = p_.template of<plan::Row>(h_.rows) + piece.row0;
  sync_block();  // of the span before
  for (int r = thread_index(); r < ROWS_MAX; r += kThreads) {
    const bool is_there = r < piece.num_rows * heads_;
    begins_[r] = is_there ? rows[r / heads_].begin : 0;
    ends_[r] = is_there ? rows[r / heads_].end : 0;
  }
  sync_block();
}

// Of rows that are not there, logits may be anything: they see no position.
template <class T>
PD_DEVICE void Walk<T>::load_queries() {
  const plan::Piece &piece = piece_of_span();
  const plan::Row *rows = p_.template of<plan::Row>(h_.rows) + piece.row0;
  const int head = first_head(), num_packed = piece.num_rows * heads_;
  PD_ROLLED for (int r = warp_; r < num_packed; r += kWarps) {
    const E *q = (const E *)w_.q + ((int64_t)rows[r / heads_].row_id * h_.q_heads + head + r % heads_) * dim_;
    for (int d = lane_; d < dim_; d += kWarp) tiles_.put_query(r, d, q[d]);
  }
}

template <class T>
PD_DEVICE void Walk<T>::begin_chunk() {
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
    PD_UNROLL for (int half = 0; half < 2; half++) m_[tile][half] = -INFINITY, l_[tile][half] = 0.0f;
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 4; i++) o_[tile][j][i] = 0.0f;
  }
}

template <class T>
PD_DEVICE Sight Walk<T>::sight_of(const plan::Unit &u) const {
  const int start = u.tile * TILE, row0 = u.row0 * heads_, row1 = u.row1 * heads_;
  int first = TILE, last = 0, all_first = 0, all_last = TILE;
  for (int r = row0 + lane_; r < row1; r += kWarp) {
    const int begin = within(begins_[r] - start, 0, TILE), end = within(ends_[r] - start, 0, TILE);
    if (begin < end) first = lower(first, begin), last = upper(last, end);
    all_first = upper(all_first, begin), all_last = lower(all_last, end);
  }
  for (int mask = kWarp / 2; mask; mask /= 2) {
    first = lower(first, shuffle_xor(first, mask)), last = upper(last, shuffle_xor(last, mask));
    all_first = upper(all_first, shuffle_xor(all_first, mask)), all_last = lower(all_last, shuffle_xor(all_last, mask));
  }
  return {row0, row1, first, last, all_first, all_last};
}

// Which rows see what of a unit, and where it lies, takes some trips to memory: before there is room for it.
template <class T>
PD_DEVICE typename T::Found Walk<T>::find(const plan::Unit &u) const {
  const Sight sight = sight_of(u);
  typename T::Found found =
      T::find(Place(u, p_.template of<int32_t>(h_.paths), w_.block_shift, sight.first, sight.last));
  found.lanes = sight.lanes();
  return found;
}

template <class T>
PD_DEVICE void Walk<T>::bring(const typename T::Found &found, int stage) const {
  if (thread_index() == 0) sights_[stage] = found.lanes;
  const auto before = [&](int slot) {  // slots before its block's head, each with its scale
    return ((int64_t)(slot >> w_.block_shift) * w_.kv_heads + kv_head_) << w_.block_shift;
  };
  const auto offset = [&](int slot) { return slot & ((1 << w_.block_shift) - 1); };
  tiles_.begin(stage, found, dim_, [&](int slot) {  // where a slot's head begins
    return (before(slot) + offset(slot)) * dim_ + (T::kHasScales ? before(slot) * kScaleBytes : 0);
  }, (const M *)w_.k_cache, (const M *)w_.v_cache);
  if constexpr (T::kHasScales)
    tiles_.begin_scales(stage, found, [&](int slot) {  // where its scale lies
      return (before(slot) + (1 << w_.block_shift)) * dim_ + (before(slot) + offset(slot)) * kScaleBytes;
    }, (const M *)w_.k_cache, (const M *)w_.v_cache);
}

// Logits in units of log 2. A soft cap is long: its code is that of a tile, to whose registers the others move.
template <class T>
PD_DEVICE void Walk<T>::scale_logits(int stage, float (&s)[kRowTiles][2][4]) const {
  const auto scales = tiles_.scales(stage, false, warp_);
  const auto each = [&](int tiles, const auto &change) {
    PD_UNROLL for (int tile = 0; tile < tiles; tile++)
      PD_UNROLL for (int i = 0; i < 4; i++)
        PD_UNROLL for (int half = 0; half < 2; half++) change(i, s[tile][i / 2][2 * half + i % 2]);
  };
  if (w_.soft_cap > 0.0f) {
    PD_ROLLED for (int n = 0; n < kRowTiles; n++) {
      each(1, [&](int i, float &x) {
        x = w_.soft_cap * hyperbolic_tangent(scales.times(i, x) * w_.inner_scale);
      });
      PD_UNROLL for (int i = 0; i < 8; i++) {
        const float first = s[0][i / 4][i % 4];
        PD_UNROLL for (int tile = 1; tile < kRowTiles; tile++) s[tile - 1][i / 4][i % 4] = s[tile][i / 4][i % 4];
        s[kRowTiles - 1][i / 4][i % 4] = first;
      }
    }
  } else {
    each(kRowTiles, [&](int i, float &x) { x = scales.times(i, x) * w_.scale; });
  }
}

// What rows do not see becomes -inf; each warp's largest of a row into `tops_`.
template <class T>
PD_DEVICE void Walk<T>::find_tops(const plan::Unit &u, const Sight &sight, float (&s)[kRowTiles][2][4]) const {
  const int start = u.tile * TILE + warp_ * kWarpTokens + 2 * (lane_ % 4);
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
    if (!sight.has_tile(tile)) continue;
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int row = row_of(tile, half);
      const int begin = begins_[row], end = sight.has_row(row) ? (int)ends_[row] : 0;
      float top = -INFINITY;
      PD_UNROLL for (int i = 0; i < 4; i++) {
        const int at = start + 8 * (i / 2) + i % 2;
        float &x = s[tile][i / 2][2 * half + i % 2];
        if (at < begin || at >= end) x = -INFINITY;
        top = fmaxf(top, x);
      }
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      if (lane_ % 4 == 0) tops_[warp_ * ROWS_MAX + row] = top;
    }
  }
}

// Logits to probabilities, which go to shared memory; results and sums so far come down to the new maximum.
template <class T>
PD_DEVICE void Walk<T>::weigh(const plan::Unit &u, int stage, const Sight &sight, float (&s)[kRowTiles][2][4]) {
  const auto scales = tiles_.scales(stage, true, warp_);
  const int column = warp_ * kWarpTokens + 2 * (lane_ % 4), start = u.tile * TILE + column;
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++) {
    if (!sight.has_tile(tile)) continue;
    PD_UNROLL for (int half = 0; half < 2; half++) {
      const int row = row_of(tile, half);
      [[maybe_unused]] const int begin = begins_[row], end = sight.has_row(row) ? (int)ends_[row] : 0;
      const float before = m_[tile][half];
      float top = before;
      for (int w = 0; w < kWarps; w++) top = fmaxf(top, tops_[w * ROWS_MAX + row]);
      const float by = top == before ? 1.0f : power_of_two(before - top), shift = top == -INFINITY ? 0.0f : top;
      m_[tile][half] = top;
      float sum = l_[tile][half] * by;
      PD_UNROLL for (int j = 0; j < kPieces; j++)
        PD_UNROLL for (int i = 0; i < 2; i++) o_[tile][j][2 * half + i] = o_[tile][j][2 * half + i] * by;
      PD_UNROLL for (int n = 0; n < 2; n++) {
        const float p0 = power_of_two(s[tile][n][2 * half] - shift), p1 = power_of_two(s[tile][n][2 * half + 1] - shift);
        sum = sum + (p0 + p1);
        const int at = start + 8 * n;
        tiles_.put_probabilities(row, column + 8 * n, scales.times_seen(2 * n, p0, at >= begin && at < end),
                                 scales.times_seen(2 * n + 1, p1, at + 1 >= begin && at + 1 < end));
      }
      l_[tile][half] = sum;
    }
  }
}

template <class T>
PD_DEVICE void Walk<T>::run_unit(const plan::Unit &u, int stage) {
  const Sight sight = Sight::of(u.row0 * heads_, u.row1 * heads_, sights_[stage]);
  float s[kRowTiles][2][4];
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
    PD_UNROLL for (int i = 0; i < 8; i++) s[tile][i / 4][i % 4] = 0.0f;
  tiles_.add_logits(stage, sight, dim_, warp_, s);
  scale_logits(stage, s);
  find_tops(u, sight, s);
  // What a row does not see may be anything, and 0 times infinity is NaN.
  const bool is_poisoned = sight.is_ragged() && any_of_block(tiles_.has_poison(stage, sight, dim_));
  sync_block();
  weigh(u, stage, sight, s);
  sync_block();
  const int start = u.tile * TILE;
  tiles_.add_values(stage, sight, dim_, warp_, is_poisoned, o_, [&](int row) {
    struct Lanes { int first, last; };
    return Lanes{within(begins_[row] - start, 0, TILE), within(ends_[row] - start, 0, TILE)};
  });
}

// Each row's sum, to all threads that have something of the row.
template <class T>
PD_DEVICE void Walk<T>::sum_up() {
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
    PD_UNROLL for (int half = 0; half < 2; half++) {
      float sum = l_[tile][half];
      sum = sum + shuffle_xor(sum, 1);
      sum = sum + shuffle_xor(sum, 2);
      if (lane_ % 4 == 0) tops_[warp_ * ROWS_MAX + row_of(tile, half)] = sum;
    }
  sync_block();
  PD_UNROLL for (int tile = 0; tile < kRowTiles; tile++)
    PD_UNROLL for (int half = 0; half < 2; half++) {
      float sum = tops_[row_of(tile, half)];
      for (int w = 1; w < kWarps; w++) sum = sum + tops_[w * ROWS_MAX + row_of(tile, half)];
      l_[tile][half] = sum;
    }
}

// Of the first row that is in this thread's registers: `half` of `tile`.
template <class T>
PD_DEVICE void Walk<T>::end_row(int tile, int half, int chunk, bool is_first_item, bool is_last_item) {
  const int packed = row_of(tile, half);
  const plan::Piece &piece = piece_of_span();
  if (packed >= piece.num_rows * heads_) return;
  const plan::Row &row = p_.template of<plan::Row>(h_.rows)[piece.row0 + packed / heads_];
  const int first = row.begin / CHUNK, last = (row.end - 1) / CHUNK, head = first_head() + packed % heads_;
  if (chunk < first || chunk > last) return;
  const bool is_first_span = span_->item0 == piece.item0, is_fresh = !is_first_span || chunk == first;
  float m = m_[0][0], l = l_[0][0];
  if (!is_fresh && l == 0.0f) {  // nothing of this chunk: what was before is all
    m = total_m(tile, half), l = total_l(tile, half);
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) o_[0][j][i] = total(tile, j, 2 * half + i);
  } else if (!is_fresh) {
    const Fold fold(total_m(tile, half), m);
    m = fold.top, l = fold.of(total_l(tile, half), l);
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) {
        float &x = o_[0][j][i];
        x = fold.of(total(tile, j, 2 * half + i), x);
      }
  }
  total_m(tile, half) = m, total_l(tile, half) = l;
  const bool is_over = is_first_span && chunk == last;
  float *record = is_over || row.split < 0 || (is_first_span && !is_last_item)
                      ? nullptr
                      : partial(row.split + chunk - row.merge_chunk, head);
  E *out = (E *)w_.out + ((int64_t)row.row_id * h_.q_heads + head) * dim_;
  const float by = weight_of(l);
  PD_UNROLL for (int j = 0; j < kPieces; j++) {
    const int column = column_of(j);
    if (column >= dim_) continue;
    PD_UNROLL for (int i = 0; i < 2; i++) {
      const float x = o_[0][j][i];
      if (is_over) out[column + i] = from_float<E>(x * by);
      else if (record) record[column + i] = x;
      else total(tile, j, 2 * half + i) = x;
    }
  }
  if (record && warp_ == 0 && lane_ % 4 == 0) record[dim_] = m, record[dim_ + 1] = l;
}

template <class T>
PD_DEVICE void Walk<T>::end_chunk(int chunk, bool is_first_item, bool is_last_item) {
  sum_up();
  // Registers have no index, so rows move up to where the first one was: one body for all.
  PD_ROLLED for (int i = 0; i < 2 * kRowTiles; i++) {
    end_row(i / 2, i % 2, chunk, is_first_item, is_last_item);
    move_rows();
  }
}
template <class T>
PD_DEVICE void Walk<T>::move_rows() {
  PD_UNROLL for (int from = 1; from < 2 * kRowTiles; from++) {
    const int to = from - 1;
    m_[to / 2][to % 2] = m_[from / 2][from % 2], l_[to / 2][to % 2] = l_[from / 2][from % 2];
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) o_[to / 2][j][to % 2 * 2 + i] = o_[from / 2][j][from % 2 * 2 + i];
  }
}

template <class T>
PD_DEVICE void Walk<T>::run_span(const plan::Span &span) {
  span_ = &span;
  begin_rows();
  const plan::Item *items = p_.template of<plan::Item>(h_.items) + span.item0;
  const plan::Unit *units = p_.template of<plan::Unit>(h_.units) + items[0].unit0;
  const plan::Item &end = items[span.num_items - 1];
  const int num_units = end.unit0 + end.num_units - items[0].unit0;
  for (int i = 0; i < num_stages() - 1; i++) {
    if (i < num_units) bring(find(units[i]), i);
    T::end_bringing();
  }
  load_queries();
  for (int i = 0, stage = 0, item = 0; i < num_units; i++, stage = stage + 1 == num_stages() ? 0 : stage + 1) {
    if (i == items[item].unit0 - items[0].unit0) begin_chunk();
    const int next = i + num_stages() - 1;
    const bool has_next = next < num_units;
    typename T::Found found{};
    if (has_next) found = find(units[next]);
    if (num_stages() > 1) T::await(num_stages());
    sync_block();  // what has been brought is seen, and nobody looks any more where the next will be
    if (has_next) bring(found, stage ? stage - 1 : num_stages() - 1);
    T::end_bringing();
    if (num_stages() == 1) {
      T::await(1);
      sync_block();
    }
    run_unit(units[i], stage);
    if (i + 1 < items[item].unit0 + items[item].num_units - items[0].unit0) continue;
    end_chunk(items[item].chunk, item == 0, item + 1 == span.num_items);
    item++;
  }
}

}  // namespace pagedec::attention
