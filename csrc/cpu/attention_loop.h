// A thread's walk over its spans of a plan: rows in, tiles, ends of chunks, rows out. See plan/plan.h for the words.
#pragma once
#include <omp.h>

#include <utility>

#include "cpu/attention_tile.h"

namespace pagedec {

constexpr int UNITS_AHEAD = 2;  // prefetched while a unit is computed

// What a thread carries through a piece. Side 0 of o, l, m: a row's result so far; side 1: the chunk being computed.
template <class T, int SD>
struct alignas(64) AttentionState {
  typename T::Q q[ROWS_MAX * SD];
  float o[2][ROWS_MAX * SD], l[2][ROWS_MAX * vec::W], m[2][ROWS_MAX], sum[ROWS_MAX];
  int32_t begin[ROWS_MAX], end[ROWS_MAX], lo[ROWS_TILE],
      hi[ROWS_TILE];  // positions by packed row; lanes of a register tile
  alignas(64) typename T::E gathered_k[TILE * SD],
      gathered_v[TILE * SD], wide_k[TILE * SD], joined_v[WholeTiles<T>::EXIST ? TILE * SD : 1];
  int32_t gathered_slots[TILE], gathered_tile, gathered_branch;
};

// (o, m, l) += (bo, bm, bl): the only way chunks are combined, always left to right.
PD_INLINE void fold(float *o, float &m, float &l, const float *bo, float bm, float bl, int d) {
  if (bm == -INFINITY) return;
  const float top = m > bm ? m : bm, x = vec::exp2_one(m - top), y = vec::exp2_one(bm - top);
  for (int i = 0; i < d; i += vec::W)
    vec::store(o + i, vec::fma(vec::load(o + i), vec::set1(x), vec::mul(vec::load(bo + i), vec::set1(y))));
  l = l * x + bl * y;
  m = top;
}

template <class T>
PD_INLINE void finish(typename T::E *out, const float *o, float l, int d) {
  const float w = l > 0 || l != l ? 1.f / l : 0.f;
  for (int i = 0; i < d; i += vec::W) T::store_out(out + i, vec::mul(vec::load(o + i), vec::set1(w)));
}

// A plan's words, section by section.
struct PlanSections {
  const plan::Header &header;
  const plan::Row *rows;
  const plan::Piece *pieces;
  const plan::Unit *units;
  const plan::Item *items;
  const plan::Span *spans;
  const int32_t *worker_indptr, *splits, *paths;

  explicit PlanSections(const pd_plan &p)
      : header(p.header()), rows(p.section<plan::Row>(header.rows)), pieces(p.section<plan::Piece>(header.pieces)),
        units(p.section<plan::Unit>(header.units)), items(p.section<plan::Item>(header.items)),
        spans(p.section<plan::Span>(header.spans)), worker_indptr(p.section<int32_t>(header.worker_indptr)),
        splits(p.section<int32_t>(header.splits)), paths(p.section<int32_t>(header.paths)) {}
};

template <class T, int SD>
class AttentionLoop {
 public:
  using E = typename T::E;
  using State = AttentionState<T, SD>;

  AttentionLoop(const pd_attention_args &a, char *workspace, int thread, int num_threads);
  void run();

 private:
  struct Blocks { const E *k[MAX_TILE_BLOCKS], *v[MAX_TILE_BLOCKS]; };

  Blocks locate(const plan::Unit &u, int kv_head) const;
  void gather(const plan::Unit &u, const plan::Row &row, int kv_head, Blocks &blocks);
  void vectors(const Blocks &b, const E **k, const E **v) const;
  void widen_k(const Blocks &b);
  void join_v(const Blocks &b);
  void look_ahead();
  void load_rows(const plan::Span &span);
  void run_span(const plan::Span &span);
  void run_unit(const plan::Unit &u, const plan::Piece &piece, int side);
  bool set_masks(int from, int n, int start, bool &masked);
  void place_rows(int from, int side);
  void run_rows(int row0, int n, int start, int side);
  void run_whole_rows(int row0, int n, int side);
  void end_chunk(const plan::Span &span, int chunk, bool first_item, bool last_item, int side);
  float *partial(int record, int head) const { return partials_ + ((size_t)record * h_.q_heads + head) * (d_ + 2); }
  void merge(int split, int head);

