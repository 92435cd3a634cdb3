// Where ranks on one machine wait for one another, in memory that all have mapped.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cmath>

#include "common/check.h"

namespace pagedec {
namespace {

using Clock = std::chrono::steady_clock;
// Ranks that have a processor each come within microseconds; one that has to share yields it; one that waits for
// another's whole prefill sleeps.
constexpr int SPINS = 2000, YIELDS = 20000;
constexpr long SLEEP_NANOSECONDS = 50000;

}  // namespace

int check_meet(const pd_meet_args &a) {
  const char *name = "pd_meet";
  if (check_pointer(name, "arrivals", a.arrivals) || check_range(name, "world", a.world, 1, 65536) ||
      check_range(name, "rank", a.rank, 0, a.world - 1))
    return -1;
  if (!(a.seconds > 0.0) || !std::isfinite(a.seconds))
    return fail("%s: seconds is %g; it must be above 0 and finite", name, a.seconds);
  return 0;
}

int meet(const pd_meet_args &a) {
  const auto line = [&](int rank) { return std::atomic_ref<int32_t>(a.arrivals[(int64_t)rank * PD_MEET_STRIDE]); };
  const uint32_t times = (uint32_t)line(a.rank).load(std::memory_order_relaxed) + 1;
  line(a.rank).store((int32_t)times, std::memory_order_release);
  Clock::time_point until{};
  for (int rank = 0; rank < a.world; rank++) {
    // a rank may be one meeting ahead, and the count may wrap
    for (int64_t spins = 0; (int32_t)((uint32_t)line(rank).load(std::memory_order_acquire) - times) < 0; spins++) {
      if (spins < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        continue;
      }
      if (until == Clock::time_point{})
        until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(a.seconds));
      if (spins < SPINS + YIELDS) {
        sched_yield();
      } else {
        const timespec pause{0, SLEEP_NANOSECONDS};
        nanosleep(&pause, nullptr);
      }
      if (Clock::now() > until) return rank;
    }
  }
  return -1;
}

}  // namespace pagedec
