// What this machine allows: the rate of a plain read by every thread, and of the dot-product instruction from
// registers. Every timing of a kernel is reported against one of these, taken in the same run.
#include <omp.h>

#include "cpu/gemm_amx.h"

#if defined(__x86_64__) && !defined(PD_EMULATE_VECTORS)
#define HIDE(v) "+x"(v)  // its value is unknown from here on
#else
#define HIDE(v) "+m"(v)
#endif

namespace pagedec {
namespace {

float read_part(const char *p, int64_t bytes) {  // four chains of loads and adds: far more than memory delivers
  F16 sum[4] = {zero16(), zero16(), zero16(), zero16()};
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum[i] = add16(sum[i], load16(p + at + i * 64));
  float lane[16], total = 0;
  store16(lane, add16(add16(sum[0], sum[1]), add16(sum[2], sum[3])));
  for (float f : lane) total += f;
  for (; at < bytes; at++) total += (float)p[at];
  return total;
}

#if PD_LEVEL == 0
template <int DTYPE> double
dot_part(int64_t rounds, float *sink) {  // a product and a sum, each waiting for the one before: 12 chains of 4 lanes
  F4 c[12], a = F4{} + 0.5f, b = F4{} + *sink;
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) c[i] = F4{} + (float)i;
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : HIDE(a), HIDE(b));
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) c[i] = c[i] * a + b;
  }
  for (const F4 &chain : c) *sink += chain[0] + chain[1] + chain[2] + chain[3];
  return (double)rounds * 12 * 8;
}
#else
constexpr int CHAINS = PD_LEVEL >= 2 ? 16 : 6;  // of 16 lanes: enough to cover the instruction's latency

#if PD_LEVEL >= 4
double multiply_tiles(int64_t rounds) {  // zeros: tiles know no faster and no slower values
  amx_configure(AMX_ROWS);
  for (int64_t r = 0; r < rounds; r++)
    tile_multiply<false, 0, 4, 6>(), tile_multiply<false, 1, 4, 7>(), tile_multiply<false, 2, 5, 6>(),
        tile_multiply<false, 3, 5, 7>();
  amx_release();
  return (double)rounds * 4 * 2 * AMX_ROWS * 16 * 32;
}
#endif

// FLOP of `rounds` rounds; the result depends on every chain, so that none can be left out.
template <int DTYPE>
double dot_part(int64_t rounds, float *sink) {
#if PD_LEVEL >= 4
  if constexpr (DTYPE == PD_BF16) return multiply_tiles(rounds);
#endif
  F16 c[CHAINS];
#pragma GCC unroll 16
  for (int i = 0; i < CHAINS; i++) c[i] = set16((float)i);
  F16 a = set16(*sink), b = set16(*sink + 1);
  for (int64_t r = 0; r < rounds; r++) {
#if PD_LEVEL == 1
    asm volatile("" : HIDE(a.lo), HIDE(b.lo), HIDE(a.hi), HIDE(b.hi));
#else
    asm volatile("" : HIDE(a), HIDE(b));
#endif
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
#if PD_LEVEL >= 3
      if constexpr (DTYPE == PD_BF16) c[i] = _mm512_dpbf16_ps(c[i], (__m512bh)a, (__m512bh)b);
      else c[i] = fma16(a, b, c[i]);
#else
      c[i] = fma16(a, b, c[i]);
#endif
    }
  }
  for (int i = 1; i < CHAINS; i++) c[0] = add16(c[0], c[i]);
  float lane[16];
  store16(lane, c[0]);
  for (float f : lane) *sink += f;  // all lanes, or half of the work may be dropped
  const double per_instruction = PD_LEVEL >= 3 && DTYPE == PD_BF16 ? 64 : 32;  // two FLOP a product, 16 lanes
  return (double)rounds * CHAINS * per_instruction;
}
#endif

}  // namespace
}  // namespace pagedec

using namespace pagedec;

extern "C" {
double pd_probe_read(pd_context *context, const void *data, int64_t bytes, int32_t repeats) {
  if (check_probe_read(context, data, bytes, repeats)) return -1;
  const int n = num_threads(*context);
  double best = 0;
  volatile float sink = 0;
  for (int32_t i = 0; i < repeats; i++) {
    double seconds = 0;
#pragma omp parallel num_threads(n)
    {
      const int64_t t = omp_get_thread_num(), got = omp_get_num_threads();
      const int64_t begin = bytes * t / got & -64, end = t + 1 == got ? bytes : bytes * (t + 1) / got & -64;
#pragma omp barrier
      const double start = omp_get_wtime();
      const float total = read_part((const char *)data + begin, end - begin);
#pragma omp barrier
#pragma omp critical
      {
        sink = sink + total;
        const double mine = omp_get_wtime() - start;
        seconds = mine > seconds ? mine : seconds;
      }
    }
    if (seconds > 0 && (double)bytes / seconds > best) best = (double)bytes / seconds;
  }
  return best * 1e-9;
}

double pd_probe_dot(pd_context *context, int32_t dtype, double seconds) {
  if (check_probe_dot(context, dtype, seconds)) return -1;
  const int n = num_threads(*context);
  double flop = 0, longest = 0;
  volatile float keep = 0;
#pragma omp parallel num_threads(n)
  {
    float sink = 0;
    double mine = 0;
#pragma omp barrier
    const double start = omp_get_wtime();
    double now = start;
    for (; now - start < seconds; now = omp_get_wtime())
      mine += dtype == PD_BF16 ? dot_part<PD_BF16>(1 << 16, &sink) : dot_part<PD_F32>(1 << 16, &sink);
#pragma omp critical
    {
      keep = keep + sink;
      flop += mine;
      longest = now - start > longest ? now - start : longest;
    }
  }
  return flop / longest * 1e-9;
}
}
