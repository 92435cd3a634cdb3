"""Requests of one stream that are too many at a time: they wait for their turn instead of being refused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from pagedec.serve.admission import Admission
from pagedec.serve.statuses import Refusal

WAITED_FOR = ("QUEUE_FULL", "CLIENT_REQUESTS", "CLIENT_TOKENS")
"""Reasons that end when other requests do."""
PAUSE = 0.1
"""Seconds until it is asked again although no place was given up: limits and the server's state may have changed."""
PATIENCE = 10.0
"""Seconds for which nothing of the stream may have run before those that wait are refused."""


class Queued:
    """One request of a stream that wants a place, in its stream's line."""

    def __init__(self, queueing: Queueing) -> None:
        self.queueing = queueing
        self.is_aborted = False
        self._woken = asyncio.Event()

    def abort(self) -> None:
        """Wait no more, and take no place."""
        self.is_aborted = True
        self.wake()

    def wake(self) -> None:
        """Have it look whether it may go on."""
        self._woken.set()

    async def woken(self, seconds: float | None = None) -> None:
        """Return when it is woken, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()


class Queueing:
    """The line of one stream: first come, first served. The first in it alone asks, when a place was given up."""

    def __init__(self) -> None:
        self._line: deque[Queued] = deque()
        self._num_inside = 0
        self._idle_since: float | None = None
        """Since when there has been a line while nothing of the stream ran."""

    async def enter(
        self,
        queued: Queued,
        held: contextlib.ExitStack,
        admission: Admission,
        seat: Callable[[int], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Return when a place is on `held`, or the request was aborted. `seat` is told how many of the stream have one.
        Raises its `Refusal` where no waiting helps, or has helped."""
        self._line.append(queued)
        try:
            while self._line[0] is not queued and not queued.is_aborted:
                await queued.woken()
            with admission.waiting(queued.wake):
                while not queued.is_aborted and not self._has_entered(held, seat):
                    await queued.woken(PAUSE)
        finally:
            self._leave(queued)

    # ---- inside
    def _has_entered(
        self, held: contextlib.ExitStack, seat: Callable[[int], contextlib.AbstractContextManager[None]]
    ) -> bool:
        try:
            held.enter_context(seat(self._num_inside))
        except Refusal as refusal:
            if refusal.reason not in WAITED_FOR or self._is_out_of_patience():
                raise
            return False
        self._num_inside += 1
        self._idle_since = None
        held.callback(self._end)  # before the place is given up, and others look
        return True

    def _end(self) -> None:
        self._num_inside -= 1

    def _is_out_of_patience(self) -> bool:
        if self._num_inside:
            return False
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since > PATIENCE

    def _leave(self, queued: Queued) -> None:
        was_first = self._line[0] is queued
        self._line.remove(queued)
        if not self._line:
            self._idle_since = None
        elif was_first:
            self._line[0].wake()
