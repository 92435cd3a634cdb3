// Warpgroups: four warps whose products are of operands in shared memory. And what goes with them: barriers that count
// copies, and copies of parts of tensors by an engine, which no thread waits for. Instructions of compute capability
// 9.0 alone (gemm_hopper.cu); as device.h, with two bodies.
//
// Of D [64][N] warp w of a group has rows 16w ... 16w + 15, of these and of columns 8j ... 8j + 7 a lane as in
// matrix.h: sums[4 j ... 4 j + 3] are (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once
#include "cuda/matrix.h"
#include "cuda/tensor_map.h"

#if !defined(__CUDACC__)
#include "cuda/emulate/warpgroup.h"
#endif

namespace pagedec {

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarp;

// Where an operand lies: matrices of 8 rows (of A, or columns of B) x 8 k, 128 bytes in a row each, and how many bytes
// it is from one to the next.
PD_DEVICE uint64_t operand(uint32_t address, int along_k, int along_rows) {
  return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(along_k >> 4) << 16 | (uint64_t)(along_rows >> 4) << 32;
}

// Of rows of kSwizzledRow bytes, eight of which are kSwizzleBytes and begin at a multiple of that: the 16 bytes of k =
// 8 p ... 8 p + 7 of row r are piece p ^ r % 8 of it, so that neither who writes a row nor who reads eight meets a bank
// twice. 16 of k on, an operand begins 32 bytes on.
constexpr int kSwizzledRow = 128, kSwizzleBytes = 8 * kSwizzledRow;
PD_DEVICE uint64_t swizzled_operand(uint32_t address) {
  return operand(address, 16, kSwizzleBytes) | (uint64_t)1 << 62;
}

using Barriers = SharedArray<uint64_t>;

#if defined(__CUDACC__)
PD_DEVICE void begin_barrier(const Barriers &barriers, int i, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barriers.at(i))), "r"(count) : "memory");
}
// Behind the last of those that a thread begins, and before the block meets.
PD_DEVICE void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
PD_DEVICE void arrive(const Barriers &barriers, int i) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barriers.at(i))) : "memory");
}
// The phase is not over before so many bytes more have come, either.
PD_DEVICE void arrive_expecting(const Barriers &barriers, int i, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barriers.at(i))),
               "r"(bytes)
               : "memory");
}
// Of a phase with this parity, the first of which is 0; the phase before the first has another.
PD_DEVICE void await_barrier(const Barriers &barriers, int i, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(barriers.at(i))), "r"(parity) : "memory");
}
// The part of a tensor that begins there, which the barrier's phase waits for.
PD_DEVICE void begin_tensor_copy(void *to, const TensorMap &map, int at0, int at1, const Barriers &barriers, int i) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at0), "r"(at1), "r"(shared_address(barriers.at(i)))
      : "memory");
}
PD_DEVICE void begin_tensor_copy(void *to, const TensorMap &map, int at0, int at1, int at2, int at3,
                                 const Barriers &barriers, int i) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(shared_address(barriers.at(i)))
      : "memory");
}
PD_DEVICE void sync_group() {
  asm volatile("barrier.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / kGroupThreads), "n"(kGroupThreads) : "memory");
}

// Of each of a group's threads, which take some that another group has given up.
template <int kNumber, bool kMore>
PD_DEVICE void change_registers() {
  if constexpr (kMore) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kNumber));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kNumber));
}
// The same number, of which the compiler knows nothing: what follows from it is computed anew, and keeps no register.
PD_DEVICE int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
PD_DEVICE int num_grid_blocks_anew() {
  int number;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(number));
  return number;
}
// Sums are in these registers, and stay there.
template <int kNumber>
PD_DEVICE void hold(float (&sums)[kNumber]) {
  PD_UNROLL for (int i = 0; i < kNumber; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
PD_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PD_DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
PD_DEVICE void await_products() {  // of all groups but the youngest kLeft
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// sums (+)= a b for N = 2 kNumber columns of b, 16 of k; they are there when their group was awaited.
template <class E>
PD_DEVICE void multiply_group(float (&sums)[32], uint64_t a, uint64_t b, bool adds);
template <class E>
PD_DEVICE void multiply_group(float (&sums)[64], uint64_t a, uint64_t b, bool adds);
#define PD_SUMS(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define PD_SUMS_16(i) PD_SUMS(i), PD_SUMS(i + 4), PD_SUMS(i + 8), PD_SUMS(i + 12)
#define PD_MULTIPLY_GROUP_64(E, name)                                                                           \
  template <>                                                                                                   \
  PD_DEVICE void multiply_group<E>(float (&s)[32], uint64_t a, uint64_t b, bool adds) {                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; "                                                       \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {"                               \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}"  \
                 : PD_SUMS_16(0), PD_SUMS_16(16)                                                                \
                 : "l"(a), "l"(b), "r"((int)adds));                                                             \
  }
PD_MULTIPLY_GROUP_64(bf16, "bf16")
PD_MULTIPLY_GROUP_64(fp16, "f16")
#undef PD_MULTIPLY_GROUP_64
#define PD_MULTIPLY_GROUP_128(E, name)                                                                          \
  template <>                                                                                                   \
  PD_DEVICE void multiply_group<E>(float (&s)[64], uint64_t a, uint64_t b, bool adds) {                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; "                                                       \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {"                              \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                             \
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                             \
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, 0;}"  \
                 : PD_SUMS_16(0), PD_SUMS_16(16), PD_SUMS_16(32), PD_SUMS_16(48)                                \
                 : "l"(a), "l"(b), "r"((int)adds));                                                             \
  }
PD_MULTIPLY_GROUP_128(bf16, "bf16")
PD_MULTIPLY_GROUP_128(fp16, "f16")
#undef PD_MULTIPLY_GROUP_128
#undef PD_SUMS_16
#undef PD_SUMS
#else
inline void begin_barrier(const Barriers &barriers, int i, int count) { emulate::begin_barrier(barriers.at(i), count); }
inline void show_barriers() {}
inline void arrive(const Barriers &barriers, int i) { emulate::arrive(barriers.at(i)); }
inline void arrive_expecting(const Barriers &barriers, int i, int bytes) { emulate::arrive(barriers.at(i), bytes); }
inline void await_barrier(const Barriers &barriers, int i, uint32_t parity) {
  emulate::await_barrier(barriers.at(i), parity);
}
inline void begin_tensor_copy(void *to, const TensorMap &map, int at0, int at1, const Barriers &barriers, int i) {
  emulate::begin_tensor_copy((char *)to, map, {at0, at1, 0, 0}, barriers.at(i));
}
inline void begin_tensor_copy(void *to, const TensorMap &map, int at0, int at1, int at2, int at3,
                              const Barriers &barriers, int i) {
  emulate::begin_tensor_copy((char *)to, map, {at0, at1, at2, at3}, barriers.at(i));
}
using emulate::begin_products, emulate::end_products, emulate::shared_address, emulate::sync_group;
template <int kNumber, bool kMore>
void change_registers() {}
inline int anew(int x) { return x; }
inline int num_grid_blocks_anew() { return num_grid_blocks(); }
template <int kNumber>
void hold(float (&)[kNumber]) {}
template <int kLeft>
void await_products() {
  emulate::await_products(kLeft);
}
template <class E, int kNumber>
void multiply_group(float (&sums)[kNumber], uint64_t a, uint64_t b, bool adds) {
  emulate::multiply_group(sums, 2 * kNumber, a, b, adds, [](uint16_t bits) { return to_float(E{bits}); });
}
#endif

}  // namespace pagedec
