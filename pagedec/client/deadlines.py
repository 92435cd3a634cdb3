"""When a call must have ended."""

from __future__ import annotations

import time

MOST_SECONDS = 1e9
"""Until a deadline, 31 years: gRPC counts nanoseconds since 1970 in 64 bits, and takes later ones for past."""


class Deadline(float):
    """When a call must have ended, by the monotonic clock. `seconds`: what was asked for."""

    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        made = cls(time.monotonic() + seconds)
        made.seconds = seconds
        return made


def remaining(deadline: Deadline | None) -> float | None:
    """Seconds until a deadline, a moment at least: the call ends by it."""
    return None if deadline is None else min(max(deadline - time.monotonic(), 0.001), MOST_SECONDS)
