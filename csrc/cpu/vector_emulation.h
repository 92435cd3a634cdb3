// AVX-512's instructions as functions for a processor that has AVX2, bit for bit as Intel's manual has them (Software
// Developer's Manual, volume 2): kernels written with the compiler's intrinsics run, slowly, where there are none. Here
// are those that the kernels use. In this namespace they, and the types, hide the compiler's own of the same names.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/internal.h"

namespace pagedec {

// A compiler may have some of them as macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_extracti64x4_epi64
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_ternarylogic_epi32
#undef _mm512_ternarylogic_epi64

struct __m512;
struct __m512i {
  __m256i lo, hi;
  __attribute__((always_inline)) inline explicit operator __m512() const;
};
struct __m512 {
  __m256 lo, hi;
  __attribute__((always_inline)) inline explicit operator __m512i() const;
};
inline __m512i::operator __m512() const { return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)}; }
inline __m512::operator __m512i() const { return {_mm256_castps_si256(lo), _mm256_castps_si256(hi)}; }
using __m512bh = __m512i;
using __m256bh = __m256i;

namespace emulation {

// What a processor answers with #GP, and what no kernel asks for.
[[noreturn, gnu::cold]] inline void refuse_vector(const char *instruction, const char *why) {
  fprintf(stderr, "pagedec: the emulated vectors refuse %s: %s\n", instruction, why);
  abort();
}
PD_INLINE void check_aligned(const char *instruction, const void *p) {
  if ((uintptr_t)p % 64) refuse_vector(instruction, "its address is no multiple of 64 (#GP)");
}

// Of each bit of a mask all bits of its lane.
PD_INLINE __m256i lanes_of(uint32_t mask) {  // eight lanes of 32 bits
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bit), bit);
}
PD_INLINE __m256i bytes_of(uint32_t mask) {  // 32 lanes of 8
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
  return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)mask), byte), bit), bit);
}
PD_INLINE __m256 select(uint32_t mask, __m256 yes, __m256 no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(lanes_of(mask)));
}
PD_INLINE __m512 select(uint32_t mask, __m512 yes, __m512 no) {
  return {select(mask, yes.lo, no.lo), select(mask >> 8, yes.hi, no.hi)};
}

PD_INLINE __m256 round_half(__m256 a, int how) {
  switch (how & 7) {
    case 0: return _mm256_round_ps(a, 0 | _MM_FROUND_NO_EXC);
    case 1: return _mm256_round_ps(a, 1 | _MM_FROUND_NO_EXC);
    case 2: return _mm256_round_ps(a, 2 | _MM_FROUND_NO_EXC);
    case 3: return _mm256_round_ps(a, 3 | _MM_FROUND_NO_EXC);
    default: return _mm256_round_ps(a, _MM_FROUND_CUR_DIRECTION | _MM_FROUND_NO_EXC);
  }
}

// VREDUCEPS: a less its whole part, rounded in the same direction. Nothing is left of infinity.
PD_INLINE __m256 reduce_half(__m256 a, int how) {
  const uint32_t before = _mm_getcsr();
  const uint32_t own = (how & 4 ? before : (before & ~0x6000u) | (uint32_t)(how & 3) << 13) | 0x1f80;
  __m256 rest = a;
  const __m256 whole = round_half(a, how);
  asm("vldmxcsr %2\n\tvsubps %1, %0, %0\n\tvldmxcsr %3" : "+&x"(rest) : "x"(whole), "m"(own), "m"(before));
  const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.f), a), infinity = _mm256_set1_ps(__builtin_inff());
  return _mm256_andnot_ps(_mm256_cmp_ps(magnitude, infinity, _CMP_EQ_OQ), rest);
}

