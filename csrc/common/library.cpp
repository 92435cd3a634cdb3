#include <omp.h>
#include <pthread.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdarg>
#include <cstdio>

#include "common/internal.h"

namespace pagedec {
static thread_local char last_error[512];
static int threads = 0;
constexpr int MAX_THREADS = 4096;  // more than any machine has; OpenMP ends the process where it cannot start as many as it is told

// A forked child has of all threads only the one that forked. OpenMP still counts the lost ones in that thread's pool and would wait
// for them for ever, so it works alone; threads that the child starts have pools of their own.
static thread_local bool forked = false;
[[maybe_unused]] static const int fork_status = pthread_atfork(nullptr, nullptr, [] { forked = true; });

int fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  return -1;
}

#if defined(__x86_64__)
// Whether there is a matrix unit and Linux lets this process use it: its registers (8 KB a thread) are granted when asked for.
static bool grants_amx() {
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;  // CPUID.7.0:EDX
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;   // Linux, Documentation/arch/x86/xstate.rst
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (BF16 | TILE | INT8))) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

int num_threads() { return forked ? 1 : threads > 0 ? threads : omp_get_max_threads(); }
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_abi_version(void) { return PD_ABI_VERSION; }
const char *pd_last_error(void) { return last_error; }
const char *pd_isa(void) { return PD_ISA; }
const char *pd_best_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  static const bool amx = bf16 && grants_amx();
  if (amx) return "amx";
  if (bf16) return "avx512bf16";
  if (avx512) return "avx512";
  if (avx2) return "avx2";
#endif
  return "scalar";
}
int pd_set_num_threads(int32_t n) {
  if (n < 0 || n > MAX_THREADS) return fail("pd_set_num_threads: n is %d; it must be 0 to %d", n, MAX_THREADS);
  threads = n;
  return 0;
}
int32_t pd_num_threads(void) { return num_threads(); }
}
