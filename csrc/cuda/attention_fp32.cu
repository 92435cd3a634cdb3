// Attention in fp32, for tests of what must be equal: each logit and each result is one chain of products. It need
// not be fast, so there are two sizes of heads, and of bytes each is asked what it is.
//
// Work     A unit at a time: the four warps have the logits of 16 positions each for all packed rows, agree on each
//          row's maximum, put the probabilities into shared memory, and have each a quarter of the result's columns. K
//          and V are read where they lie.
// Rows     lie in tiles of 16, as where there are tensor cores: a thread has of a tile rows g and g + 8 (g = lane / 4).
#include "cuda/attention_rows.h"
#include "cuda/kv_bytes.h"

namespace pagedec::attention {
namespace {

constexpr int kRowTiles = ROWS_MAX / kTileRows, kHalves = 2 * kRowTiles;  // a thread's rows
static_assert(ROWS_MAX % kTileRows == 0 && kThreads == 2 * TILE);

template <int kHead, bool kBytes>
class Walk {
 public:
  using M = std::conditional_t<kBytes, uint8_t, float>;
  static constexpr int kPieces = kHead / (8 * kWarps), kStride = kHead + 1, kProbabilityStride = TILE + 1;
  static constexpr int64_t kTopsAt = 8 * ROWS_MAX, kTokensAt = kTopsAt + 4 * kWarps * ROWS_MAX;
  static constexpr int64_t kScalesAt = kTokensAt + 2 * 8 * TILE, kQueryAt = kScalesAt + 2 * 4 * TILE;
  static constexpr int64_t kProbabilityAt = kQueryAt + ROWS_MAX * kStride * 4;
  static constexpr int64_t kEnd = kProbabilityAt + ROWS_MAX * kProbabilityStride * 4;

  PD_DEVICE Walk(const Work &w, const SharedMemory &memory)
      : w_(w), p_{*(const plan::Header *)w.words, w.words}, dim_(w.head_dim), warp_(thread_index() / kWarp),
        lane_(thread_index() % kWarp), is_int8_(p_.header.kv_kind == PD_KV_INT8),
        begins_(memory.part<int32_t>(0, ROWS_MAX)), ends_(memory.part<int32_t>(4 * ROWS_MAX, ROWS_MAX)),
        tops_(memory.part<float>(kTopsAt, kWarps * ROWS_MAX)), tokens_(memory.part<const M *>(kTokensAt, 2 * TILE)),
        scales_(memory.part<float>(kScalesAt, 2 * TILE)), q_(memory.part<float>(kQueryAt, ROWS_MAX * kStride)),
        p_of_(memory.part<float>(kProbabilityAt, ROWS_MAX * kProbabilityStride)) {}

  PD_DEVICE void run_span(const plan::Span &);

 private:
  PD_DEVICE void begin_rows();
  PD_DEVICE Sight sight_of(const plan::Unit &) const;
  PD_DEVICE void find_tokens(const plan::Unit &, const Sight &) const;
  PD_DEVICE void run_unit(const plan::Unit &);
  PD_DEVICE void find_logits(const Sight &, float (&s)[kHalves][4]) const;
  PD_DEVICE void find_tops(int start, const Sight &, float (&s)[kHalves][4]) const;
  PD_DEVICE void weigh(const float (&s)[kHalves][4]);
  PD_DEVICE void add_values(int start, const Sight &);
  PD_DEVICE void end_chunk(int chunk, bool is_last_item);

  PD_DEVICE int row_of(int half) const { return half * 8 + lane_ / 4; }
  PD_DEVICE int token_of(int i) const { return warp_ * kWarpTokens + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2; }
  PD_DEVICE int column_of(int piece) const { return 8 * (kWarps * piece + warp_) + 2 * (lane_ % 4); }
  PD_DEVICE float number(const M *head, int d) const {
    if constexpr (!kBytes) return head[d];
    else return is_int8_ ? to_number<PD_KV_INT8>(head[place_of_byte(d)]) : to_number<PD_KV_FP8>(head[place_of_byte(d)]);
  }