  const pd_attention_args &a_;
  const PlanSections p_;
  const plan::Header &h_;
  const int d_, size_, thread_, num_threads_;
  const E *k_, *v_;
  State *const s_;
  float *const partials_;
  TileArgs<T> tile_;
  int head_ = 0, heads_ = 1, kv_head_ = 0;   // of the span: first query head, how many
  int ahead_span_ = 0, ahead_unit_ = 0, last_span_ = 0;  // where prefetching stands
  int whole_rows_ = 0;                                   // that the matrix unit is configured for
};

template <class T, int SD>
AttentionLoop<T, SD>::AttentionLoop(const pd_attention_args &a, char *workspace, int thread, int num_threads)
    : a_(a), p_(*a.plan), h_(p_.header), d_(h_.head_dim), size_(h_.block_size), thread_(thread),
      num_threads_(num_threads), k_((const E *)a.k_cache), v_((const E *)a.v_cache), s_((State *)workspace + thread),
      partials_((float *)((State *)workspace + num_threads)) {
  constexpr float LOG2E = 1.44269504f;
  float scale, soft_cap;
  memcpy(&scale, &h_.scale_bits, 4), memcpy(&soft_cap, &h_.soft_cap_bits, 4);
  tile_.head_dim = d_, tile_.block_size = size_;
  if constexpr (WholeTiles<T>::EXIST)
    if (WholeTiles<T>::take(d_)) tile_.block_size = std::max(size_, WholeTiles<T>::TOKENS);
  tile_.k_stride = T::STEP * std::max(size_, vec::W);
  tile_.soft_cap = soft_cap > 0 ? soft_cap * LOG2E : 0.f;
  tile_.inner_scale = soft_cap > 0 ? scale / soft_cap : 0.f;
  tile_.scale = soft_cap > 0 ? 1.f : scale * LOG2E;
}

template <class T, int SD>
typename AttentionLoop<T, SD>::Blocks AttentionLoop<T, SD>::locate(const plan::Unit &u, int kv_head) const {
  Blocks b;
  for (int c = 0; c * size_ < TILE; c++) {
    const int64_t at = ((int64_t)u.blocks[c] * h_.kv_heads + kv_head) * d_ * size_;
    b.k[c] = k_ + at, b.v[c] = v_ + at;
  }
  return b;
}

// A tree node's tile in position order: whole blocks before the nodes where they are, the rest copied once a tile and
// branch, then slot by slot as one node follows another.
template <class T, int SD>
void AttentionLoop<T, SD>::gather(const plan::Unit &u, const plan::Row &row, int kv_head, Blocks &blocks) {
  constexpr int S = T::STEP;
  const bool fresh = s_->gathered_tile != u.tile || s_->gathered_branch != row.branch_id;
  if (fresh) {
    s_->gathered_tile = u.tile, s_->gathered_branch = row.branch_id;
    std::fill_n(s_->gathered_slots, TILE, -1);
  }
  const int start = u.tile * TILE, words = d_ * size_;
  for (int c = 0; c * size_ < TILE; c++) {
    if ((c + 1) * size_ <= u.path_lane) continue;
    E *k = s_->gathered_k + c * words, *v = s_->gathered_v + c * words;
    if (fresh && c * size_ < u.path_lane)
      memcpy(k, blocks.k[c], words * sizeof(E)), memcpy(v, blocks.v[c], words * sizeof(E));
    blocks.k[c] = k, blocks.v[c] = v;
  }
  for (int lane = std::max(u.path_lane, row.begin - start); lane < std::min(TILE, row.end - start); lane++) {
    const int slot = p_.paths[u.path + lane - u.path_lane], to = lane % size_, from = slot % size_;
    if (s_->gathered_slots[lane] == slot) continue;
    s_->gathered_slots[lane] = slot;
    const int64_t block = ((int64_t)(slot / size_) * h_.kv_heads + kv_head) * words;
    E *k = s_->gathered_k + lane / size_ * words + to * S,
      *v = s_->gathered_v + lane / size_ * words + (to / S) * d_ * S + to % S;
    const E *from_k = k_ + block + from * S, *from_v = v_ + block + (from / S) * d_ * S + from % S;
    for (int i = 0; i < d_ / S; i++) memcpy(k + (int64_t)i * size_ * S, from_k + (int64_t)i * size_ * S, S * sizeof(E));
    for (int i = 0; i < d_; i++) v[i * S] = from_v[i * S];
  }
}

template <class T, int SD>
void AttentionLoop<T, SD>::vectors(const Blocks &b, const E **k, const E **v) const {
  for (int c = 0; c < NT; c++) k[c] = b.k[c * vec::W / size_] + c * vec::W % size_ * T::STEP;
  for (int c = 0; c * size_ < TILE; c++) v[c] = b.v[c];
}

// K vectors longer than a block.
template <class T, int SD>
void AttentionLoop<T, SD>::widen_k(const Blocks &b) {
  for (int c = 0; c * size_ < TILE; c++)
    for (int i = 0; i < d_ / T::STEP; i++)
      memcpy(s_->wide_k + (c * size_ / vec::W * (d_ / T::STEP) + i) * vec::W * T::STEP + c * size_ % vec::W * T::STEP,
             b.k[c] + i * size_ * T::STEP, size_ * T::STEP * sizeof(E));
  for (int c = 0; c < NT; c++) tile_.k[c] = tile_.next_k[c] = s_->wide_k + c * vec::W * d_;
}

// Blocks shorter than the matrix unit takes: V of one behind the other is V of a longer block.
template <class T, int SD>
void AttentionLoop<T, SD>::join_v(const Blocks &b) {
  const int words = d_ * size_;
  for (int c = 0; c * size_ < TILE; c++) {
    memcpy(s_->joined_v + c * words, b.v[c], words * sizeof(E));
    for (int i = 0; i < words; i += 64 / (int)sizeof(E)) prefetch<true>(tile_.next_v[c] + i);
  }
  for (int c = 0; c * tile_.block_size < TILE; c++)
    tile_.v[c] = tile_.next_v[c] = s_->joined_v + c * tile_.block_size * d_;
}

// The unit to prefetch: UNITS_AHEAD before the computation, across spans; it rests on the last.
template <class T, int SD>
void AttentionLoop<T, SD>::look_ahead() {
  const plan::Span &span = p_.spans[ahead_span_];
  const plan::Item &last = p_.items[span.item0 + span.num_items - 1];
  vectors(locate(p_.units[ahead_unit_], span.head / h_.head_parts), tile_.next_k, tile_.next_v);
  if (ahead_unit_ + 1 < last.unit0 + last.num_units)
    ahead_unit_++;
  else if (ahead_span_ + 1 < last_span_)
    ahead_unit_ = p_.items[p_.spans[++ahead_span_].item0].unit0;
}

template <class T, int SD>
void AttentionLoop<T, SD>::load_rows(const plan::Span &span) {
  const plan::Piece &piece = p_.pieces[span.piece];
  const int part = span.head % h_.head_parts, from = h_.group * part / h_.head_parts;
  kv_head_ = span.head / h_.head_parts;
  head_ = kv_head_ * h_.group + from;
  heads_ = h_.group * (part + 1) / h_.head_parts - from;
  for (int r = 0; r < piece.num_rows; r++) {
    const E *q = (const E *)a_.q + ((int64_t)p_.rows[piece.row0 + r].row_id * h_.q_heads + head_) * d_;
    for (int g = 0; g < heads_; g++) {
      const int at = r * heads_ + g;
      typename T::Q *to = s_->q + at * SD;
      s_->begin[at] = p_.rows[piece.row0 + r].begin, s_->end[at] = p_.rows[piece.row0 + r].end;
      for (int i = 0; i < d_; i++) to[i] = T::query(q[g * d_ + i]);
    }
  }
  s_->gathered_tile = -1;
}

// Lanes that packed rows from .. from+n-1 see. False: none of them sees any.
template <class T, int SD>
bool AttentionLoop<T, SD>::set_masks(int from, int n, int start, bool &masked) {
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

template <class T, int SD, int... R>
PD_INLINE void attend_rows(std::integer_sequence<int, R...>, int rows, bool masked, const TileArgs<T> &a) {
  typedef void (*Kernel)(const TileArgs<T> &);
  static constexpr Kernel kernels[][3] = {
      {attend<T, SD, R + 1, false, false>, attend<T, SD, R + 1, false, true>, attend<T, SD, R + 1, true, true>}...};
  kernels[rows - 1][masked ? 2 : a.ahead](a);
}

template <class T, int SD>
void AttentionLoop<T, SD>::run_unit(const plan::Unit &u, const plan::Piece &piece, int side) {
  const int start = u.tile * TILE, row0 = u.row0 * heads_, n = (u.row1 - u.row0) * heads_;
  Blocks blocks = locate(u, kv_head_);
  if (u.path >= 0) gather(u, p_.rows[piece.row0 + u.row0], kv_head_, blocks);
  vectors(blocks, tile_.k, tile_.v);
  if (size_ < vec::W) widen_k(blocks);
  if constexpr (WholeTiles<T>::EXIST)
    if (size_ < tile_.block_size) join_v(blocks);
  tile_.ahead = true;  // of the unit's first rows
  if constexpr (WholeTiles<T>::EXIST) {
    if (WholeTiles<T>::take(d_)) {
      auto whole = [&](int r) { return s_->begin[r] <= start && s_->end[r] >= start + TILE; };
      for (int from = row0, to = row0; from < row0 + n; from = to) {
        while (to < row0 + n && whole(to) == whole(from)) to++;
        whole(from) ? run_whole_rows(from, to - from, side) : run_rows(from, to - from, start, side);
      }
      return;
    }
  }
  run_rows(row0, n, start, side);
}

template <class T, int SD>
void AttentionLoop<T, SD>::place_rows(int from, int side) {
  tile_.q = s_->q + from * SD, tile_.o = s_->o[side] + from * SD, tile_.l = s_->l[side] + from * vec::W,
  tile_.m = s_->m[side] + from;
}

template <class T, int SD>
void AttentionLoop<T, SD>::run_rows(int row0, int n, int start, int side) {
  const int groups = (n + ROWS_TILE - 1) / ROWS_TILE;
  for (int g = 0; g < groups; g++) {  // register tiles of nearly equal height
    const int from = row0 + n * g / groups, count = row0 + n * (g + 1) / groups - from;
    bool masked;
    if (!set_masks(from, count, start, masked)) continue;
    place_rows(from, side);
    tile_.lo = s_->lo, tile_.hi = s_->hi;
    attend_rows<T, SD>(std::make_integer_sequence<int, ROWS_TILE>(), count, masked, tile_);
    tile_.ahead = false;
  }
}

template <class T, int SD>
void AttentionLoop<T, SD>::run_whole_rows(int row0, int n, int side) {
  const int groups = (n + WholeTiles<T>::ROWS - 1) / WholeTiles<T>::ROWS;
  for (int g = 0; g < groups; g++) {
    const int from = row0 + n * g / groups, count = row0 + n * (g + 1) / groups - from;
    if (count != whole_rows_) WholeTiles<T>::configure(whole_rows_ = count);
    place_rows(from, side);
    WholeTiles<T>::template attend<SD>(tile_, count);
    tile_.ahead = false;
  }
}

template <class T, int SD>
void AttentionLoop<T, SD>::end_chunk(const plan::Span &span, int chunk, bool first_item, bool last_item, int side) {
  const plan::Piece &piece = p_.pieces[span.piece];
  const bool first_span = span.item0 == piece.item0;
  for (int r = 0; r < piece.num_rows * heads_; r++) {
    const plan::Row &row = p_.rows[piece.row0 + r / heads_];
    const int first = row.begin / CHUNK, last = (row.end - 1) / CHUNK, head = head_ + r % heads_;
    if (chunk < first || chunk > last) continue;
    float *o = s_->o[side] + r * SD, m = s_->m[side][r], l = vec::reduce_sum(vec::load(s_->l[side] + r * vec::W));
    if (!first_span) {  // every chunk apart
      float *to = partial(row.split + chunk - first, head);
      memcpy(to, o, d_ * sizeof(float));
      to[d_] = m, to[d_ + 1] = l;
      continue;
    }
    float *all = s_->o[0] + r * SD;
    if (chunk == first) {
      if (side) memcpy(all, o, d_ * sizeof(float));
      s_->m[0][r] = m, s_->sum[r] = l;
    } else {
      fold(all, s_->m[0][r], s_->sum[r], o, m, l, d_);
    }
    if (chunk == last) {
      finish<T>((E *)a_.out + ((int64_t)row.row_id * h_.q_heads + head) * d_, all, s_->sum[r], d_);
    } else if (last_item && row.split >= 0) {
      float *to = partial(row.split + chunk - first, head);
      memcpy(to, all, d_ * sizeof(float));
      to[d_] = s_->m[0][r], to[d_ + 1] = s_->sum[r];
    }
  }
}

template <class T, int SD>
void AttentionLoop<T, SD>::run_span(const plan::Span &span) {
  load_rows(span);
  const plan::Piece &piece = p_.pieces[span.piece];
  const int n = piece.num_rows * heads_;
  for (int i = 0; i < span.num_items; i++) {
    const plan::Item &item = p_.items[span.item0 + i];
    const int side = i > 0;
    for (int r = 0; r < n; r++) std::fill_n(s_->o[side] + r * SD, d_, 0.f);
    std::fill_n(s_->l[side], n * vec::W, 0.f);
    std::fill_n(s_->m[side], n, -INFINITY);
    for (int u = item.unit0; u < item.unit0 + item.num_units; u++) {
      look_ahead();
      run_unit(p_.units[u], piece, side);
    }
    end_chunk(span, item.chunk, i == 0, i + 1 == span.num_items, side);
  }
}

template <class T, int SD>
void AttentionLoop<T, SD>::merge(int split, int head) {
  const plan::Row &row = p_.rows[p_.splits[split]];
  const int first = row.begin / CHUNK, last = (row.end - 1) / CHUNK;
  alignas(64) float o[SD];
  const float *from = partial(row.split + row.merge_chunk - first, head);
  float m = from[d_], l = from[d_ + 1];
  memcpy(o, from, d_ * sizeof(float));
  for (int c = row.merge_chunk + 1; c <= last; c++) {
    from = partial(row.split + c - first, head);
    fold(o, m, l, from, from[d_], from[d_ + 1], d_);
  }
  finish<T>((E *)a_.out + ((int64_t)row.row_id * h_.q_heads + head) * d_, o, l, d_);
}

template <class T, int SD>
void AttentionLoop<T, SD>::run() {
  for (int w = thread_; w < h_.num_workers;
       w += num_threads_) {  // as many as threads, unless their number has changed since
    ahead_span_ = p_.worker_indptr[w], last_span_ = p_.worker_indptr[w + 1];
    if (ahead_span_ == last_span_) continue;
    ahead_unit_ = p_.items[p_.spans[ahead_span_].item0].unit0;
    for (int i = 0; i < UNITS_AHEAD; i++) look_ahead();
    for (int i = p_.worker_indptr[w]; i < last_span_; i++) run_span(p_.spans[i]);
  }
  if constexpr (WholeTiles<T>::EXIST)
    if (whole_rows_) WholeTiles<T>::release();
  const int64_t merges = (int64_t)h_.splits.count * h_.q_heads;
  if (!merges) return;
#pragma omp barrier
  for (int64_t i = merges * thread_ / num_threads_; i < merges * (thread_ + 1) / num_threads_; i++)
    merge((int)(i / h_.q_heads), (int)(i % h_.q_heads));
}

template <class T>
size_t state_bytes(int head_dim) {
  const int stride = row_stride(head_dim);
  return stride == 64    ? sizeof(AttentionState<T, 64>)
         : stride == 128 ? sizeof(AttentionState<T, 128>)
                         : sizeof(AttentionState<T, 256>);
}

template <class T>
void run_attention(const pd_attention_args &a, char *workspace, int thread, int num_threads) {
  switch (row_stride(a.plan->header().head_dim)) {
    case 64: return AttentionLoop<T, 64>(a, workspace, thread, num_threads).run();
    case 128: return AttentionLoop<T, 128>(a, workspace, thread, num_threads).run();
    default: return AttentionLoop<T, 256>(a, workspace, thread, num_threads).run();
  }
}

}  // namespace pagedec
