// Attention on the matrix unit: every tile of 64 positions, whatever the rows see of it.
//
// K and V lie in the cache as the unit takes them: pairs of dimensions by token, pairs of tokens by dimension. A pass
// is up to 32 packed rows against a tile, two tiles of rows by two of columns: four loads serve four products.
//
// Bits    An instruction sums the pairs that it is given and adds that to what was there, for each row by itself. It is
//         always given 32 dimensions of K, and of V the 32 tokens of a half of the tile (shorter blocks are joined:
//         attention_blocks.h). A row's mask meets its logits before the exponential. What it does not see has the
//         probability +0 then, and a product of that adds nothing: not to the sum, and not to another row.
// Strict  But 0 x NaN is NaN. Where not all rows of a pass see all of V, V is looked through, and if it holds a NaN or
//         an infinity there, rows that see the same are taken apart, with V's other tokens as zeros: the same sums.
// Order   A pass's logits come before the probabilities of the pass before (attention_loop.h), so that the unit's work
//         is under way beside the vectors'. No row waits for a sum over lanes: its maximum, which is lazy, is compared
//         lane by lane, and found only when a lane rose by more than 2^8.
#pragma once
#include <cfloat>

#include "cpu/amx.h"
#include "cpu/attention_tile.h"

namespace pagedec {

#if PD_LEVEL >= 4
constexpr int PASS_ROWS = 2 * AMX_ROWS;

template <class T>
struct OnUnit {
  static constexpr bool EXIST = true;
  using Q = uint16_t;
  struct Pass {  // from its logits to its sums
    const Q *v[2], *next_v[2];       // halves of the tile; to prefetch
    const float *k_scale, *v_scale;  // of a cache of bytes: by lane
    float *s, *o, *l, *m;            // s [count][TILE]
    int count, height;               // rows; of a tile of them
    int all_lo, all_hi;              // lanes that all rows see
    int turn;                        // of the buffers where V lies
    bool masked, ahead;
    uint64_t seen[PASS_ROWS];        // masked: lanes by row
  };
  struct State {
    alignas(64) float s[2][PASS_ROWS * TILE];
    alignas(64) Q p[PASS_ROWS * TILE];
    alignas(64) Q joined_v[SCALED<T> ? 1 : 2][TILE * MAX_HEAD_DIM];
    alignas(64) Q apart_v[SCALED<T> ? 1 : TILE * MAX_HEAD_DIM], apart_p[AMX_ROWS * TILE];
    alignas(64) float apart_o[AMX_ROWS * ROW];
  };

  static bool take(int head_dim) { return head_dim % 32 == 0; }  // dimensions that one instruction sums
  // Of n rows, those of the first pass, and the height of all passes' tiles: 48 are 32 and 16, other numbers above 32
  // are halves. A pass's second tile reaches back over rows of its first, which have the same sums in both.
  static int first_pass(int n) { return n <= PASS_ROWS ? n : n % AMX_ROWS ? (n + 1) / 2 : PASS_ROWS; }
  static int height(int n) {
    const int most = first_pass(n);
    return most <= AMX_ROWS ? most : (most + 1) / 2;
  }
  static void configure(int height) { amx_configure(height); }
  static void release() { amx_release(); }
  static void logits(const TileArgs<T> &, const Pass &);
  static void finish(const RowArgs<Q> &, const Pass &, State &);
};
template <>
struct MatrixUnit<Bf16> : OnUnit<Bf16> {};
template <>
struct MatrixUnit<OfBytes<Bf16>> : OnUnit<OfBytes<Bf16>> {};

// The tile of a later unit that lies where this one's was loaded: a few lines beside each load, not all of them at
// once.
template <bool AHEAD>
PD_INLINE void prefetch_tile(const uint16_t *p, int64_t stride) {
  for (int i = 0; AHEAD && i < AMX_ROWS; i++) prefetch<true>(p + i * stride);
}

struct Columns {  // tiles of K or V
  const uint16_t *at, *next;
};

// Two tiles of rows by two of columns.
template <bool AHEAD>
PD_INLINE void multiply_four(const uint16_t *top, const uint16_t *bottom, int64_t row, Columns left, Columns right,
                             int64_t stride) {
  tile_load<4>(top, row * 2), tile_load<6>(left.at, stride * 2), tile_multiply<false, 0, 4, 6>();
  prefetch_tile<AHEAD>(left.next, stride);
  tile_load<7>(right.at, stride * 2), tile_multiply<false, 1, 4, 7>();
  prefetch_tile<AHEAD>(right.next, stride);
  tile_load<5>(bottom, row * 2), tile_multiply<false, 2, 5, 6>(), tile_multiply<false, 3, 5, 7>();
}

// One tile of rows, which is loaded, by tile C of the columns.
template <bool AHEAD, int C>
PD_INLINE void multiply_one(Columns w, int64_t stride) {
  tile_load<6 + C % 2>(w.at, stride * 2), tile_multiply<false, C, 4, 6 + C % 2>();
  prefetch_tile<AHEAD>(w.next, stride);
}

template <class T, bool AHEAD>
void logits_of_two(const TileArgs<T> &a, float *s, int below) {
  const uint16_t *const top = a.q, *const bottom = top + below * ROW;
  const int64_t stride = a.k_stride;
  const int pairs = a.head_dim / 2;
#pragma GCC unroll 2
  for (int c = 0; c < NT; c += 2) {
    const Columns left{a.k[c], a.next_k[c]}, right{a.k[c + 1], a.next_k[c + 1]};
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int pair = 0; pair < pairs; pair += AMX_ROWS) {
      const int64_t at = pair * stride;
      multiply_four<AHEAD>(top + pair * 2, bottom + pair * 2, ROW, {left.at + at, left.next + at},
                           {right.at + at, right.next + at}, stride);
    }
    float *const to = s + c * vec::W, *const under = to + below * TILE;
    tile_store<0>(to, TILE * 4), tile_store<1>(to + vec::W, TILE * 4);
    tile_store<2>(under, TILE * 4), tile_store<3>(under + vec::W, TILE * 4);
  }
}