  const Work &w_;
  const Sections p_;
  const int dim_, warp_, lane_;
  const bool is_int8_;
  const SharedArray<int32_t> begins_, ends_;  // positions that packed rows see
  const SharedArray<float> tops_;             // what warps have found of each row
  const SharedArray<const M *> tokens_;       // heads of K, then of V; NULL where no row sees it
  const SharedArray<float> scales_;           // of K, then of V
  const SharedArray<float> q_, p_of_;
  PackedRows rows_;
  float o_[kHalves][kPieces][2], m_[kHalves], l_[kHalves];  // of the chunk
};

// Of rows that are not there, logits may be anything: they see no position.
template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::begin_rows() {
  sync_block();  // of the span before
  for (int r = thread_index(); r < ROWS_MAX; r += kThreads) {
    const bool is_there = r < rows_.num_packed;
    const plan::Row &row = rows_.row(p_, is_there ? r : 0);
    begins_[r] = is_there ? row.begin : 0, ends_[r] = is_there ? row.end : 0;
  }
  PD_ROLLED for (int r = warp_; r < rows_.num_packed; r += kWarps) {
    const int64_t of_row = (int64_t)rows_.row(p_, r).row_id * p_.header.q_heads + rows_.head(r);
    for (int d = lane_; d < dim_; d += kWarp) q_[r * kStride + d] = ((const float *)w_.q)[of_row * dim_ + d];
  }
  sync_block();
}

template <int kHead, bool kBytes>
PD_DEVICE Sight Walk<kHead, kBytes>::sight_of(const plan::Unit &u) const {
  const int start = u.tile * TILE;
  Sight sight{u.row0 * rows_.heads, u.row1 * rows_.heads, TILE, 0, 0, TILE};
  for (int r = sight.row0 + lane_; r < sight.row1; r += kWarp) sight.meet(begins_[r] - start, ends_[r] - start);
  sight.meet_lanes();
  return sight;
}

// A thread has a token, of K or of V.
template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::find_tokens(const plan::Unit &u, const Sight &sight) const {
  const int token = thread_index() % TILE, shift = w_.block_shift, in_block = (1 << shift) - 1;
  const M *cache = (const M *)(thread_index() < TILE ? w_.k_cache : w_.v_cache), *found = nullptr;
  if (token >= sight.first && token < sight.last) {
    int block = u.blocks[token >> shift], offset = (u.tile * TILE + token) & in_block;
    if (u.path >= 0 && token >= u.path_lane) {
      const int slot = p_.template of<int32_t>(p_.header.paths)[u.path + token - u.path_lane];
      block = slot >> shift, offset = slot & in_block;
    }
    const M *head = cache + (((int64_t)block * w_.kv_heads + rows_.kv_head) << shift) * (dim_ + kBytes * kScaleBytes);
    found = head + offset * dim_;
    if (kBytes) scales_[thread_index()] = to_float(*(const bf16 *)(head + (dim_ << shift) + offset * kScaleBytes));
  }
  tokens_[thread_index()] = found;
}

// In units of log 2.
template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::find_logits(const Sight &sight, float (&s)[kHalves][4]) const {
  PD_UNROLL for (int i = 0; i < 4; i++) {
    const M *k = tokens_[token_of(i)];
    if (!k) continue;
    for (int d = 0; d < dim_; d++) {
      const float x = number(k, d);
      PD_UNROLL for (int half = 0; half < kHalves; half++)
        if (sight.has_tile(half / 2)) s[half][i] = s[half][i] + q_[row_of(half) * kStride + d] * x;
    }
    const float scale = kBytes ? (float)scales_[token_of(i)] : 1.0f;
    PD_UNROLL for (int half = 0; half < kHalves; half++) {
      const float x = kBytes ? s[half][i] * scale : s[half][i];
      s[half][i] = w_.soft_cap > 0.0f ? w_.soft_cap * hyperbolic_tangent(x * w_.inner_scale) : x * w_.scale;
    }
  }
}

// What rows do not see becomes -inf; each warp's largest of a row into `tops_`.
template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::find_tops(int start, const Sight &sight, float (&s)[kHalves][4]) const {
  PD_UNROLL for (int half = 0; half < kHalves; half++) {
    const int row = row_of(half), begin = begins_[row], end = sight.has_row(row) ? (int)ends_[row] : 0;
    float top = -INFINITY;
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const int at = start + token_of(i);
      if (at < begin || at >= end) s[half][i] = -INFINITY;
      top = fmaxf(top, s[half][i]);
    }
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    if (lane_ % 4 == 0) tops_[warp_ * ROWS_MAX + row] = top;
  }
}

// Logits to probabilities, which go to shared memory; results and sums so far come down to the new maximum.
template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::weigh(const float (&s)[kHalves][4]) {
  PD_UNROLL for (int half = 0; half < kHalves; half++) {
    const int row = row_of(half);
    const float before = m_[half];
    float top = before;
    for (int w = 0; w < kWarps; w++) top = fmaxf(top, tops_[w * ROWS_MAX + row]);
    const float by = top == before ? 1.0f : power_of_two(before - top), shift = top == -INFINITY ? 0.0f : top;
    m_[half] = top;
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) o_[half][j][i] = o_[half][j][i] * by;
    float p[4], sum = l_[half] * by;
    PD_UNROLL for (int i = 0; i < 4; i++) p[i] = power_of_two(s[half][i] - shift);
    PD_UNROLL for (int i = 0; i < 4; i += 2) sum = sum + (p[i] + p[i + 1]);
    l_[half] = sum;
    PD_UNROLL for (int i = 0; i < 4; i++)
      p_of_[row * kProbabilityStride + token_of(i)] =
          kBytes ? scaled_probability(p[i], scales_[TILE + token_of(i)]) : p[i];
  }
}

