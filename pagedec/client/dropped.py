"""Branches of a server's sessions that nobody holds here any more: the client's next call closes them first."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from pagedec.v1 import session_service_pb2 as pb

LOG = logging.getLogger("pagedec.client")
CLOSING_SECONDS, CLOSING_SHARE = 5.0, 0.25
"""For which a call waits at most until what was dropped is closed, and of the time that it has itself."""
PAUSE_SECONDS = 10.0
"""For which nothing is closed when a closing had no answer in its time: each call would wait for it."""
LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Of a server that may not have heard of it."""


@dataclass(slots=True)
class Closing:
    """What a session's dropped branches are closed by. `is_over`: nothing is left to be asked for them."""

    request: pb.CloseSessionRequest
    is_over: bool = False

    def end(self, error: Any = None) -> None:
        """It was asked, and has perhaps failed with a `grpc.RpcError`. That is nothing of the call that comes behind:
        the log is told."""
        code = None if error is None else error.code()
        self.is_over = code not in LATER
        if self.is_over and code not in (None, grpc.StatusCode.NOT_FOUND):
            names = ", ".join(self.request.branches)
            told = "branches %s of a session were dropped, and live until its lease ends: %s: %s"
            LOG.warning(told, names, code, error.details())


class DroppedBranches:
    """Those of which the server was not told yet. A collector may add some in the midst of anything, in any thread, so
    there is a deque and no lock."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, str]] = deque()
        self._not_before = 0.0

    @property
    def is_due(self) -> bool:
        """Some are to be closed now."""
        return bool(self._queue) and time.monotonic() >= self._not_before

    def add(self, session_id: str, name: str) -> None:
        """Nobody holds a branch any more."""
        self._queue.append((session_id, name))

    @contextlib.contextmanager
    def closings(self, seconds: float) -> Iterator[list[Closing]]:
        """All of them, by sessions, to be asked for within so many seconds. What is not over when this is left stays
        for a later call."""
        made: dict[str, Closing] = {}
        begun = time.monotonic()
        try:
            with contextlib.suppress(IndexError):  # until it is empty, whoever else takes from it
                while True:
                    session_id, name = self._queue.popleft()
                    made.setdefault(session_id, Closing(pb.CloseSessionRequest(session_id=session_id)))
                    made[session_id].request.branches.append(name)
            yield list(made.values())
        finally:
            for closing in made.values():
                names = () if closing.is_over else closing.request.branches
                self._queue.extend((closing.request.session_id, name) for name in names)
            if self._queue and time.monotonic() - begun >= 0.9 * seconds:
                self._not_before = time.monotonic() + PAUSE_SECONDS


def closing_seconds(left: float | None) -> float:
    """How long a call that has so many seconds may wait until what was dropped is closed."""
    return CLOSING_SECONDS if left is None else min(CLOSING_SECONDS, CLOSING_SHARE * left)
