// Tensor cores of the emulated device.
//
// Sums are rounded as an A100's are (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor
// cores"): eight exact products and what they are added to are cut off, towards zero, one bit below the last that the
// largest of them has in fp32; their sum is exact, and cut off to fp32.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/emulate/machine.h"

namespace pagedec::emulate {

inline int exponent_of(double x) { return (int)(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023; }
inline float cut_off(double x) {  // to fp32, towards zero
  const float y = (float)x;
  return std::fabs((double)y) > std::fabs(x) ? std::nextafter(y, 0.0f) : y;
}
inline float sum_of_nine(const double (&terms)[9]) {
  constexpr int FRACTION = 23, MORE = 1;
  int top = -1023;
  double plain = 0.0;
  for (double x : terms) top = std::max(top, exponent_of(x)), plain += x;
  if (!std::isfinite(plain)) return (float)plain;
  if (top == -1023) return 0.0f;
  const double unit = std::ldexp(1.0, top - FRACTION - MORE), in_units = 1.0 / unit;
  int64_t sum = 0;
  for (double x : terms) sum += (int64_t)(x * in_units);
  return cut_off((double)sum * unit);
}

// d += a b of a warp: m16n8k16, whose fragments cuda/matrix.h describes. value: the number that 16 bits are.
template <class Value>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Value value) {
  struct Part { float a[4][2], b[2][2]; } mine;
  for (int i = 0; i < 8; i++) mine.a[i / 2][i % 2] = value((uint16_t)(a[i / 2] >> i % 2 * 16));
  for (int i = 0; i < 4; i++) mine.b[i / 2][i % 2] = value((uint16_t)((i / 2 ? b1 : b0) >> i % 2 * 16));
  const Part *all = gather(mine);
  const int lane = place().thread % WARP, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int half = 0; half < 2; half++) {
      double terms[9] = {d[i]};
      for (int k = 0; k < 8; k++) {
        const Part &of_a = all[row % 8 * 4 + k / 2], &of_b = all[column * 4 + k / 2];
        terms[1 + k] = (double)of_a.a[half * 2 + row / 8][k % 2] * of_b.b[half][k % 2];
      }
      d[i] = sum_of_nine(terms);
    }
  }
  release();
}

inline int32_t byte_of(uint32_t word, int i) { return (int8_t)(word >> 8 * i); }
// d = c + a b of a warp: m16n8k32 of int8, exact.
inline void multiply_bytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int32_t (&c)[4]) {
  struct Part { uint32_t a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Part *all = gather(mine);
  const int lane = place().thread % WARP, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    int32_t sum = c[i];
    for (int k = 0; k < 32; k++) {
      const Part &of_a = all[row % 8 * 4 + k % 16 / 4], &of_b = all[column * 4 + k % 16 / 4];
      sum += byte_of(of_a.a[k / 16 * 2 + row / 8], k % 4) * byte_of(of_b.b[k / 16], k % 4);
    }
    d[i] = sum;
  }
  release();
}

inline void load_matrices(uint32_t (&r)[4], const char *row, bool is_transposed) {
  if ((uintptr_t)row % 16) fault("a matrix row that is not aligned");
  touch(row, 16, false);
  const char *const *all = gather(row);
  const int lane = place().thread % WARP;
  for (int m = 0; m < 4; m++) {
    uint16_t pair[2];
    for (int i = 0; i < 2; i++) {
      const int down = is_transposed ? lane % 4 * 2 + i : lane / 4;
      const int across = is_transposed ? lane / 4 : lane % 4 * 2 + i;
      memcpy(&pair[i], all[m * 8 + down] + across * 2, 2);
    }
    r[m] = pair[0] | (uint32_t)pair[1] << 16;
  }
  release();
}

}  // namespace pagedec::emulate