template <class T, bool AHEAD, int... C>
void logits_of_one(const TileArgs<T> &a, float *s, std::integer_sequence<int, C...>) {
  const Columns k[NT] = {{a.k[C], a.next_k[C]}...};
  const uint16_t *const q = a.q;
  const int64_t stride = a.k_stride;
  const int pairs = a.head_dim / 2;
  (tile_zero<C>(), ...);
  for (int pair = 0; pair < pairs; pair += AMX_ROWS) {
    const int64_t at = pair * stride;
    tile_load<4>(q + pair * 2, ROW * 2);
    (multiply_one<AHEAD, C>({k[C].at + at, k[C].next + at}, stride), ...);
  }
  (tile_store<C>(s + C * vec::W, TILE * 4), ...);
}

template <class T>
void OnUnit<T>::logits(const TileArgs<T> &a, const Pass &x) {
  constexpr auto ALL = std::make_integer_sequence<int, NT>();
  if (x.count > x.height)
    (a.ahead ? logits_of_two<T, true> : logits_of_two<T, false>)(a, x.s, x.count - x.height);
  else
    a.ahead ? logits_of_one<T, true>(a, x.s, ALL) : logits_of_one<T, false>(a, x.s, ALL);
}

// o += P V, of two tiles of rows.
template <bool AHEAD, class Pass>
void add_two(const Pass &x, const uint16_t *p, int head_dim) {
  const int below = x.count - x.height;
  const int64_t stride = head_dim * 2;
  const uint16_t *const under = p + below * TILE;
  const Columns first{x.v[0], x.next_v[0]}, second{x.v[1], x.next_v[1]};
  for (int h = 0; h < head_dim; h += 2 * vec::W) {
    float *const o = x.o + h, *const bottom = o + below * ROW;
    auto half = [&](Columns v, int token) {
      multiply_four<AHEAD>(p + token, under + token, TILE, {v.at + h * 2, v.next + h * 2},
                           {v.at + h * 2 + AMX_ROWS * 2, v.next + h * 2 + AMX_ROWS * 2}, stride);
    };
    tile_load<0>(o, ROW * 4), tile_load<1>(o + vec::W, ROW * 4);
    tile_load<2>(bottom, ROW * 4), tile_load<3>(bottom + vec::W, ROW * 4);
    half(first, 0), half(second, HALF);
    tile_store<0>(o, ROW * 4), tile_store<1>(o + vec::W, ROW * 4);
    tile_store<2>(bottom, ROW * 4), tile_store<3>(bottom + vec::W, ROW * 4);
  }
}