template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::add_values(int start, const Sight &sight) {
  PD_UNROLL for (int half = 0; half < kHalves; half++) {
    const int row = row_of(half);
    if (!sight.has_row(row)) continue;
    const int first = within(begins_[row] - start, 0, TILE), last = within(ends_[row] - start, 0, TILE);
    PD_ROLLED for (int token = first; token < last; token++) {
      const float weight = p_of_[row * kProbabilityStride + token];
      const M *v = tokens_[TILE + token];
      PD_UNROLL for (int j = 0; j < kPieces; j++) {
        if (column_of(j) >= dim_) continue;
        PD_UNROLL for (int i = 0; i < 2; i++) {
          float &x = o_[half][j][i];
          x = x + weight * number(v, column_of(j) + i);
        }
      }
    }
  }
}

template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::run_unit(const plan::Unit &u) {
  const Sight sight = sight_of(u);
  const int start = u.tile * TILE;
  float s[kHalves][4] = {};
  sync_block();  // nobody looks at the unit before any more
  find_tokens(u, sight);
  sync_block();
  find_logits(sight, s);
  find_tops(start, sight, s);
  sync_block();
  weigh(s);
  sync_block();
  add_values(start, sight);
}

template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::end_chunk(int chunk, bool is_last_item) {
  sync_block();
  PD_UNROLL for (int half = 0; half < kHalves; half++) {
    float sum = l_[half];
    sum = sum + shuffle_xor(sum, 1);
    sum = sum + shuffle_xor(sum, 2);
    if (lane_ % 4 == 0) tops_[warp_ * ROWS_MAX + row_of(half)] = sum;
  }
  sync_block();
  PD_ROLLED for (int half = 0; half < kHalves; half++) {  // others move to the registers of the first
    const int packed = row_of(half);
    if (packed < rows_.num_packed) {
      float l = tops_[packed];
      for (int w = 1; w < kWarps; w++) l = l + tops_[w * ROWS_MAX + packed];
      const auto column = [&](int piece) { return column_of(piece); };
      const auto o = [&](int piece, int i) -> float & { return o_[0][piece][i]; };
      const bool has_ml = warp_ == 0 && lane_ % 4 == 0;
      end_row<float, kHalves, kPieces>(w_, p_, rows_, packed, half, chunk, is_last_item, has_ml, m_[0], l, o, column);
    }
    PD_UNROLL for (int to = 0; to + 1 < kHalves; to++) {
      m_[to] = m_[to + 1];
      PD_UNROLL for (int i = 0; i < 2 * kPieces; i++) o_[to][i / 2][i % 2] = o_[to + 1][i / 2][i % 2];
    }
  }
}

template <int kHead, bool kBytes>
PD_DEVICE void Walk<kHead, kBytes>::run_span(const plan::Span &span) {
  rows_.open(p_, span);
  begin_rows();
  const plan::Unit *units = p_.template of<plan::Unit>(p_.header.units);
  for (int i = 0; i < span.num_items; i++) {
    const plan::Item &item = p_.template of<plan::Item>(p_.header.items)[span.item0 + i];
    PD_UNROLL for (int half = 0; half < kHalves; half++) {
      m_[half] = -INFINITY, l_[half] = 0.0f;
      PD_UNROLL for (int n = 0; n < 2 * kPieces; n++) o_[half][n / 2][n % 2] = 0.0f;
    }
    for (int u = 0; u < item.num_units; u++) run_unit(units[item.unit0 + u]);
    end_chunk(item.chunk, i + 1 == span.num_items);
  }
}

template <int kHead, bool kBytes>
PD_KERNEL_BLOCKS(kThreads, kBlocksAtATime) fp32_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  Walk<kHead, kBytes> walk(w, memory);
  const Sections p{*(const plan::Header *)w.words, w.words};
  const int32_t *indptr = p.of<int32_t>(p.header.worker_indptr);
  for (int worker = block_index(); worker < p.header.num_workers; worker += num_grid_blocks())
    for (int i = indptr[worker]; i < indptr[worker + 1]; i++) walk.run_span(p.of<plan::Span>(p.header.spans)[i]);
}

template <int kHead, bool kBytes>
int put(pd_context &c, const Work &w) {
  const Grid grid(kThreads, kBlocksAtATime, Walk<kHead, kBytes>::kEnd);
  return launch(c, "pd_attention", fp32_kernel<kHead, kBytes>, grid, w);
}

}  // namespace

int enqueue_fp32(pd_context &c, const Work &w, int head_dim, int kv_kind) {
  if (kv_kind == PD_KV_PLAIN) return (columns_of(PD_F32, head_dim) == 64 ? put<64, false> : put<256, false>)(c, w);
  return (columns_of(PD_F32, head_dim) == 64 ? put<64, true> : put<256, true>)(c, w);
}

}  // namespace pagedec::attention