// VSCALEFPS: the product is exact in double precision, so it is rounded once. By infinity it is infinity or zero, and
// that of a quiet NaN, too.
PD_INLINE __m128 scale_quarter(__m128 a, __m128 b) {
  const __m128 limit = _mm_set1_ps(500.f), least = _mm_set1_ps(-500.f), infinity = _mm_set1_ps(__builtin_inff());
  const __m128 none = _mm_set1_ps(-0.f), zero = _mm_setzero_ps();
  const __m256i power = _mm256_cvtepi32_epi64(_mm_cvttps_epi32(_mm_max_ps(_mm_min_ps(_mm_floor_ps(b), limit), least)));
  const __m256d by = _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_add_epi64(power, _mm256_set1_epi64x(1023)), 52));
  __m128 product = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtps_pd(a), by));
  const __m128 up = _mm_cmpeq_ps(b, infinity), down = _mm_cmpeq_ps(b, _mm_xor_ps(infinity, none));
  const __m128 is_infinite = _mm_cmpeq_ps(_mm_andnot_ps(none, a), infinity), is_zero = _mm_cmpeq_ps(a, zero);
  const __m128 undefined = _mm_or_ps(_mm_and_ps(is_infinite, down), _mm_and_ps(is_zero, up));
  product = _mm_blendv_ps(product, _mm_castsi128_ps(_mm_set1_epi32((int)0xffc00000)), undefined);
  const __m128 quiet = _mm_castsi128_ps(_mm_set1_epi32(0x00400000));  // the bit that says so
  const __m128 is_quiet = _mm_and_ps(_mm_cmpunord_ps(a, a), _mm_castsi128_ps(_mm_slli_epi32(_mm_castps_si128(a), 9)));
  product = _mm_blendv_ps(product, _mm_and_ps(up, infinity), _mm_and_ps(is_quiet, _mm_or_ps(up, down)));
  const __m128 other = _mm_andnot_ps(_mm_cmpunord_ps(a, a), _mm_cmpunord_ps(b, b));
  return _mm_blendv_ps(product, _mm_or_ps(b, quiet), other);
}
PD_INLINE __m256 scale_half(__m256 a, __m256 b) {
  return _mm256_set_m128(scale_quarter(_mm256_extractf128_ps(a, 1), _mm256_extractf128_ps(b, 1)),
                         scale_quarter(_mm256_castps256_ps128(a), _mm256_castps256_ps128(b)));
}

// VDPBF16PS: of each pair the odd product is added first, then the even one, each unrounded. The rounding is the
// instruction's own, whatever the thread's: to nearest even, denormals are zeros on the way in and out, no exception is
// noted.
PD_INLINE __m512 dots_of_pairs(__m512 sum, __m512i a, __m512i b) {
  static constexpr uint32_t own = 0x9fc0;
  const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
  uint32_t before;
  asm("vstmxcsr %2\n\tvldmxcsr %3\n\t"
      "vfmadd231ps %6, %4, %0\n\tvfmadd231ps %7, %5, %1\n\tvfmadd231ps %10, %8, %0\n\tvfmadd231ps %11, %9, %1\n\t"
      "vldmxcsr %2"
      : "+&x"(sum.lo), "+&x"(sum.hi), "=&m"(before)
      : "m"(own), "x"(_mm256_and_si256(a.lo, odd)), "x"(_mm256_and_si256(a.hi, odd)),
        "x"(_mm256_and_si256(b.lo, odd)), "x"(_mm256_and_si256(b.hi, odd)), "x"(_mm256_slli_epi32(a.lo, 16)),
        "x"(_mm256_slli_epi32(a.hi, 16)), "x"(_mm256_slli_epi32(b.lo, 16)), "x"(_mm256_slli_epi32(b.hi, 16)));
  return sum;
}

