#include "common/context.h"

#include <omp.h>
#include <pthread.h>

#include <new>

namespace pagedec {
constexpr int MAX_THREADS =
    4096;  // more than any machine has; OpenMP ends the process where it cannot start as many as it is told

// A forked child has of all threads only the one that forked. OpenMP still counts the lost ones in that thread's pool
// and would wait for them for ever, so it works alone; threads that the child starts have pools of their own.
static thread_local bool forked = false;
[[maybe_unused]] static const int fork_status = pthread_atfork(nullptr, nullptr, [] { forked = true; });

int num_threads(const pd_context &context) {
  return forked ? 1 : context.num_threads > 0 ? context.num_threads : omp_get_max_threads();
}
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_num_devices(void) { return 1; }
pd_context *pd_context_new(int32_t device, int32_t num_threads) {
  if (device != 0) return fail("pd_context_new: device is %d; the only one of a CPU is 0", device), nullptr;
  if (num_threads < 0 || num_threads > MAX_THREADS)
    return fail("pd_context_new: num_threads is %d; it must be 0 to %d", num_threads, MAX_THREADS), nullptr;
  pd_context *context = new (std::nothrow) pd_context(num_threads);
  if (!context) fail("pd_context_new: out of memory");
  return context;
}
void pd_context_free(pd_context *context) { delete context; }

int32_t pd_num_threads(const pd_context *context) {
  return context ? num_threads(*context) : fail("pd_num_threads: context is NULL");
}

void *pd_stream(const pd_context *) { return nullptr; }
int pd_await(pd_context *context) { return context ? 0 : fail("pd_await: context is NULL"); }
}
