// The inner loop: a few packed rows against one tile of 64 positions. It exists once; a trait says how a cache dtype is
// read.
//   QK^T  an accumulator lane is one token's logit: no horizontal sums. One chain over the head's dimensions.
//   PV    an accumulator lane is one dimension. One chain over the tile's positions, in order.
// A row's operations are the same whichever rows are computed beside it. A masked position is as absent: its logit
// becomes minus infinity, its probability exactly 0, and its V is never multiplied, since stale memory may hold NaN.
#pragma once
#include <algorithm>

#include "cpu/attention.h"
#include "cpu/vec.h"

namespace pagedec {

// STEP: dimensions of K, or tokens of V, that lie side by side. SUB: fused multiply-adds that one step takes.
#if PD_LEVEL >= 3
struct Bf16 {
  using E = uint16_t;  // element of q and of the output
  using C = E;         // of the cache
  using M = E;         // of a tile
  using Q = uint16_t;  // element of a query row or of the probabilities
  using X = vec::I;    // a multiplicand
  using B = vec::I;
  static constexpr int STEP = 2, SUB = 1;
  static constexpr bool PRECISE = false;
  PD_INLINE vec::I load(const M *p) { return vec::load_raw(p); }
  PD_INLINE X part(vec::I raw, int) { return raw; }
  PD_INLINE B broadcast(const Q *p, int) { int32_t x; memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
  PD_INLINE vec::F mac(X x, B b, vec::F acc) { return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)b); }
  PD_INLINE vec::I keep(vec::I raw, int visible) {
    return vec::and_raw(raw, visible == 1 ? 0xffffu : visible == 2 ? 0xffff0000u : ~0u);
  }
  PD_INLINE void store_p(Q *p, vec::F a, vec::F b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }
  PD_INLINE Q query(E x) { return x; }
  PD_INLINE void store_out(E *p, vec::F x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
};
#else
struct Bf16 {
  using E = uint16_t;
  using C = E;
  using M = E;
  using Q = float;
  using X = vec::F;
  using B = vec::F;
  static constexpr int STEP = 2, SUB = 2;
  static constexpr bool PRECISE = false;
  PD_INLINE vec::I load(const M *p) { return vec::load_raw(p); }
  PD_INLINE X part(vec::I raw, int sub) { return sub ? vec::high_half(raw) : vec::low_half(raw); }
  PD_INLINE B broadcast(const Q *p, int sub) { return vec::set1(p[sub]); }
  PD_INLINE vec::F mac(X x, B b, vec::F acc) { return vec::fma(x, b, acc); }
  PD_INLINE vec::I keep(vec::I raw, int visible) {
    return vec::and_raw(raw, visible == 1 ? 0xffffu : visible == 2 ? 0xffff0000u : ~0u);
  }
  PD_INLINE void store_p(Q *p, vec::F a, vec::F b) { vec::store(p, a), vec::store(p + vec::W, b); }
  PD_INLINE Q query(E x) { return vec::from_bf16(x); }
  PD_INLINE void store_out(E *p, vec::F x) {
    float f[vec::W];
    vec::store(f, x);
    for (int i = 0; i < vec::W; i++) p[i] = vec::to_bf16(f[i]);
  }
};
#endif

struct Fp32 {
  using E = float;
  using C = E;
  using M = E;
  using Q = float;
  using X = vec::F;
  using B = vec::F;
  static constexpr int STEP = 1, SUB = 1;
  static constexpr bool PRECISE = true;
  PD_INLINE vec::I load(const M *p) { return vec::load_raw(p); }
  PD_INLINE X part(vec::I raw, int) { return (vec::F)raw; }
  PD_INLINE B broadcast(const Q *p, int) { return vec::set1(*p); }
  PD_INLINE vec::F mac(X x, B b, vec::F acc) { return vec::fma(x, b, acc); }
  PD_INLINE vec::I keep(vec::I raw, int) { return raw; }
  PD_INLINE void store_p(Q *p, vec::F a, vec::F b) { vec::store(p, a), vec::store(p + vec::W, b); }
  PD_INLINE Q query(E x) { return x; }
  PD_INLINE void store_out(E *p, vec::F x) { vec::store(p, x); }
};

// A cache of bytes, widened before its tiles, or for few rows in registers (widen.h). Scales are by lane: K's meet
// logits, V's probabilities.
template <class T>
struct OfBytes : T {
  using C = uint8_t;
};
template <class T>
constexpr bool SCALED = sizeof(typename T::C) != sizeof(typename T::E);

// A matrix unit that takes every tile, where there is one (attention_amx.h).
template <class T>
struct MatrixUnit {
  static constexpr bool EXIST = false;
  struct Pass {};
  struct State {};
};
constexpr int HALF = TILE / 2;  // tokens of V that one instruction of it sums

constexpr int NC = PD_LEVEL >= 2 ? 4 : 2;  // vectors side by side: with 6 rows 24 of 32 accumulators, or 12 of 16
constexpr int NT = TILE / vec::W;

template <bool PREFETCH>
PD_INLINE void prefetch(const void *p) {
  if constexpr (PREFETCH)
    __builtin_prefetch(p, 0, 2);  // into L2: into L1 is no better than none (13.6 against 18-19 GB/s on one core)
}

// The sums of products stay in registers, which is all that these hold: gcc 12 would keep five of AVX2's twelve in
// memory, and a tile took half as long again. So a loop is a function of its own, a row's products are written out, and
// a vector that has two parts is loaded for each. Steps of V that rows see in parts are few, and not written so.
#if PD_LEVEL == 1 || PD_LEVEL == 2
#define PD_LOOP inline __attribute__((noinline))
constexpr int UNROLL = 1;
#else
#define PD_LOOP PD_INLINE
constexpr int UNROLL = 2;
#endif

// acc[c] += x[c] * p of a row
template <class T, int N>
PD_INLINE void add_products(const typename T::X (&x)[N], const typename T::Q *p, int sub, vec::F (&acc)[N]) {
#if (PD_LEVEL == 1 || PD_LEVEL == 2) && !defined(PD_EMULATE_VECTORS)
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N > 1) {
    vec::F b;
    asm volatile("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
        : "+&v"(acc[0]), "+&v"(acc[1]), "=&v"(b)
        : "m"(p[sub]), "v"(x[0]), "v"(x[1]));
    if constexpr (N == 4)
      asm volatile("vfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
          : "+&v"(acc[2]), "+&v"(acc[3])
          : "v"(b), "v"(x[2]), "v"(x[3]));
    return;
  }
#endif
  const typename T::B b = T::broadcast(p, sub);
#pragma GCC unroll 4
  for (int c = 0; c < N; c++) acc[c] = T::mac(x[c], b, acc[c]);
}