// To bf16, in words of 32 bits: to nearest even whatever the thread's rounding, denormals to zero, a NaN is quiet.
PD_INLINE __m256i bf16_words(__m256 a) {
  const __m256i u = _mm256_castps_si256(a), upper = _mm256_srli_epi32(u, 16), one = _mm256_set1_epi32(1);
  const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(upper, one));
  const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
  const __m256i size = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i is_nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), size);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i number = _mm256_blendv_epi8(nearest, _mm256_and_si256(upper, _mm256_set1_epi32(0x8000)), is_small);
  return _mm256_blendv_epi8(number, quiet, is_nan);
}
PD_INLINE __m256i lower_halves(__m256i a, __m256i b) {  // of 32 bits, in order
  const __m256i low = _mm256_set1_epi32(0xffff);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low)), 0xd8);
}

// Four products of unsigned and signed bytes, and a sum: nothing saturates.
PD_INLINE __m256i dots_of_bytes(__m256i sum, __m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

// Bit i of the table is the result where a, b and c, in this order, are the digits of i.
PD_INLINE __m256i logic_half(__m256i a, __m256i b, __m256i c, int table) {
  __m256i out = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi32(-1);
  const auto with = [&](int i) __attribute__((always_inline)) {
    const __m256i x = i & 4 ? a : _mm256_xor_si256(a, ones), y = i & 2 ? b : _mm256_xor_si256(b, ones);
    const __m256i z = i & 1 ? c : _mm256_xor_si256(c, ones);
    if (table >> i & 1) out = _mm256_or_si256(out, _mm256_and_si256(_mm256_and_si256(x, y), z));
  };
  with(0), with(1), with(2), with(3), with(4), with(5), with(6), with(7);
  return out;
}

}  // namespace emulation

// ------------------------------------------------------------------------------------ what is the same in both halves
#define PD_ONE(type, name, half) \
  PD_INLINE type _mm512_##name(type a) { return {half(a.lo), half(a.hi)}; }
#define PD_TWO(type, name, half) \
  PD_INLINE type _mm512_##name(type a, type b) { return {half(a.lo, b.lo), half(a.hi, b.hi)}; }
#define PD_THREE(type, name, half) \
  PD_INLINE type _mm512_##name(type a, type b, type c) { return {half(a.lo, b.lo, c.lo), half(a.hi, b.hi, c.hi)}; }
#define PD_SHIFT(name) \
  PD_INLINE __m512i _mm512_##name(__m512i a, unsigned n) { \
    return {_mm256_##name(a.lo, (int)n), _mm256_##name(a.hi, (int)n)}; \
  }
PD_TWO(__m512, add_ps, _mm256_add_ps)
PD_TWO(__m512, sub_ps, _mm256_sub_ps)
PD_TWO(__m512, mul_ps, _mm256_mul_ps)
PD_TWO(__m512, div_ps, _mm256_div_ps)
PD_TWO(__m512, max_ps, _mm256_max_ps)  // b where either is NaN, or both are zero
PD_TWO(__m512, min_ps, _mm256_min_ps)
PD_THREE(__m512, fmadd_ps, _mm256_fmadd_ps)
PD_THREE(__m512, fmsub_ps, _mm256_fmsub_ps)
PD_TWO(__m512, scalef_ps, emulation::scale_half)
PD_TWO(__m512i, add_epi16, _mm256_add_epi16)
PD_TWO(__m512i, add_epi32, _mm256_add_epi32)
PD_TWO(__m512i, add_epi64, _mm256_add_epi64)
PD_TWO(__m512i, sub_epi32, _mm256_sub_epi32)
PD_TWO(__m512i, mul_epu32, _mm256_mul_epu32)
PD_TWO(__m512i, madd_epi16, _mm256_madd_epi16)
PD_TWO(__m512i, maddubs_epi16, _mm256_maddubs_epi16)
PD_TWO(__m512i, max_epu16, _mm256_max_epu16)
PD_TWO(__m512i, max_epu32, _mm256_max_epu32)
PD_TWO(__m512i, and_si512, _mm256_and_si256)
PD_TWO(__m512i, or_si512, _mm256_or_si256)
PD_TWO(__m512i, xor_si512, _mm256_xor_si256)
PD_TWO(__m512i, shuffle_epi8, _mm256_shuffle_epi8)
PD_TWO(__m512i, unpacklo_epi64, _mm256_unpacklo_epi64)
PD_TWO(__m512i, unpackhi_epi64, _mm256_unpackhi_epi64)
PD_ONE(__m512i, abs_epi8, _mm256_abs_epi8)
PD_SHIFT(slli_epi16)
PD_SHIFT(slli_epi32)
PD_SHIFT(slli_epi64)
PD_SHIFT(srli_epi16)
PD_SHIFT(srli_epi32)
PD_SHIFT(srli_epi64)
PD_SHIFT(srai_epi32)
#undef PD_ONE
#undef PD_TWO
#undef PD_THREE
#undef PD_SHIFT

