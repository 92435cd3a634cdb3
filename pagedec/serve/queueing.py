"""Requests of one stream that are too many at a time: they wait for their turn instead of being refused."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from pagedec.serve.statuses import Refusal

WAITED_FOR = ("QUEUE_FULL", "CLIENT_REQUESTS", "CLIENT_TOKENS")
"""Reasons that end when other requests do."""
PAUSE = 0.1
"""Seconds until it is asked again where nothing of the stream runs."""
PATIENCE = 10.0
"""Seconds for which nothing of the stream may have run before it is refused."""
WOKEN = 2
"""That wait are woken where one has ended: its place is one's, and there may be room for one more."""


class Queueing:
    """Who of a stream runs, and who waits. Whoever waits is woken by one that ends, or looks himself where none runs.

    Once all of the server's places were taken the stream leaves one free: others would never find any.
    """

    def __init__(self, has_spare: Callable[[], bool]) -> None:
        """`has_spare`: whether the server has more than one place."""
        self._has_spare = has_spare
        self._present = self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle_since: float | None = None
        """Since when whoever is there has waited while none ran, and none was answered."""

    def begin(self) -> None:
        """One comes."""
        self._present += 1
        self._under_way += 1

    def end(self, is_answered: bool) -> None:
        """One is over."""
        self._present -= 1
        self._under_way -= 1
        if is_answered or not self._present:
            self._idle_since = None
        self._wake()

    async def wait(self, refusal: Refusal) -> None:
        """Return when one that was refused may be asked again. Raises the refusal where no waiting helps."""
        if refusal.reason not in WAITED_FOR:
            raise refusal
        is_full = refusal.reason == "QUEUE_FULL"
        self._under_way -= 1
        try:
            while self._under_way:
                turn = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                try:
                    await turn
                finally:
                    if turn in self._waiting:
                        self._waiting.remove(turn)
                if not is_full or self._has_spare():
                    return
            now = time.monotonic()
            self._idle_since = now if self._idle_since is None else self._idle_since
            if now - self._idle_since > PATIENCE:
                raise refusal
            await asyncio.sleep(PAUSE)
        finally:
            self._under_way += 1

    def _wake(self) -> None:
        for _ in range(min(WOKEN, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
