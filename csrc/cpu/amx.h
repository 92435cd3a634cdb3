// The matrix unit's registers (AMX): eight tiles of up to 16 rows of up to 64 bytes. Tiles are given their shapes, and
// released, inside a kernel: nothing of them is left to others.
#pragma once
#include <cstdint>

#include "common/internal.h"
#ifdef PD_WITH_OR_WITHOUT_UNIT
#error "this file is compiled once for the unit and for its emulation: name it in PAGEDEC_UNIT_SOURCES (CMakeLists.txt)"
#endif
#ifdef PD_EMULATE_AMX  // a library for tests: the unit's instructions are functions
#include "cpu/amx_emulation.h"
#endif

namespace pagedec {

constexpr bool HAS_AMX = PD_LEVEL >= 4;
constexpr int AMX_ROWS = 16;  // of a tile

#if PD_LEVEL >= 4
struct alignas(64) AmxShapes {  // as the processor reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int bytes) { rows[tile] = (uint8_t)num_rows, row_bytes[tile] = (uint16_t)bytes; }
};
#endif

#if PD_LEVEL < 4  // never called: what calls it is left out by if constexpr
PD_INLINE void amx_configure(int, int = 16) {}
PD_INLINE void amx_release() {}

#elif defined(PD_EMULATE_AMX)
PD_INLINE void load_shapes(const AmxShapes &shapes) { emulation::ldtilecfg(&shapes); }
template <int T>
PD_INLINE void tile_zero() {
  emulation::tilezero(T);
}
template <int T>
PD_INLINE void tile_load(const void *p, int64_t stride) {
  emulation::tileloadd(T, p, stride);
}
template <int T>
PD_INLINE void tile_store(void *p, int64_t stride) {
  emulation::tilestored(T, p, stride);
}
template <bool INT8, int SUM, int X, int W>
PD_INLINE void tile_multiply() {
  INT8 ? emulation::tdpbsud(SUM, X, W) : emulation::tdpbf16ps(SUM, X, W);
}
PD_INLINE void amx_release() { emulation::tilerelease(); }

#else
// Written out: the compiler's own take no template's numbers, and its load does not say that it reads memory.
PD_INLINE void load_shapes(const AmxShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
template <int T>
PD_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
PD_INLINE void tile_load(const void *p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
PD_INLINE void tile_store(void *p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <bool INT8, int SUM, int X, int W>
PD_INLINE void tile_multiply() {  // bytes: signed x, unsigned weights
  if constexpr (INT8) asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}
PD_INLINE void amx_release() { asm volatile("tilerelease"); }
#endif

#if PD_LEVEL >= 4
// Tiles 0 to 3 are sums, 4 and 5 two tiles of rows (sums 0, 1 and 2, 3), so many words each, 6 and 7 the columns that
// these meet.
PD_INLINE void amx_configure(int height, int words = 16) {
  AmxShapes shapes;
  for (int i = 0; i < 4; i++) shapes.set(i, height, 64);
  for (int i = 4; i < 6; i++) shapes.set(i, height, words * 4);
  for (int i = 6; i < 8; i++) shapes.set(i, words, 64);
  load_shapes(shapes);
}
#endif

}  // namespace pagedec