PD_INLINE __m512 _mm512_roundscale_ps(__m512 a, int how) {
  if (how >> 4) emulation::refuse_vector("vrndscaleps", "no fraction is kept here");
  return {emulation::round_half(a.lo, how), emulation::round_half(a.hi, how)};
}
PD_INLINE __m512 _mm512_reduce_ps(__m512 a, int how) {
  if (how >> 4) emulation::refuse_vector("vreduceps", "no fraction is taken away here");
  return {emulation::reduce_half(a.lo, how), emulation::reduce_half(a.hi, how)};
}
PD_INLINE __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  return {emulation::logic_half(a.lo, b.lo, c.lo, table), emulation::logic_half(a.hi, b.hi, c.hi, table)};
}
PD_INLINE __m512i _mm512_ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  return _mm512_ternarylogic_epi32(a, b, c, table);
}

// ------------------------------------------------------------------------------------------------- constants and casts
PD_INLINE __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PD_INLINE __m512i _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PD_INLINE __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PD_INLINE __m512i _mm512_set1_epi16(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
PD_INLINE __m512i _mm512_set1_epi32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PD_INLINE __m512i _mm512_set1_epi64(int64_t x) { return {_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
PD_INLINE __m512i _mm512_setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g,
                                    int64_t h) {
  return {_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)};
}
PD_INLINE __m512i _mm512_broadcast_i32x4(__m128i a) {
  return {_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a)};
}
PD_INLINE __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
PD_INLINE __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
PD_INLINE __m256i _mm512_castsi512_si256(__m512i a) { return a.lo; }
PD_INLINE __m256i _mm512_extracti64x4_epi64(__m512i a, int half) { return half & 1 ? a.hi : a.lo; }

// ------------------------------------------------------------------------------------------------------------- memory
PD_INLINE __m512 _mm512_loadu_ps(const void *p) {
  return {_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)p + 8)};
}
PD_INLINE void _mm512_storeu_ps(void *p, __m512 a) {
  _mm256_storeu_ps((float *)p, a.lo), _mm256_storeu_ps((float *)p + 8, a.hi);
}
PD_INLINE __m512i _mm512_loadu_si512(const void *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
PD_INLINE void _mm512_storeu_si512(void *p, __m512i a) {
  _mm256_storeu_si256((__m256i *)p, a.lo), _mm256_storeu_si256((__m256i *)p + 1, a.hi);
}
PD_INLINE __m512i _mm512_load_si512(const void *p) {
  emulation::check_aligned("vmovdqa64", p);
  return _mm512_loadu_si512(p);
}
PD_INLINE void _mm512_stream_ps(void *p, __m512 a) {
  emulation::check_aligned("vmovntps", p);
  _mm256_stream_ps((float *)p, a.lo), _mm256_stream_ps((float *)p + 8, a.hi);
}
// Lanes that are not in the mask are not touched: there may be no memory.
PD_INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void *p) {
  return {_mm256_maskload_ps((const float *)p, emulation::lanes_of(mask)),
          _mm256_maskload_ps((const float *)p + 8, emulation::lanes_of(mask >> 8))};
}
PD_INLINE __m512 _mm512_mask_loadu_ps(__m512 other, __mmask16 mask, const void *p) {
  return emulation::select(mask, _mm512_maskz_loadu_ps(mask, p), other);
}
PD_INLINE void _mm512_mask_storeu_ps(void *p, __mmask16 mask, __m512 a) {
  _mm256_maskstore_ps((float *)p, emulation::lanes_of(mask), a.lo);
  _mm256_maskstore_ps((float *)p + 8, emulation::lanes_of(mask >> 8), a.hi);
}
PD_INLINE void _mm256_mask_storeu_epi16(void *p, __mmask16 mask, __m256i a) {
  uint16_t lanes[16];
  memcpy(lanes, &a, sizeof lanes);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) memcpy((uint16_t *)p + i, lanes + i, 2);
}

