// What the walk over a plan's work (attention_loop.h) holds: a plan's sections, a thread's state, and how a row ends.
#pragma once
#include "cpu/attention_tile.h"

namespace pagedec {

template <class T>
constexpr int SCALES = SCALED<T> ? 2 : 0;  // cache elements of a token's scale, behind a block's own

// Blocks of a tile, of longer ones the part: of the cache, or of elements for tiles.
template <class E>
struct Blocks {
  const E *k[MAX_TILE_BLOCKS], *v[MAX_TILE_BLOCKS];
  const E *k_scale[MAX_TILE_BLOCKS], *v_scale[MAX_TILE_BLOCKS];  // of a cache of bytes
  int64_t tokens;  // of a block as it lies in memory: one step of dimensions of K has so many
};

// Blocks of bytes as elements, laid out alike, and their scales by lane. What a pass of the matrix unit needs until it
// is finished lies apart from the next unit's.
template <class T, bool EXIST>
struct Widened {};
template <class T>
struct alignas(64) Widened<T, true> {
  static constexpr int TURNS = MatrixUnit<T>::EXIST ? 2 : 1;
  typename T::E k[TILE * MAX_HEAD_DIM], v[TURNS][TILE * MAX_HEAD_DIM];
  float k_scale[TURNS][TILE], v_scale[TURNS][TILE];
};

// What a thread carries through a piece. Side 0 of o, l, m: a row's result so far; side 1: the chunk being computed.
template <class T>
struct alignas(64) AttentionState {
  typename T::Q q[ROWS_MAX * ROW];
  float o[2][ROWS_MAX * ROW], l[2][ROWS_MAX * vec::W], m[2][ROWS_MAX], sum[ROWS_MAX];
  int32_t begin[ROWS_MAX], end[ROWS_MAX], lo[ROWS_TILE],
      hi[ROWS_TILE];  // positions by packed row; lanes of a register tile
  alignas(64) typename T::E joined_k[TILE * MAX_HEAD_DIM];
  alignas(64) typename T::C gathered_k[TILE * (MAX_HEAD_DIM + SCALES<T>)];
  alignas(64) typename T::C gathered_v[TILE * (MAX_HEAD_DIM + SCALES<T>)];
  Widened<T, SCALED<T>> widened;
  int32_t gathered_slots[TILE], gathered_blocks[MAX_TILE_BLOCKS], gathered_tile, gathered_branch;
  typename MatrixUnit<T>::State unit;
};

// (o, m, l) += (bo, bm, bl): the only way chunks are combined, always left to right.
PD_INLINE void fold(float *o, float &m, float &l, const float *bo, float bm, float bl, int d) {
  if (bl == 0) return;  // not where bm is -inf: of a chunk of nothing but NaN it is, too
  const float top = m > bm ? m : bm, x = vec::exp2_one(m - top), y = vec::exp2_one(bm - top);
  for (int i = 0; i < d; i += vec::W)
    vec::store(o + i, vec::fma(vec::load(o + i), vec::set1(x), vec::mul(vec::load(bo + i), vec::set1(y))));
  l = l * x + bl * y;
  m = top;
}

constexpr float LOG2E = 1.44269504f;

// What a row's sums are multiplied by in the end: 1 / l, or with a sink 2^m / (2^m l + e^sink), of which nothing
// overflows.
PD_INLINE float weight_of(float m, float l, const float *sink) {
  if (!sink) return l > 0 || l != l ? 1.f / l : 0.f;
  const float s = *sink * LOG2E, top = m > s ? m : s, x = vec::exp2_one(m - top);
  return x / (l * x + vec::exp2_one(s - top));
}

template <class T>
PD_INLINE void finish(typename T::E *out, const float *o, float w, int d) {
  for (int i = 0; i < d; i += vec::W) {
    vec::F x = vec::mul(vec::load(o + i), vec::set1(w));
    if constexpr (MatrixUnit<T>::EXIST) x = vec::add(x, vec::zero());  // a -0 is +0 beside rows that see further
    T::store_out(out + i, x);
  }
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

template <class T>
class AttentionLoop {
 public:
  using E = typename T::E;
  using C = typename T::C;
  using State = AttentionState<T>;

  AttentionLoop(const pd_attention_args &a, char *workspace, int thread, int num_threads);
  void run();

 private:
  void place(const plan::Unit &u, int block, int kv_head, Blocks<C> &b, int c) const;
  Blocks<C> locate(const plan::Unit &u, int kv_head) const;
  void copy_part(const Blocks<C> &b, int c, C *k, C *v) const;
  void gather(const plan::Unit &u, const plan::Row &row, int kv_head, Blocks<C> &blocks);
  Blocks<E> widen(const Blocks<C> &b);
  template <class M>
  void vectors(const Blocks<M> &b, const M **k, const M **v) const;
  template <class M>
  void join_k(const Blocks<M> &b, const M **k);
  void read_scales(const Blocks<C> &b);
  // From one step of dimensions to the next, in elements: of blocks, or of what join_k makes of those that are short.
  template <class M>
  int64_t k_stride(const Blocks<M> &b) const { return T::STEP * std::max<int64_t>(b.tokens, vec::W); }
  template <int KIND>
  void run_few(const Blocks<C> &b, int row0, int n, int start, int side);
  void join_v(const Blocks<E> &b, E *to);
  void place_halves(const Blocks<E> &b, bool gathered);
  int together(int at) const;
  void begin_ahead(int span);
  void look_ahead();
  void choose(const plan::Span &span);
  void choose_next(const plan::Piece &piece);
  void load_rows(const plan::Piece &piece);
  template <class Step>
  void for_each(const plan::Span &first, int num, Step step);
  void run_spans(const plan::Span &first, int num);
  void run_unit(const plan::Unit &u, const plan::Piece &piece, int side);
  bool set_masks(int from, int n, int start, bool &masked);
  void place_rows(int from, int side);
  void run_rows(int row0, int n, int start, int side);
  void run_passes(int row0, int n, int start, int side);
  // All tiles go through the matrix unit.
  bool on_unit() const {
    if constexpr (MatrixUnit<T>::EXIST) return MatrixUnit<T>::take(d_);
    return false;
  }
  bool joins() const { return on_unit() && !SCALED<T> && size_ < HALF; }  // blocks shorter than it takes of V
  int turn() const { return MatrixUnit<T>::EXIST ? turn_ : 0; }           // of its buffers
  bool begin_pass(typename MatrixUnit<T>::Pass &x, int from, int count, int start);
  void finish_pass();
  void end_chunk(const plan::Span &span, int chunk, bool first_item, bool last_item, int side);
  float *partial(int record, int head) const { return partials_ + ((size_t)record * h_.q_heads + head) * (d_ + 2); }
  void merge(int split, int head);
  void write_row(const plan::Row &row, int head, const float *o, float m, float l) const;

  const pd_attention_args &a_;
  const PlanSections p_;
  const plan::Header &h_;
  const int d_, block_, size_, shift_;  // tokens of a block; of it in a tile, all up to blocks of 64: 2^shift_
  const int words_, thread_, num_threads_;  // words: of a block of one head
  const C *k_, *v_;
  State *const s_;
  float *const partials_;
  TileArgs<T> tile_{};
  Blocks<C> next_{};  // to prefetch, of a cache of bytes
  int head_ = 0, heads_ = 1, kv_head_ = 0;  // of the span: first query head, how many
  int row0_ = 0;                            // its first row in the state
  int last_span_ = 0, most_together_ = 1;
  struct {
    int span, heads;        // the first of spans that are taken together, how many
    int first_head;
    int unit, unit_end;     // of them
    int block, head;        // of the unit
  } ahead_{};               // where prefetching stands
  int height_ = 0, turn_ = 0;  // of the matrix unit: what it is configured for
  typename MatrixUnit<T>::Pass passes_[2];
  typename MatrixUnit<T>::Pass *pending_ = nullptr;  // its logits are known
  const E *half_[2] = {}, *next_half_[2] = {};       // V as it takes it
};

}  // namespace pagedec
