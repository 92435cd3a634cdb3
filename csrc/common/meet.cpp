// Where ranks on one machine wait for one another, in memory that all have mapped.
#include <atomic>
#include <cmath>

#include "common/check.h"
#include "common/patience.h"

namespace pagedec {

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
  Patience patience(a.seconds);
  for (int rank = 0; rank < a.world; rank++)
    // a rank may be one meeting ahead, and the count may wrap
    while ((int32_t)((uint32_t)line(rank).load(std::memory_order_acquire) - times) < 0)
      if (!patience.pause()) return rank;
  return -1;
}

}  // namespace pagedec
