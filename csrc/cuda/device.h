// What kernels are written with, below the level of C++: with nvcc the device's own instructions, with g++ the
// emulator's (emulate/machine.h). Kernels use nothing else, so that one source runs on both.
//
// Threads of a block share memory by SHARED_ARRAY(type, name, size), and parts of what a launch gives them besides,
// which LAUNCHED_SHARED(memory) is: memory.part<type>(offset in bytes, size). `name[i]` is a value, and name.at(i) the
// address that instructions take. Warp functions are for all 32 lanes together.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pagedec.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define PD_DEVICE __device__ __forceinline__
#define PD_ROLLED _Pragma("unroll 1")  // before a loop that would take too many registers unrolled
#define PD_KERNEL(threads) __global__ void __launch_bounds__(threads)
// Of which a multiprocessor is to have registers for so many blocks.
#define PD_KERNEL_BLOCKS(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define PD_GRID_CONSTANT(type) const __grid_constant__ type  // of a kernel's arguments: one whose address is taken
#define SHARED_ARRAY(type, name, size)  \
  __shared__ type name##_memory[size]; \
  const pagedec::SharedArray<type> name { name##_memory }
#define LAUNCHED_SHARED(name)                                  \
  extern __shared__ __align__(16) char name##_memory[]; \
  const pagedec::SharedMemory name { name##_memory }
#define PD_UNROLL _Pragma("unroll")
#define PD_PRAGMA(text) _Pragma(#text)
#define PD_UNROLL_BY(n) PD_PRAGMA(unroll n)
#else
#include <atomic>

#include "cuda/emulate/machine.h"
#define PD_DEVICE inline
#define PD_ROLLED
#define PD_KERNEL(threads) void
#define PD_KERNEL_BLOCKS(threads, blocks) void
#define PD_GRID_CONSTANT(type) const type
#define SHARED_ARRAY(type, name, size) \
  static const char name##_tag = 0;    \
  const pagedec::emulate::SharedArray<type> name(&name##_tag, size)
#define LAUNCHED_SHARED(name) const pagedec::emulate::SharedMemory name
#define PD_UNROLL
#define PD_UNROLL_BY(n)
#endif

namespace pagedec {

constexpr int kWarp = 32;

#if defined(__CUDACC__)
template <class T>
struct SharedArray {
  T *p;
  PD_DEVICE T &operator[](int64_t i) const { return p[i]; }
  PD_DEVICE T *at(int64_t i) const { return p + i; }
};
struct SharedMemory {
  char *p;
  template <class T>
  PD_DEVICE SharedArray<T> part(int64_t offset, int64_t) const {
    return {(T *)(p + offset)};
  }
};
PD_DEVICE int thread_index() { return threadIdx.x; }
PD_DEVICE int block_index() { return blockIdx.x; }
PD_DEVICE int num_block_threads() { return blockDim.x; }
PD_DEVICE int num_grid_blocks() { return gridDim.x; }
PD_DEVICE void sync_block() { __syncthreads(); }
PD_DEVICE void sync_warp() { __syncwarp(); }
template <class T>
PD_DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
template <class T>
PD_DEVICE T shuffle(T x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
PD_DEVICE uint32_t ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
PD_DEVICE int count_bits(uint32_t x) { return __popc(x); }
PD_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
PD_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
PD_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
PD_DEVICE float quotient(float x, float y) { return __fdiv_rn(x, y); }
// Of the lowest bytes of four words.
PD_DEVICE uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
PD_DEVICE uint64_t double_bits(double x) { return (uint64_t)__double_as_longlong(x); }
PD_DEVICE uint16_t half_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
PD_DEVICE float half_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
// 16 bytes at once, which begin at a multiple of 16.
template <class T>
PD_DEVICE T load_whole(const void *p) {
  static_assert(sizeof(T) == 16 && alignof(T) == 16);
  const uint4 whole = *(const uint4 *)p;  // by memcpy nvcc takes byte for byte
  T x;
  memcpy(&x, &whole, sizeof x);
  return x;
}
// Of kernels that launch_early() puts into the stream (launch.h). What the next one does before it waits may begin now;
// and until all kernels before this one are through and what they have written is seen, which every thread of such a
// kernel calls, whatever else it does. The instructions are SM90's: elsewhere nothing begins early.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
PD_DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
PD_DEVICE void await_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
PD_DEVICE void let_next_begin() {}
PD_DEVICE void await_kernels() {}
#endif
// Of shared memory; in which order threads come must not show in what is made of it. The value before.
PD_DEVICE uint32_t atomic_add(const SharedArray<uint32_t> &a, int64_t i, uint32_t x) { return atomicAdd(a.at(i), x); }
PD_DEVICE uint32_t atomic_or(const SharedArray<uint32_t> &a, int64_t i, uint32_t x) { return atomicOr(a.at(i), x); }
#else
using emulate::SharedArray, emulate::SharedMemory;
inline int thread_index() { return emulate::place().thread; }
inline int block_index() { return emulate::place().block; }
inline int num_block_threads() { return emulate::place().num_threads; }
inline int num_grid_blocks() { return emulate::place().num_blocks; }
inline void sync_block() { emulate::sync_block(); }
inline void sync_warp() { emulate::sync_warp(); }
template <class T>
inline T shuffle(T x, int lane) {
  const T y = emulate::gather(x)[lane];
  emulate::release();
  return y;
}
template <class T>
inline T shuffle_xor(T x, int mask) {
  return shuffle(x, (thread_index() % kWarp) ^ mask);
}
inline uint32_t ballot(bool x) {
  const bool *all = emulate::gather(x);
  uint32_t bits = 0;
  for (int i = 0; i < kWarp; i++) bits |= (uint32_t)all[i] << i;
  emulate::release();
  return bits;
}
inline int count_bits(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline float square_root(float x) { return std::sqrt(x); }
inline float quotient(float x, float y) { return x / y; }
inline uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
}
inline float half_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
  const uint32_t bits = rest < 0x7c00u << 13 ? float_bits(bits_float(rest) * 0x1p112f) : rest | 0x7f800000u;
  return bits_float(bits | sign);
}
inline uint16_t half_bits(float x) {
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fff;
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65,520 and above
  // Below 2^-14 fp16 has steps of 2^-24, as floats from 0.5 on, to which they are added.
  if (rest < 0x38800000u) return (uint16_t)(sign | (float_bits(bits_float(rest) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13);
}
inline uint64_t double_bits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
template <class T>
inline T load_whole(const void *p) {
  static_assert(sizeof(T) == 16 && alignof(T) == 16);
  emulate::load_at(p);
  T x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline void let_next_begin() {}
using emulate::await_kernels;
inline uint32_t atomic_add(const SharedArray<uint32_t> &a, int64_t i, uint32_t x) {
  return emulate::change_atomically(a, i, [&](uint32_t before) { return before + x; });
}
inline uint32_t atomic_or(const SharedArray<uint32_t> &a, int64_t i, uint32_t x) {
  return emulate::change_atomically(a, i, [&](uint32_t before) { return before | x; });
}
#endif

template <class T>
PD_DEVICE T lower(T a, T b) {
  return a < b ? a : b;
}
template <class T>
PD_DEVICE T upper(T a, T b) {
  return a > b ? a : b;
}
PD_DEVICE int within(int x, int low, int high) { return upper(low, lower(x, high)); }

// bfloat16 and IEEE's binary16 as they lie in memory; rounded to nearest, ties to even, and a NaN stays one.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
PD_DEVICE float to_float(float x) { return x; }
PD_DEVICE float to_float(bf16 x) { return bits_float((uint32_t)x.bits << 16); }
PD_DEVICE float to_float(fp16 x) { return half_float(x.bits); }
template <class E>
PD_DEVICE E from_float(float x);
template <>
PD_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
PD_DEVICE bf16 from_float<bf16>(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {(uint16_t)(bits >> 16 | 0x40)};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
PD_DEVICE fp16 from_float<fp16>(float x) {
  return {half_bits(x)};
}

// On the host: what `pick` gives for a value of the type that a record's dtype says.
template <class Pick>
auto of_dtype(int32_t dtype, const Pick &pick) {
  if (dtype == PD_BF16) return pick(bf16{});
  if (dtype == PD_F16) return pick(fp16{});
  return pick(float{});
}

// tanh below 2 ulp: small arguments by a polynomial (Cephes tanhf), the others as 1 - 2 / (e^2x + 1).
PD_DEVICE float hyperbolic_tangent(float x) {
  const float magnitude = x < 0.0f ? -x : x, z = x * x;
  if (!(magnitude >= 0.625f)) {  // a NaN, too, which stays one
    float y = -5.70498872745e-3f;
    y = y * z + 2.06390887954e-2f;
    y = y * z - 5.37397155531e-2f;
    y = y * z + 1.33314422036e-1f;
    y = y * z - 3.33332819422e-1f;
    return y * z * x + x;
  }
  const float large = 1.0f - quotient(2.0f, expf(magnitude + magnitude) + 1.0f);
  return x < 0.0f ? -large : large;
}

// The sum over a block of 32 x `warps` threads, to all of them, in one order whatever else there is: lanes by a tree,
// then warps from the first on. All threads call it alike.
template <int kWarps>
PD_DEVICE float block_sum(float x) {
  SHARED_ARRAY(float, of_warps, kWarps);
  for (int mask = kWarp / 2; mask; mask /= 2) x = x + shuffle_xor(x, mask);
  sync_block();  // of the call before
  if (thread_index() % kWarp == 0) of_warps[thread_index() / kWarp] = x;
  sync_block();
  float sum = of_warps[0];
  for (int w = 1; w < kWarps; w++) sum = sum + of_warps[w];
  return sum;
}

}  // namespace pagedec
