// The matrix unit's registers (AMX): eight tiles of up to 16 rows of up to 64 bytes. Tiles are given their shapes, and released, inside a
// kernel: nothing of them is left to others.
#pragma once
#include <cstdint>

#include "common/internal.h"

namespace pagedec {

constexpr int AMX_ROWS = 16;  // of a tile

#if PD_LEVEL >= 4
struct alignas(64) AmxShapes {  // as the processor reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int bytes) { rows[tile] = (uint8_t)num_rows, row_bytes[tile] = (uint16_t)bytes; }
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// Written out: the compiler's own take no template's numbers, and its load does not say that it reads memory.
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
#else  // never called: what calls it is left out by if constexpr
PD_INLINE void amx_release() {}
#endif

}  // namespace pagedec