// -------------------------------------------------------------------------------------------------------------- masks
PD_INLINE uint32_t mask_of(__m256 lanes) { return (uint32_t)_mm256_movemask_ps(lanes); }
PD_INLINE __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  const auto compare = [how](__m256 x, __m256 y) __attribute__((always_inline)) {
    switch (how) {
      case _CMP_LT_OQ: return mask_of(_mm256_cmp_ps(x, y, _CMP_LT_OQ));
      case _CMP_GT_OQ: return mask_of(_mm256_cmp_ps(x, y, _CMP_GT_OQ));
      case _CMP_UNORD_Q: return mask_of(_mm256_cmp_ps(x, y, _CMP_UNORD_Q));
      default: emulation::refuse_vector("vcmpps", "this comparison is not emulated");
    }
  };
  return (__mmask16)(compare(a.lo, b.lo) | compare(a.hi, b.hi) << 8);
}
PD_INLINE __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  return (__mmask16)(mask_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo))) |
                     mask_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))) << 8);
}
PD_INLINE uint32_t mask_of_shorts(__m256i lo, __m256i hi) {  // all bits of a lane, or none
  return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xd8));
}
PD_INLINE __mmask32 _mm512_cmplt_epi16_mask(__m512i a, __m512i b) {
  return mask_of_shorts(_mm256_cmpgt_epi16(b.lo, a.lo), _mm256_cmpgt_epi16(b.hi, a.hi));
}
PD_INLINE __mmask32 _mm512_cmpge_epu16_mask(__m512i a, __m512i b) {
  return mask_of_shorts(_mm256_cmpeq_epi16(_mm256_max_epu16(a.lo, b.lo), a.lo),
                        _mm256_cmpeq_epi16(_mm256_max_epu16(a.hi, b.hi), a.hi));
}
PD_INLINE __mmask64 _mm512_movepi8_mask(__m512i a) {
  return (uint32_t)_mm256_movemask_epi8(a.lo) | (__mmask64)(uint32_t)_mm256_movemask_epi8(a.hi) << 32;
}
PD_INLINE __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 a) {
  return emulation::select(mask, a, other);
}
PD_INLINE __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) { return emulation::select(mask, b, a); }
PD_INLINE __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask, __m512i a) {
  return (__m512i)emulation::select(mask, (__m512)a, (__m512)other);
}
PD_INLINE __m512i _mm512_mask_blend_epi32(__mmask16 mask, __m512i a, __m512i b) {
  return _mm512_mask_mov_epi32(a, mask, b);
}
PD_INLINE __m512i _mm512_mask_or_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b) {
  return _mm512_mask_mov_epi32(other, mask, _mm512_or_si512(a, b));
}
PD_INLINE __m512i _mm512_mask_sub_epi8(__m512i other, __mmask64 mask, __m512i a, __m512i b) {
  return {_mm256_blendv_epi8(other.lo, _mm256_sub_epi8(a.lo, b.lo), emulation::bytes_of((uint32_t)mask)),
          _mm256_blendv_epi8(other.hi, _mm256_sub_epi8(a.hi, b.hi), emulation::bytes_of((uint32_t)(mask >> 32)))};
}
// Of 32 words the one that the lowest five bits of an index say.
PD_INLINE __m512i _mm512_mask_permutexvar_epi16(__m512i other, __mmask32 mask, __m512i index, __m512i a) {
  uint16_t out[32], at[32], from[32];
  memcpy(out, &other, 64), memcpy(at, &index, 64), memcpy(from, &a, 64);
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) out[i] = from[at[i] & 31];
  return _mm512_loadu_si512(out);
}

