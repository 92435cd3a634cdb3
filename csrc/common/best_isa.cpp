// The richest instruction set that this processor runs. As a program (PD_TELL) it says so: `make build` compiles no
// library that would not run.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdio>

#include "common/internal.h"

namespace pagedec {
#if defined(__x86_64__)
// Older compilers' __builtin_cpu_supports does not know these.
static bool has_f16c_and_lzcnt() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __get_cpuid(0x80000001, &a, &b, &c, &d) &&
         (c & bit_LZCNT);
}
// Whether there is a matrix unit and Linux lets this process use it: its registers (8 KB a thread) are granted when
// asked for.
static bool grants_amx() {
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;  // CPUID.7.0:EDX
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;   // Linux, Documentation/arch/x86/xstate.rst
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (BF16 | TILE | INT8))) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif
const char *best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // every -m of CMakeLists.txt, though a processor with AVX2 has the others: a virtual machine may hide some
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && has_f16c_and_lzcnt();
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
}  // namespace pagedec

#ifdef PD_TELL
int main() { return puts(pagedec::best_isa()) < 0; }
#endif
