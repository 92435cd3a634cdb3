// The tensor cores, what brings their operands, and copies that run beside the computation; as device.h, with two
// bodies.
//
// Fragments are the warp's, of the shapes of PTX's mma.m16n8k16: with g = lane / 4 and t = lane % 4, a lane has of A
// rows g, g + 8, g, g + 8 at k = 2t, 2t, 2t + 8, 2t + 8 (two values each), of B column g at k = 2t and 2t + 8, and of D
// (row, column) = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once
#include "cuda/device.h"

#if !defined(__CUDACC__)
#include "cuda/emulate/matrix.h"
#endif

namespace pagedec {

#if defined(__CUDACC__)
PD_DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// d += a b of pairs of E; an output row depends on its own row of a, all of b, and itself.
template <class E>
PD_DEVICE void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define PD_MULTIPLY_ADD(E, name)                                                                               \
  template <>                                                                                                  \
  PD_DEVICE void multiply_add<E>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {             \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                        \
                 ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                                     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                              \
  }
PD_MULTIPLY_ADD(bf16, "bf16")
PD_MULTIPLY_ADD(fp16, "f16")
#undef PD_MULTIPLY_ADD
// d = c + a b of int8, the shapes of m16n8k32: rows and columns as above, of A and B k = 4t ... 4t + 3 and 4t + 16 ...
// 4t + 19, four values in each register.
PD_DEVICE void multiply_bytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              const int32_t (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// Four matrices of 8 x 8 values of 16 bits: lane l gives where row l % 8 of matrix l / 8 begins, and gets of each
// values 2 (l % 4) and the next of row l / 4; transposed: of column l / 4 rows 2 (l % 4) and the next.
PD_DEVICE void load_matrices(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
PD_DEVICE void load_transposed(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
// 16 bytes of shared memory at once.
template <class T>
PD_DEVICE T load_whole(const SharedArray<T> &array, int64_t i) {
  return load_whole<T>(array.at(i));
}
// 16 or 4 bytes into shared memory, or zeros; they are there when the thread has waited for the group they are in, and
// for the others when they have met it since. kAgain: they are wanted again, so the first cache keeps them.
template <int kBytes = 16, bool kAgain = false>
PD_DEVICE void begin_copy(void *to, const void *from, bool is_read) {
  static_assert(kBytes == 16 || kBytes == 4);
  const uint32_t at = shared_address(to);
  const int read = is_read ? kBytes : 0;
  if constexpr (kBytes == 16 && kAgain)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(read) : "memory");
  else if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(read) : "memory");
}
PD_DEVICE void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
PD_DEVICE void await_copies() {  // of all groups but the youngest kLeft
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
template <class E>
PD_DEVICE uint32_t pair_of(float low, float high);
template <>
PD_DEVICE uint32_t pair_of<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
PD_DEVICE uint32_t pair_of<fp16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 2^x; below 2^-126 it is 0.
PD_DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// a b + c of both numbers of pairs, rounded once.
template <class E>
PD_DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b, uint32_t c);
template <>
PD_DEVICE uint32_t multiply_pairs<bf16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
template <>
PD_DEVICE uint32_t multiply_pairs<fp16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
#else
using emulate::multiply_bytes;
template <class E>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulate::multiply_add(d, a, b0, b1, [](uint16_t bits) { return to_float(E{bits}); });
}
inline void load_matrices(uint32_t (&r)[4], const void *row) { emulate::load_matrices(r, (const char *)row, false); }
inline void load_transposed(uint32_t (&r)[4], const void *row) { emulate::load_matrices(r, (const char *)row, true); }
template <class T>
T load_whole(const SharedArray<T> &array, int64_t i) {
  return array[i];
}
template <int kBytes = 16, bool kAgain = false>
void begin_copy(void *to, const void *from, bool is_read) {
  emulate::begin_copy((char *)to, (const char *)from, kBytes, is_read);
}
inline void end_copy_group() { emulate::end_copy_group(); }
template <int kLeft>
void await_copies() {
  emulate::await_copies(kLeft);
}
template <class E>
uint32_t pair_of(float low, float high) {
  return from_float<E>(low).bits | (uint32_t)from_float<E>(high).bits << 16;
}
inline float power_of_two(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
template <class E>
uint32_t multiply_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto number = [](uint32_t pair, int i) { return (double)to_float(E{(uint16_t)(pair >> 16 * i)}); };
  float sums[2];
  for (int i = 0; i < 2; i++) sums[i] = (float)(number(a, i) * number(b, i) + number(c, i));
  return pair_of<E>(sums[0], sums[1]);
}
#endif

}  // namespace pagedec
