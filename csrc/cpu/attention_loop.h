// A thread's walk over its spans of a plan: rows in, tiles, ends of chunks, rows out. See plan/plan.h for the words.
#pragma once
#include <utility>

#include "cpu/attention_blocks.h"

namespace pagedec {

constexpr int BYTES_TOGETHER = 96 << 10;  // of K and V, at most, that heads of a unit have in L2 together

template <class T>
AttentionLoop<T>::AttentionLoop(const pd_attention_args &a, char *workspace, int thread, int num_threads)
    : a_(a), p_(*a.plan), h_(p_.header), d_(h_.head_dim), block_(h_.block_size), size_(std::min(block_, TILE)),
      shift_(__builtin_ctz(size_)), words_((d_ + SCALES<T>) * block_), thread_(thread), num_threads_(num_threads),
      k_((const C *)a.k_cache), v_((const C *)a.v_cache), s_((State *)workspace + thread),
      partials_((float *)((State *)workspace + num_threads)) {
  float scale, soft_cap;
  memcpy(&scale, &h_.scale_bits, 4), memcpy(&soft_cap, &h_.soft_cap_bits, 4);
  tile_.head_dim = d_, tile_.block_size = size_;
  tile_.soft_cap = soft_cap > 0 ? soft_cap * LOG2E : 0.f;
  tile_.inner_scale = soft_cap > 0 ? scale / soft_cap : 0.f;
  tile_.scale = soft_cap > 0 ? 1.f : scale * LOG2E;
  const int tile_bytes = 2 * TILE * d_ * (int)sizeof(C);
  most_together_ = on_unit() || h_.head_parts > 1 ? 1 : std::clamp(BYTES_TOGETHER / tile_bytes, 1, h_.kv_heads);
}

// How many spans from `at` on are taken together, unit by unit: of one piece and the same items, each of the head
// behind the one before. A block holds its heads one behind the other, and memory is read faster along them than 2 KB
// here and there. Trees are not: what is gathered is a head's.
template <class T>
int AttentionLoop<T>::together(int at) const {
  const plan::Span &first = p_.spans[at];
  const plan::Item *const items = p_.items + first.item0;
  const plan::Unit *const end = p_.units + items[first.num_items - 1].unit0 + items[first.num_items - 1].num_units;
  const int most = std::min({most_together_, ROWS_MAX / (p_.pieces[first.piece].num_rows * h_.group), last_span_ - at});
  if (most < 2 || std::any_of(p_.units + items->unit0, end, [](const plan::Unit &u) { return u.path >= 0; })) return 1;
  int n = 1;
  while (n < most && p_.spans[at + n].piece == first.piece && p_.spans[at + n].item0 == first.item0 &&
         p_.spans[at + n].head == first.head + n)
    n++;
  return n;
}

// What to prefetch beside a unit of a head: of a unit to come as much, in the order in which its heads lie in memory,
// and early enough for the first of them, across spans; it rests on the last unit.
template <class T>
void AttentionLoop<T>::look_ahead() {
  const plan::Unit &unit = p_.units[ahead_.unit];
  Blocks<C> blocks;
  for (int c = 0; c * size_ < TILE; c++) {
    place(unit, ahead_.block, ahead_.first_head + ahead_.head, blocks, c);
    if (++ahead_.head == ahead_.heads) ahead_.head = 0, ahead_.block++;
  }
  if constexpr (SCALED<T>)
    next_ = blocks;
  else
    vectors(blocks, tile_.next_k, tile_.next_v);
  if (ahead_.block * size_ < TILE) return;
  ahead_.block = 0;
  if (ahead_.unit + 1 < ahead_.unit_end)
    ahead_.unit++;
  else if (ahead_.span + ahead_.heads < last_span_)
    begin_ahead(ahead_.span + ahead_.heads);
}

template <class T>
void AttentionLoop<T>::begin_ahead(int span) {
  const plan::Span &first = p_.spans[span];
  const plan::Item *const items = p_.items + first.item0, &last = items[first.num_items - 1];
  ahead_ = {span, together(span), first.head / h_.head_parts, items->unit0, last.unit0 + last.num_units, 0, 0};
}

template <class T>
void AttentionLoop<T>::choose(const plan::Span &span) {
  const int part = span.head % h_.head_parts, from = h_.group * part / h_.head_parts;
  kv_head_ = span.head / h_.head_parts;
  head_ = kv_head_ * h_.group + from;
  heads_ = h_.group * (part + 1) / h_.head_parts - from;
  row0_ = 0;
}

// From here on it is about the next of the spans that are taken together, whose groups are whole.
template <class T>
void AttentionLoop<T>::choose_next(const plan::Piece &piece) {
  kv_head_++, head_ += heads_, row0_ += piece.num_rows * heads_;
}

template <class T>
void AttentionLoop<T>::load_rows(const plan::Piece &piece) {
  for (int r = 0; r < piece.num_rows; r++) {
    const E *q = (const E *)a_.q + ((int64_t)p_.rows[piece.row0 + r].row_id * h_.q_heads + head_) * d_;
    for (int g = 0; g < heads_; g++) {
      const int at = row0_ + r * heads_ + g;
      typename T::Q *to = s_->q + at * ROW;
      s_->begin[at] = p_.rows[piece.row0 + r].begin, s_->end[at] = p_.rows[piece.row0 + r].end;
      for (int i = 0; i < d_; i++) to[i] = T::query(q[g * d_ + i]);
    }
  }
}

// Lanes that packed rows from .. from+n-1 see. False: none of them sees any.
template <class T>
bool AttentionLoop<T>::set_masks(int from, int n, int start, bool &masked) {
  int begin = 0, end = start + TILE;
  for (int r = from; r < from + n; r++) begin = std::max(begin, s_->begin[r]), end = std::min(end, s_->end[r]);
  masked = begin > start || end < start + TILE;
  if (!masked) return true;
  bool any = false;
  for (int r = 0; r < n; r++) {
    s_->lo[r] = std::clamp(s_->begin[from + r] - start, 0, TILE),
    s_->hi[r] = std::clamp(s_->end[from + r] - start, 0, TILE);
    any |= s_->lo[r] < s_->hi[r];
  }
  return any;
}

template <class T, int... R>
PD_INLINE void attend_rows(std::integer_sequence<int, R...>, int rows, bool masked, const TileArgs<T> &a) {
  typedef void (*Kernel)(const TileArgs<T> &);
  constexpr bool AHEAD = sizeof(typename T::M) == sizeof(typename T::C);  // else widen() has fetched what is to come
  static constexpr Kernel kernels[][3] = {
      {attend<T, R + 1, false, false>, attend<T, R + 1, false, AHEAD>, attend<T, R + 1, true, AHEAD>}...};
  kernels[rows - 1][masked ? 2 : a.ahead](a);
}

template <class T>
void AttentionLoop<T>::run_unit(const plan::Unit &u, const plan::Piece &piece, int side) {
  const int start = u.tile * TILE, row0 = row0_ + u.row0 * heads_, n = (u.row1 - u.row0) * heads_;
  const bool gathered = u.path >= 0;
  if constexpr (MatrixUnit<T>::EXIST) {
    if (gathered && !SCALED<T>) finish_pass();  // its V may lie in what is gathered
    turn_ = pending_ ? 1 - pending_->turn : 0;
  }
  Blocks<C> stored = locate(u, kv_head_);
  if (gathered) gather(u, p_.rows[piece.row0 + u.row0], kv_head_, stored);
  if constexpr (SCALED<T>) {
    read_scales(stored);
    if constexpr (InRegisters<T, PD_KV_INT8>::EXIST)
      if (n <= ROWS_TILE && h_.kv_kind == PD_KV_INT8) return run_few<PD_KV_INT8>(stored, row0, n, start, side);
    if constexpr (InRegisters<T, PD_KV_FP8>::EXIST)
      if (n <= ROWS_TILE && h_.kv_kind == PD_KV_FP8) return run_few<PD_KV_FP8>(stored, row0, n, start, side);
  }
  const Blocks<E> blocks = widen(stored);
  vectors(blocks, tile_.k, tile_.v);
  tile_.k_stride = k_stride(blocks);
  if (size_ < vec::W) {
    join_k(blocks, tile_.k);
    std::copy_n(tile_.k, NT, tile_.next_k);
  }
  tile_.ahead = !SCALED<T>;  // of the unit's first rows
  if (!on_unit()) return run_rows(row0, n, start, side);
  place_halves(blocks, gathered);
  run_passes(row0, n, start, side);
}

// A unit of few rows over a cache of bytes.
template <class T>
template <int KIND>
void AttentionLoop<T>::run_few(const Blocks<C> &b, int row0, int n, int start, int side) {
  using Few = InRegisters<T, KIND>;
  bool masked;
  if (!set_masks(row0, n, start, masked)) return;
  place_rows(row0, side);
  tile_.lo = s_->lo, tile_.hi = s_->hi;
  TileArgs<Few> tile;
  (RowArgs<typename T::Q> &)tile = tile_;
  tile.ahead = true, tile.k_stride = k_stride(b);
  vectors(b, tile.k, tile.v), vectors(next_, tile.next_k, tile.next_v);
  if (size_ < vec::W) join_k(b, tile.k);
  attend_rows<Few>(std::make_integer_sequence<int, ROWS_TILE>(), n, masked, tile);
}

template <class T>
void AttentionLoop<T>::place_rows(int from, int side) {
  tile_.q = s_->q + from * ROW, tile_.o = s_->o[side] + from * ROW, tile_.l = s_->l[side] + from * vec::W,
  tile_.m = s_->m[side] + from;
}

template <class T>
void AttentionLoop<T>::run_rows(int row0, int n, int start, int side) {
  const int groups = (n + ROWS_TILE - 1) / ROWS_TILE;
  for (int g = 0; g < groups; g++) {  // register tiles of nearly equal height
    const int from = row0 + n * g / groups, count = row0 + n * (g + 1) / groups - from;
    bool masked;
    if (!set_masks(from, count, start, masked)) continue;
    place_rows(from, side);
    tile_.lo = s_->lo, tile_.hi = s_->hi;
    attend_rows<T>(std::make_integer_sequence<int, ROWS_TILE>(), count, masked, tile_);
    tile_.ahead = false;
  }
}

// What packed rows from .. from+count-1 see of a tile. False: nothing.
template <class T>
bool AttentionLoop<T>::begin_pass(typename MatrixUnit<T>::Pass &x, int from, int count, int start) {
  if constexpr (MatrixUnit<T>::EXIST) {
    int begin = 0, end = start + TILE;
    for (int r = from; r < from + count; r++) begin = std::max(begin, s_->begin[r]), end = std::min(end, s_->end[r]);
    x.count = count, x.height = height_, x.turn = turn_, x.ahead = tile_.ahead && !joins();
    x.all_lo = std::max(begin - start, 0), x.all_hi = std::max(end - start, 0);
    x.masked = x.all_lo > 0 || x.all_hi < TILE;
    for (int i = 0; i < 2; i++) x.v[i] = half_[i], x.next_v[i] = next_half_[i];
    x.k_scale = tile_.k_scale, x.v_scale = tile_.v_scale;
    x.s = s_->unit.s[&x - passes_], x.o = tile_.o, x.l = tile_.l, x.m = tile_.m;
    if (!x.masked) return true;
    uint64_t any = 0;
    for (int r = 0; r < count; r++) {
      const int lo = std::clamp(s_->begin[from + r] - start, 0, TILE);
      const int hi = std::clamp(s_->end[from + r] - start, 0, TILE);
      x.seen[r] = hi > lo ? ~0ull >> (TILE - (hi - lo)) << lo : 0;
      any |= x.seen[r];
    }
    return any;
  }
  return false;
}

// A unit's rows through the matrix unit. The last pass stays unfinished until the next one's logits are under way.
template <class T>
void AttentionLoop<T>::run_passes(int row0, int n, int start, int side) {
  if constexpr (MatrixUnit<T>::EXIST) {
    using Unit = MatrixUnit<T>;
    const int first = Unit::first_pass(n), height = Unit::height(n);
    if (height != height_) {
      finish_pass();
      Unit::configure(height_ = height);
    }
    for (int from = row0, count = first; from < row0 + n; from += count, count = row0 + n - from) {
      auto &pass = passes_[pending_ == passes_];
      place_rows(from, side);
      if (!begin_pass(pass, from, count, start)) continue;
      Unit::logits(tile_, pass);
      finish_pass();
      pending_ = &pass;
      tile_.ahead = false;
    }
  }
}

template <class T>
void AttentionLoop<T>::finish_pass() {
  if constexpr (MatrixUnit<T>::EXIST)
    if (pending_) MatrixUnit<T>::finish(tile_, *std::exchange(pending_, nullptr), s_->unit);
}

template <class T>
void AttentionLoop<T>::write_row(const plan::Row &row, int head, const float *o, float m, float l) const {
  const float w = weight_of(m, l, a_.sinks ? a_.sinks + head : nullptr);
  finish<T>((E *)a_.out + ((int64_t)row.row_id * h_.q_heads + head) * d_, o, w, d_);
}

template <class T>
void AttentionLoop<T>::end_chunk(const plan::Span &span, int chunk, bool first_item, bool last_item, int side) {
  const plan::Piece &piece = p_.pieces[span.piece];
  const bool first_span = span.item0 == piece.item0;
  for (int r = 0; r < piece.num_rows * heads_; r++) {
    const plan::Row &row = p_.rows[piece.row0 + r / heads_];
    const int first = row.begin / CHUNK, last = (row.end - 1) / CHUNK, head = head_ + r % heads_;
    if (chunk < first || chunk > last) continue;
    const int at = row0_ + r;
    float *o = s_->o[side] + at * ROW, m = s_->m[side][at],
          l = vec::reduce_sum(vec::load(s_->l[side] + at * vec::W));
    if (!first_span) {  // every chunk apart
      float *to = partial(row.split + chunk - row.merge_chunk, head);
      memcpy(to, o, d_ * sizeof(float));
      to[d_] = m, to[d_ + 1] = l;
      continue;
    }
    float *all = s_->o[0] + at * ROW;
    if (chunk == first) {
      if (side) memcpy(all, o, d_ * sizeof(float));
      s_->m[0][at] = m, s_->sum[at] = l;
    } else {
      fold(all, s_->m[0][at], s_->sum[at], o, m, l, d_);
    }
    if (chunk == last) {
      write_row(row, head, all, s_->m[0][at], s_->sum[at]);
    } else if (last_item && row.split >= 0) {
      float *to = partial(row.split + chunk - row.merge_chunk, head);
      memcpy(to, all, d_ * sizeof(float));
      to[d_] = s_->m[0][at], to[d_ + 1] = s_->sum[at];
    }
  }
}

// For each of `num` spans that are taken together.
template <class T>
template <class Step>
void AttentionLoop<T>::for_each(const plan::Span &first, int num, Step step) {
  choose(first);
  for (int i = 0; i < num; i++) {
    if (i) choose_next(p_.pieces[first.piece]);
    step();
  }
}

template <class T>
void AttentionLoop<T>::run_spans(const plan::Span &span, int num) {
  const plan::Piece &piece = p_.pieces[span.piece];
  for_each(span, num, [&] { load_rows(piece); });
  s_->gathered_tile = -1;
  const int n = num * piece.num_rows * heads_;
  for (int i = 0; i < span.num_items; i++) {
    const plan::Item &item = p_.items[span.item0 + i];
    const int side = i > 0;
    for (int r = 0; r < n; r++) std::fill_n(s_->o[side] + r * ROW, d_, 0.f);
    std::fill_n(s_->l[side], n * vec::W, 0.f);
    std::fill_n(s_->m[side], n, -INFINITY);
    for (int u = item.unit0; u < item.unit0 + item.num_units; u++)
      for_each(span, num, [&] { look_ahead(), run_unit(p_.units[u], piece, side); });
    finish_pass();
    for_each(span, num, [&] { end_chunk(span, item.chunk, i == 0, i + 1 == span.num_items, side); });
  }
}

template <class T>
void AttentionLoop<T>::merge(int split, int head) {
  const plan::Row &row = p_.rows[p_.splits[split]];
  const int last = (row.end - 1) / CHUNK;
  alignas(64) float o[MAX_HEAD_DIM];
  const float *from = partial(row.split, head);
  float m = from[d_], l = from[d_ + 1];
  memcpy(o, from, d_ * sizeof(float));
  for (int c = row.merge_chunk + 1; c <= last; c++) {
    from = partial(row.split + c - row.merge_chunk, head);
    fold(o, m, l, from, from[d_], from[d_ + 1], d_);
  }
  write_row(row, head, o, m, l);
}

template <class T>
void AttentionLoop<T>::run() {
  for (int w = thread_; w < h_.num_workers;
       w += num_threads_) {  // as many as threads, unless their number has changed since
    const int first = p_.worker_indptr[w];
    last_span_ = p_.worker_indptr[w + 1];
    if (first == last_span_) continue;
    begin_ahead(first);
    for (int i = 0; i <= most_together_; i++) look_ahead();  // a unit's heads and one more: so far ahead it stays
    for (int i = first, n; i < last_span_; i += n) run_spans(p_.spans[i], n = together(i));
  }
  if constexpr (MatrixUnit<T>::EXIST)
    if (height_) MatrixUnit<T>::release();
  const int64_t merges = (int64_t)h_.splits.count * h_.q_heads;
  if (!merges) return;
#pragma omp barrier
  for (int64_t i = merges * thread_ / num_threads_; i < merges * (thread_ + 1) / num_threads_; i++)
    merge((int)(i / h_.q_heads), (int)(i % h_.q_heads));
}

}  // namespace pagedec
