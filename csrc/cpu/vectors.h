// The processor's vectors: the compiler's intrinsics, or for tests functions by their names (vector_emulation.h).
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/internal.h"
#ifdef PD_EMULATE_VECTORS
#include "cpu/vector_emulation.h"
#endif

namespace pagedec {

#if PD_LEVEL >= 2
// sum += four products of each word's unsigned w and signed x
PD_INLINE void add_dots_of_bytes(__m512i &sum, __m512i w, __m512i x) {
#ifdef PD_EMULATE_VECTORS
  sum = _mm512_dpbusd_epi32(sum, w, x);
#else  // written out: whether there is this instruction is known when the program runs
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#endif
}
#endif

}  // namespace pagedec
