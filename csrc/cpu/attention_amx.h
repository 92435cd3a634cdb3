// A tile that rows see whole, on the matrix unit: up to 16 rows at once.
//
// K and V lie in the cache as the unit takes them: pairs of dimensions by token, pairs of tokens by dimension. Whether
// a row sees a tile whole follows from its positions alone. So does, then, which way its sums take (this one, or
// attention_tile.h), and its bits do not depend on the rows beside it.
//
// An instruction sums the pairs that it is given and adds that to what was there, so their number shows in the bits. It
// is 16 pairs of dimensions of K, and of V always the pairs of 16 tokens: a part of a longer block, and shorter blocks
// are joined (attention_loop.h).
#pragma once
#include "cpu/amx.h"
#include "cpu/attention_tile.h"

namespace pagedec {

#if PD_LEVEL >= 4
constexpr int V_PAIRS = 8;

// The tile of a later unit that lies where this one's was loaded: a few lines beside each load, not all of them at
// once.
PD_INLINE void prefetch_tile(bool ahead, const uint16_t *p, int64_t stride, int rows) {
  for (int i = 0; ahead && i < rows; i++) prefetch<true>(p + i * stride);
}

template <class T, int... C>
PD_INLINE void multiply_k(const TileArgs<T> &a, int pair, std::integer_sequence<int, C...>) {
  const int64_t stride = a.k_stride;  // elements
  ((tile_load<5>(a.k[C] + pair * stride, stride * 2), tile_multiply<false, C, 4, 5>(),
    prefetch_tile(a.ahead, a.next_k[C] + pair * stride, stride, AMX_ROWS)), ...);
}

// Dimensions h .. h + 16 * sizeof...(C) of o += P V.
template <class T, int... C>
PD_INLINE void multiply_v(const TileArgs<T> &a, const uint16_t *p, int h, std::integer_sequence<int, C...>) {
  const int64_t stride = a.head_dim * 2;  // elements from pair to pair
  float *const o = a.o + h;
  (tile_load<C>(o + C * 16, ROW * 4), ...);
  for (int b = 0; b * a.block_size < TILE; b++)
    for (int pair = 0; pair < a.block_size / 2; pair += V_PAIRS) {
      const int64_t at = pair * stride + h * 2;
      tile_load<6>(p + b * a.block_size + pair * 2, TILE * 2);
      ((tile_load<7>(a.v[b] + at + C * 32, stride * 2), tile_multiply<false, C, 6, 7>(),
        prefetch_tile(a.ahead, a.next_v[b] + at + C * 32, stride, V_PAIRS)), ...);
    }
  (tile_store<C>(o + C * 16, ROW * 4), ...);
}

// Tiles 0 to 3 are sums, 4 is of q, 5 of K, 6 of the probabilities, 7 of V.
template <class T>
struct UnitTiles {
  static constexpr bool EXIST = true;
  static constexpr int ROWS = AMX_ROWS, TOKENS = V_PAIRS * 2;
  static bool take(int head_dim) { return head_dim % 32 == 0; }  // dimensions that one instruction sums
  static void configure(int rows) {
    AmxShapes shapes;
    for (int i = 0; i < 5; i++) shapes.set(i, rows, 64);
    shapes.set(5, AMX_ROWS, 64), shapes.set(6, rows, V_PAIRS * 4), shapes.set(7, V_PAIRS, 64);
    load_shapes(shapes);
  }
    static void attend(const TileArgs<T> &a, int rows);
  static void release() { amx_release(); }
};
template <>
struct WholeTiles<Bf16> : UnitTiles<Bf16> {};
template <>
struct WholeTiles<OfBytes<Bf16>> : UnitTiles<OfBytes<Bf16>> {};

template <class T>
void UnitTiles<T>::attend(const TileArgs<T> &a, int rows) {
  alignas(64) float s[AMX_ROWS][TILE];
  alignas(64) uint16_t p[AMX_ROWS * TILE];
  static_assert(NT == 4);
  using Four = std::make_integer_sequence<int, 4>;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int pair = 0; pair < a.head_dim / 2; pair += AMX_ROWS) {
    tile_load<4>(a.q + pair * 2, ROW * 2);
    multiply_k(a, pair, Four());
  }
  tile_store<0>(s[0], TILE * 4), tile_store<1>(s[0] + 16, TILE * 4), tile_store<2>(s[0] + 32, TILE * 4),
      tile_store<3>(s[0] + 48, TILE * 4);
  if constexpr (SCALED<T>)
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < TILE; i += vec::W)
        vec::store(s[r] + i, vec::mul(vec::load(s[r] + i), vec::load(a.k_scale + i)));
  if (__builtin_expect(a.soft_cap > 0, 0)) cap_logits(s[0], rows * TILE, a.soft_cap, a.inner_scale);
  for (int r = 0; r < rows; r++) {
    vec::F lanes[NT];
#pragma GCC unroll 4
    for (int c = 0; c < NT; c++) lanes[c] = vec::load(s[r] + c * vec::W);
    softmax<T>(lanes, a.scale, a.o + r * ROW, a.head_dim, a.l + r * vec::W, a.m[r]);
    store_probabilities<T, false>(lanes, a, 0, TILE, p + r * TILE);
  }
  int h = 0;
  for (; h + 64 <= a.head_dim; h += 64) multiply_v<T>(a, p, h, Four());
  if (h < a.head_dim) multiply_v<T>(a, p, h, std::make_integer_sequence<int, 2>());
}
#endif

}  // namespace pagedec