// Of one tile of rows, 16 * sizeof...(C) dimensions.
template <bool AHEAD, int... C>
PD_INLINE void add_columns(float *o, const uint16_t *p, Columns first, Columns second, int64_t stride,
                           std::integer_sequence<int, C...>) {
  (tile_load<C>(o + C * vec::W, ROW * 4), ...);
  tile_load<4>(p, TILE * 2);
  (multiply_one<AHEAD, C>({first.at + C * 32, first.next + C * 32}, stride), ...);
  tile_load<4>(p + HALF, TILE * 2);
  (multiply_one<AHEAD, C>({second.at + C * 32, second.next + C * 32}, stride), ...);
  (tile_store<C>(o + C * vec::W, ROW * 4), ...);
}

template <bool AHEAD>
void add_one(float *o, const uint16_t *p, Columns first, Columns second, int head_dim) {
  const int64_t stride = head_dim * 2;
  auto from = [](Columns v, int h) { return Columns{v.at + h * 2, v.next + h * 2}; };
  int h = 0;
  for (; h + 64 <= head_dim; h += 64)
    add_columns<AHEAD>(o + h, p, from(first, h), from(second, h), stride, std::make_integer_sequence<int, 4>());
  if (h < head_dim)
    add_columns<AHEAD>(o + h, p, from(first, h), from(second, h), stride, std::make_integer_sequence<int, 2>());
}

// 2^x for x up to 8, to 9e-5: bf16 rounds it to 2e-3. A polynomial on [0, 1) by what x is above a whole number, times 2
// to that number. Exact at 0, 0 at minus infinity, NaN stays NaN.
PD_INLINE vec::F exp2_rounded(vec::F x) {
  const vec::F f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vec::F p = vec::fma(vec::set1(0.07706705f), f, vec::set1(0.227645f));
  p = vec::fma(p, f, vec::set1(0.69511676f));
  return _mm512_scalef_ps(vec::fma(p, f, vec::set1(1.f)), x);
}

template <bool MASKED, class Pass>
PD_INLINE vec::F logits_of_row(const Pass &x, int r, int c) {
  const float *const s = x.s + r * TILE + c * vec::W;
  if constexpr (!MASKED) return vec::load(s);
  return _mm512_mask_loadu_ps(vec::set1(-INFINITY), (__mmask16)(x.seen[r] >> (c * vec::W)), s);
}

template <bool MASKED, class Pass>
PD_INLINE vec::F top_lanes(const Pass &x, int r) {
  return vec::max(vec::max(logits_of_row<MASKED>(x, r, 0), logits_of_row<MASKED>(x, r, 1)),
                  vec::max(logits_of_row<MASKED>(x, r, 2), logits_of_row<MASKED>(x, r, 3)));
}

// A row's maximum rose.
template <class Pass>
[[gnu::noinline]] void raise(const Pass &x, int r, vec::F top_lanes, float scale, int head_dim) {
  const float top = scale * vec::reduce_max(top_lanes), m = x.m[r];
  x.m[r] = top;
  if (m == -INFINITY) return;  // nothing to rescale
  const vec::F w = vec::set1(vec::exp2_one(m - top));
  float *const o = x.o + r * ROW, *const l = x.l + r * vec::W;
  for (int d = 0; d < head_dim; d += vec::W) vec::store(o + d, vec::mul(w, vec::load(o + d)));
  vec::store(l, vec::mul(w, vec::load(l)));
}

// Logits to probabilities as V is to be multiplied, rows' maxima, their lanes' sums.
template <class T, bool MASKED, class Pass>
void soften(const Pass &x, uint16_t *p, float scale, int head_dim) {
  const vec::F log2_scale = vec::set1(scale), least = vec::set1(-FLT_MAX);
  const int rows = x.count;
  uint32_t rose = 0;
  for (int r = 0; r < rows; r++) {
    const vec::F above = vec::fms(top_lanes<MASKED>(x, r), log2_scale, vec::set1(x.m[r]));
    rose |= (uint32_t)(_mm512_cmp_ps_mask(above, vec::set1(8.f), _CMP_GT_OQ) != 0) << r;
  }
  for (; __builtin_expect(rose != 0, 0); rose &= rose - 1) {
    const int r = __builtin_ctz(rose);
    raise(x, r, top_lanes<MASKED>(x, r), scale, head_dim);
  }
  for (int r = 0; r < rows; r++) {
    vec::F e[NT];
    const vec::F shift = vec::max(vec::set1(x.m[r]), least);  // nothing seen yet: every probability is 0
#pragma GCC unroll 4
    for (int c = 0; c < NT; c++) e[c] = exp2_rounded(vec::fms(logits_of_row<MASKED>(x, r, c), log2_scale, shift));
    float *const l = x.l + r * vec::W;
    vec::store(l, vec::add(vec::load(l), vec::add(vec::add(e[0], e[1]), vec::add(e[2], e[3]))));
    if constexpr (SCALED<T>)
#pragma GCC unroll 4
      for (int c = 0; c < NT; c++) {
        const __mmask16 seen = MASKED ? (__mmask16)(x.seen[r] >> (c * vec::W)) : (__mmask16)-1;
        e[c] = vec::mul(e[c], _mm512_maskz_loadu_ps(seen, x.v_scale + c * vec::W));  // the scale may be NaN elsewhere
      }
    T::store_p(p + r * TILE, e[0], e[1]), T::store_p(p + r * TILE + HALF, e[2], e[3]);
  }
}