template <class T, int N>
PD_INLINE void load_parts(const typename T::M *const (&from)[N], int sub, typename T::X (&x)[N]) {
#pragma GCC unroll 4
  for (int c = 0; c < N; c++) {
    const typename T::M *p = from[c];
#if PD_LEVEL == 1 || PD_LEVEL == 2
    if (sub) asm("" : "+r"(p));  // as another, so that what is loaded is not kept for it
#endif
    x[c] = T::part(T::load(p), sub);
  }
}

// Of lanes from .. to-1: the others are seen by no row.
template <class T, int R, bool PREFETCH>
PD_LOOP void logits(const TileArgs<T> &a, int from, int to, vec::F (&s)[R][NT]) {
  const int steps = a.head_dim / T::STEP;
  const int64_t stride = a.k_stride;
  const typename T::Q *const query = a.q;
  for (int g = 0; g < NT; g += NC) {
    vec::F acc[R][NC];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < NC; c++) acc[r][c] = vec::zero();
    const bool seen = NC == NT || (g * vec::W < to && (g + NC) * vec::W > from);
#pragma GCC unroll UNROLL
    for (int d = 0; seen && d < steps; d++) {
      const typename T::M *k[NC];
#pragma GCC unroll 4
      for (int c = 0; c < NC; c++) {
        k[c] = a.k[g + c] + d * stride;
        prefetch<PREFETCH>(a.next_k[g + c] + d * stride);
      }
#pragma GCC unroll 2
      for (int sub = 0; sub < T::SUB; sub++) {
        typename T::X x[NC];
        load_parts<T>(k, sub, x);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add_products<T>(x, query + r * ROW + d * T::STEP, sub, acc[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < NC; c++) s[r][g + c] = acc[r][c];
  }
}

inline __attribute__((noinline)) void cap_logits(float *s, int n, float soft_cap, float inner_scale) {
  for (int i = 0; i < n; i += vec::W)
    vec::store(s + i, vec::mul(vec::set1(soft_cap), vec::tanh(vec::mul(vec::load(s + i), vec::set1(inner_scale)))));
}

// A row's logits to probabilities, its maximum m, its lane sums l; o is rescaled only when the maximum rose by more
// than 2^8.
template <class T>
PD_INLINE void softmax(vec::F (&s)[NT], float scale, float *o, int head_dim, float *l, float &max_so_far) {
  using namespace vec;
  F top_lanes = s[0], sum = load(l);
#pragma GCC unroll 16
  for (int c = 1; c < NT; c++) top_lanes = vec::max(top_lanes, s[c]);
  const float top = scale * reduce_max(top_lanes);
  float m = max_so_far;
  if (__builtin_expect(top > m + 8.f, 0)) {
    const F w = set1(exp2_one(m - top));
    for (int d = 0; d < head_dim; d += W) store(o + d, mul(w, load(o + d)));
    sum = mul(sum, w);
    max_so_far = m = top;
  }
  const F log2_scale = set1(scale), shift = set1(m == -INFINITY ? 0.f : m);  // nothing seen yet: every probability is 0
#pragma GCC unroll 16
  for (int c = 0; c < NT; c++) {
    s[c] = vec::exp2<T::PRECISE>(fms(s[c], log2_scale, shift));
    sum = add(sum, s[c]);
  }
  store(l, sum);
}

template <class T>
PD_INLINE void scale_logits(vec::F (&s)[NT], const TileArgs<T> &a) {
  if constexpr (SCALED<T>)
#pragma GCC unroll 16
    for (int c = 0; c < NT; c++) s[c] = vec::mul(s[c], vec::load(a.k_scale + c * vec::W));
}

// As V is to be multiplied. Of lanes outside lo .. hi-1 the scale may be anything: it counts as 0, as p is there.
template <class T, bool MASKED>
PD_INLINE void store_probabilities(vec::F (&s)[NT], const TileArgs<T> &a, int lo, int hi, typename T::Q *p) {
  if constexpr (SCALED<T>)
#pragma GCC unroll 16
    for (int c = 0; c < NT; c++) {
      const vec::F scale = vec::load(a.v_scale + c * vec::W);
      s[c] = vec::mul(s[c], MASKED ? vec::keep_lanes(scale, lo - vec::W * c, hi - vec::W * c, 0.f) : scale);
    }
#pragma GCC unroll 16
  for (int c = 0; c < NT; c += 2) T::store_p(p + vec::W * c, s[c], s[c + 1]);
}

// One step of V (STEP tokens) for all rows; `rows` != NULL: only those that see it, and of it only what they see.
template <class T, int R, int NV, bool PREFETCH>
PD_INLINE void pv_step(const typename T::M *v, const typename T::M *next, const typename T::Q *p, const uint8_t *rows,
                       vec::F (&acc)[R][NV]) {
  const typename T::M *from[NV];
#pragma GCC unroll 4
  for (int c = 0; c < NV; c++) {
    from[c] = v + c * vec::W * T::STEP;
    prefetch<PREFETCH>(next + c * vec::W * T::STEP);
  }
  if (rows) {
    vec::I raw[NV];
#pragma GCC unroll 4
    for (int c = 0; c < NV; c++) raw[c] = T::load(from[c]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      if (!rows[r]) continue;
#pragma GCC unroll 2
      for (int sub = 0; sub < T::SUB; sub++)
#pragma GCC unroll 4
        for (int c = 0; c < NV; c++)
          acc[r][c] = T::mac(T::part(T::keep(raw[c], rows[r]), sub), T::broadcast(p + r * TILE, sub), acc[r][c]);
    }
    return;
  }
#pragma GCC unroll 2
  for (int sub = 0; sub < T::SUB; sub++) {
    typename T::X x[NV];
    load_parts<T>(from, sub, x);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) add_products<T>(x, p + r * TILE, sub, acc[r]);
  }
}

struct Steps {  // of V, in a masked tile: [first, last) are seen by some row, [all_first, all_last) whole by all
  int first, last, all_first, all_last;
  uint8_t visible[TILE][8];  // by step and row: bit i: token i of the step is seen
};

template <class T, int R, int NV, bool MASKED, bool PREFETCH>
PD_LOOP void pv_columns(const TileArgs<T> &a, const typename T::Q *p, const Steps &steps, int h) {
  float *const o = a.o + h;
  vec::F acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < NV; c++) acc[r][c] = vec::load(o + r * ROW + vec::W * c);
  const int per_block = a.block_size / T::STEP;
  const int64_t stride = (int64_t)a.head_dim * T::STEP;
  if (!MASKED) {
    // What is to come is fetched in the order in which it lies in memory, this column's share of it.
    // Where no whole number of shares is a block the last of them ends behind it: AVX-512, head sizes off 64.
    const int of_block = a.block_size * a.head_dim;
    int block = h * TILE / of_block, at = h * TILE % of_block;
    for (int b = 0; b * a.block_size < TILE; b++) {
      const typename T::M *v = a.v[b] + T::STEP * h, *n = a.next_v[block] + at;
      const typename T::Q *pb = p + b * a.block_size;
#pragma GCC unroll UNROLL
      for (int t = 0; t < per_block; t++)
        pv_step<T, R, NV, PREFETCH>(v + t * stride, n + t * NV * vec::W * T::STEP, pb + t * T::STEP, nullptr, acc);
      if ((at += a.block_size * NV * vec::W) >= of_block) at -= of_block, block++;
    }
  } else {
    const int shift = __builtin_ctz(per_block);  // block sizes are powers of 2
    auto at = [&](int t) { return a.v[t >> shift] + (t & (per_block - 1)) * stride + T::STEP * h; };
    int t = steps.first;
    for (; t < std::min(steps.all_first, steps.last); t++)
      pv_step<T, R, NV, false>(at(t), nullptr, p + t * T::STEP, steps.visible[t], acc);
    for (; t < steps.all_last; t++) pv_step<T, R, NV, false>(at(t), nullptr, p + t * T::STEP, nullptr, acc);
    for (; t < steps.last; t++) pv_step<T, R, NV, false>(at(t), nullptr, p + t * T::STEP, steps.visible[t], acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < NV; c++) vec::store(o + r * ROW + vec::W * c, acc[r][c]);
}

template <class T, int R>
PD_INLINE void find_steps(const TileArgs<T> &a, Steps &s) {
  constexpr int N = TILE / T::STEP;
  s.first = N, s.last = 0, s.all_first = 0, s.all_last = N;
  for (int r = 0; r < R; r++) {
    if (a.lo[r] >= a.hi[r]) {  // this row sees nothing here
      s.all_last = 0;
      continue;
    }
    s.first = std::min(s.first, a.lo[r] / T::STEP);
    s.last = std::max(s.last, (a.hi[r] + T::STEP - 1) / T::STEP);
    s.all_first = std::max(s.all_first, (a.lo[r] + T::STEP - 1) / T::STEP);
    s.all_last = std::min(s.all_last, a.hi[r] / T::STEP);
  }
  for (int t = s.first; t < s.last; t++)
    if (t < s.all_first || t >= s.all_last)
      for (int r = 0; r < R; r++) {
        s.visible[t][r] = 0;
        for (int i = 0; i < T::STEP; i++)
          if (t * T::STEP + i >= a.lo[r] && t * T::STEP + i < a.hi[r]) s.visible[t][r] |= 1 << i;
      }
}

// R rows against a tile. q [R][ROW], o [R][ROW], l [R][W], m [R] in units of log 2; MASKED: row r sees lanes lo[r] ..
// hi[r]-1.
template <class T, int R, bool MASKED, bool PREFETCH>
void attend(const TileArgs<T> &a) {
  alignas(64) typename T::Q p[R * TILE];
  {
    vec::F s[R][NT];
    const int from = MASKED ? *std::min_element(a.lo, a.lo + R) : 0;
    logits<T, R, PREFETCH>(a, from, MASKED ? *std::max_element(a.hi, a.hi + R) : TILE, s);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) scale_logits(s[r], a);
    if (__builtin_expect(a.soft_cap > 0, 0)) {
      alignas(64) float flat[R * TILE];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < NT; c++) vec::store(flat + r * TILE + c * vec::W, s[r][c]);
      cap_logits(flat, R * TILE, a.soft_cap, a.inner_scale);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < NT; c++) s[r][c] = vec::load(flat + r * TILE + c * vec::W);
    }
    float *const o = a.o, *const l = a.l, *const m = a.m;
    const float scale = a.scale;
    const int head_dim = a.head_dim;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      if (MASKED)
