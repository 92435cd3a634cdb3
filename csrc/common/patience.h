// How the host waits for what others do: awake first, since who has a processor comes within microseconds, then
// yielding it, then asleep, where another's whole prefill is waited for. Not for ever.
#pragma once
#include <sched.h>
#include <time.h>

#include <chrono>
#include <cstdint>

namespace pagedec {

class Patience {
 public:
  explicit Patience(double seconds) : seconds_(seconds) {}
  // Waits a little. False: its time is over.
  bool pause() {
    spins_++;
    if (spins_ < SPINS) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (spins_ % SPINS_A_LOOK) return true;
    }
    if (until_ == Clock::time_point{})
      until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_));
    if (spins_ >= SPINS && spins_ < SPINS + YIELDS) {
      sched_yield();
    } else if (spins_ >= SPINS) {
      const timespec pause{0, SLEEP_NANOSECONDS};
      nanosleep(&pause, nullptr);
    }
    return Clock::now() <= until_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int SPINS = 2000, YIELDS = 20000, SPINS_A_LOOK = 64;  // at the clock
  static constexpr long SLEEP_NANOSECONDS = 50000;
  const double seconds_;
  int64_t spins_ = 0;
  Clock::time_point until_{};
};

}  // namespace pagedec