// Whether V is finite at the tokens that not all rows see (whole pairs of them).
template <class Pass>
bool is_finite_where_unseen(const Pass &x, int head_dim) {
  const int seen_from = (x.all_lo + 1) / 2, seen_to = x.all_hi / 2, line = head_dim * 2;
  __m512i top = _mm512_setzero_si512();
  for (int pair = 0; pair < TILE / 2; pair++) {
    if (pair >= seen_from && pair < seen_to) continue;
    const uint16_t *const v = x.v[pair / AMX_ROWS] + pair % AMX_ROWS * line;
    for (int i = 0; i < line; i += 32) top = _mm512_max_epu16(top, _mm512_slli_epi16(vec::load_raw(v + i), 1));
  }
  return !_mm512_cmpge_epu16_mask(top, _mm512_set1_epi16((int16_t)0xff00));  // the exponent without its sign
}

// V with zeros for tokens that are not seen.
template <class Pass>
void copy_seen(const Pass &x, uint64_t seen, int head_dim, uint16_t *to) {
  const int line = head_dim * 2;
  for (int pair = 0; pair < TILE / 2; pair++, to += line, seen >>= 2) {
    const uint16_t *const v = x.v[pair / AMX_ROWS] + pair % AMX_ROWS * line;
    const uint32_t kept = (seen & 1 ? 0xffffu : 0u) | (seen & 2 ? 0xffff0000u : 0u);
    for (int i = 0; i < line; i += 32) _mm512_storeu_si512(to + i, vec::and_raw(vec::load_raw(v + i), kept));
  }
}

// Rows that see the same, up to a tile of them at a time.
template <class Pass, class State>
void add_apart(const Pass &x, State &state, int head_dim) {
  for (int r = 0, end; r < x.count; r = end) {
    for (end = r + 1; end < x.count && end < r + x.height && x.seen[end] == x.seen[r];) end++;
    if (!x.seen[r]) continue;
    copy_seen(x, x.seen[r], head_dim, state.apart_v);
    memcpy(state.apart_p, state.p + r * TILE, (end - r) * TILE * sizeof(uint16_t));
    for (int i = r; i < end; i++) memcpy(state.apart_o + (i - r) * ROW, x.o + i * ROW, head_dim * sizeof(float));
    add_one<false>(state.apart_o, state.apart_p, {state.apart_v, state.apart_v},
                   {state.apart_v + HALF * head_dim, state.apart_v}, head_dim);
    for (int i = r; i < end; i++) memcpy(x.o + i * ROW, state.apart_o + (i - r) * ROW, head_dim * sizeof(float));
  }
}

template <class T>
void OnUnit<T>::finish(const RowArgs<Q> &a, const Pass &x, State &state) {
  if constexpr (SCALED<T>)
    for (int i = 0; i < x.count * TILE; i += vec::W)
      vec::store(x.s + i, vec::mul(vec::load(x.s + i), vec::load(x.k_scale + i % TILE)));
  if (__builtin_expect(a.soft_cap > 0, 0)) cap_logits(x.s, x.count * TILE, a.soft_cap, a.inner_scale);
  (x.masked ? soften<T, true, Pass> : soften<T, false, Pass>)(x, state.p, a.scale, a.head_dim);
  if constexpr (!SCALED<T>)  // bytes are finite
    if (x.masked && !is_finite_where_unseen(x, a.head_dim)) return add_apart(x, state, a.head_dim);
  if (x.count > x.height)
    (x.ahead ? add_two<true, Pass> : add_two<false, Pass>)(x, state.p, a.head_dim);
  else
    (x.ahead ? add_one<true> : add_one<false>)(x.o, state.p, {x.v[0], x.next_v[0]}, {x.v[1], x.next_v[1]}, a.head_dim);
}
#endif

}  // namespace pagedec