#pragma GCC unroll 16
        for (int c = 0; c < NT; c++)
          s[r][c] = vec::keep_lanes(s[r][c], a.lo[r] - vec::W * c, a.hi[r] - vec::W * c, -INFINITY);
      softmax<T>(s[r], scale, o + r * ROW, head_dim, l + r * vec::W, m[r]);
      store_probabilities<T, MASKED>(s[r], a, MASKED ? a.lo[r] : 0, MASKED ? a.hi[r] : TILE, p + r * TILE);
    }
  }
  Steps steps;
  if (MASKED) {
    find_steps<T, R>(a, steps);  // and prefetch V apart from its loops, which read no more than is seen
    const int lines = a.block_size * a.head_dim * (int)sizeof(typename T::M) / 64;
    for (int b = 0; a.ahead && b * a.block_size < TILE; b++)
      for (int i = 0; i < lines; i++) prefetch<true>((const char *)a.next_v[b] + 64 * i);
  }
  int h = 0;
  for (; h + NC * vec::W <= a.head_dim; h += NC * vec::W) pv_columns<T, R, NC, MASKED, PREFETCH>(a, p, steps, h);
  if constexpr (NC * vec::W > 16)  // head sizes are multiples of 16
    for (; h < a.head_dim; h += vec::W) pv_columns<T, R, 1, MASKED, PREFETCH>(a, p, steps, h);
}

}  // namespace pagedec