// -------------------------------------------------------------------------------------------------------- conversions
PD_INLINE __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(a, a))};
}
PD_INLINE __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(a, a))};
}
PD_INLINE __m512i _mm512_cvtepu8_epi16(__m256i a) {
  return {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1))};
}
PD_INLINE __m512i _mm512_cvtepi8_epi16(__m256i a) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(a, 1))};
}
PD_INLINE __m512i _mm512_cvtepi16_epi32(__m256i a) {
  return {_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1))};
}
PD_INLINE __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
PD_INLINE __m256i _mm512_cvtepi32_epi16(__m512i a) { return emulation::lower_halves(a.lo, a.hi); }
PD_INLINE __m128i _mm512_cvtepi32_epi8(__m512i a) {
  const __m256i low = _mm256_set1_epi32(0xff), words = emulation::lower_halves(_mm256_and_si256(a.lo, low),
                                                                               _mm256_and_si256(a.hi, low));
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
PD_INLINE __m512 _mm512_cvtepi32_ps(__m512i a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PD_INLINE __m512i _mm512_cvttps_epi32(__m512 a) { return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)}; }
PD_INLINE __m512i _mm512_maskz_cvtps_epi32(__mmask16 mask, __m512 a) {
  return {_mm256_and_si256(_mm256_cvtps_epi32(a.lo), emulation::lanes_of(mask)),
          _mm256_and_si256(_mm256_cvtps_epi32(a.hi), emulation::lanes_of(mask >> 8))};
}
PD_INLINE __m512 _mm512_cvtph_ps(__m256i a) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
PD_INLINE __m256bh _mm512_cvtneps_pbh(__m512 a) {
  return emulation::lower_halves(emulation::bf16_words(a.lo), emulation::bf16_words(a.hi));
}
PD_INLINE __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  return {_mm512_cvtneps_pbh(lower), _mm512_cvtneps_pbh(upper)};
}
// Calls, since they stand where everything is written out many times, which compiles for minutes.
[[gnu::noinline]] inline __m512 _mm512_dpbf16_ps(const __m512 &sum, const __m512bh &a, const __m512bh &b) {
  return emulation::dots_of_pairs(sum, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_dpbusd_epi32(const __m512i &sum, const __m512i &a, const __m512i &b) {
  return {emulation::dots_of_bytes(sum.lo, a.lo, b.lo), emulation::dots_of_bytes(sum.hi, a.hi, b.hi)};
}

// ----------------------------------------------------------------- sums over lanes, in the order of the compiler's own
PD_INLINE float _mm512_reduce_add_ps(__m512 a) {
  const __m256 x = _mm256_add_ps(a.hi, a.lo);
  const __m128 y = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
  const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
PD_INLINE float _mm512_reduce_max_ps(__m512 a) {
  const __m256 x = _mm256_max_ps(a.hi, a.lo);
  const __m128 y = _mm_max_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
  const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
PD_INLINE int32_t _mm512_reduce_add_epi32(__m512i a) {
  uint32_t lanes[16], sum = 0;
  memcpy(lanes, &a, sizeof lanes);
  for (uint32_t lane : lanes) sum += lane;
  return (int32_t)sum;
}
PD_INLINE uint32_t _mm512_reduce_max_epu32(__m512i a) {
  uint32_t lanes[16], max = 0;
  memcpy(lanes, &a, sizeof lanes);
  for (uint32_t lane : lanes) max = lane > max ? lane : max;
  return max;
}

}  // namespace pagedec
