"""Branches of a server's sessions that nobody holds here any more: the client's next call closes them first."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import grpc

from pagedec.v1 import session_service_pb2 as pb

LOG = logging.getLogger("pagedec.client")
WAIT_SECONDS, WAIT_SHARE = 5.0, 0.25
"""For which a call waits at most until what was dropped is closed, and of the time that it has itself."""
CLOSING_SECONDS = 10.0
"""Which a closing has, whoever waits for it: a server may be in the midst of a long step."""
PAUSE_SECONDS = 10.0
"""For which nothing is closed when a closing had no answer in its time: each call would wait for it."""
LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Of a server that may not have heard of it."""


@dataclass(frozen=True, slots=True)
class Closing:
    """What a session's dropped branches are closed by."""

    session_id: str
    branches: list[str]

    @property
    def request(self) -> pb.CloseSessionRequest:
        """What the server is asked."""
        return pb.CloseSessionRequest(session_id=self.session_id, branches=self.branches)


class DroppedBranches:
    """Those of which the server was not told yet. A collector may add some in the midst of anything, in any thread, so
    they are in a deque, and `add` takes no lock."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, str]] = deque()
        self._lock = threading.RLock()  # a finalizer of somebody's may call in the midst of `take`
        self._over = threading.Event()  # nothing is being closed
        self._over.set()
        self._num_asked, self._begun, self._not_before = 0, 0.0, 0.0

    @property
    def is_due(self) -> bool:
        """Some are to be closed, or are being closed."""
        return bool(self._queue or self._num_asked)

    def add(self, session_id: str, name: str) -> None:
        """Nobody holds a branch any more."""
        self._queue.append((session_id, name))

    def take(self, is_last: bool = False) -> list[Closing]:
        """All of them, by sessions, to be asked for now: each has its `end`. None while others are asked for, and none
        soon after a closing had no answer but for the last time."""
        with self._lock:
            if self._num_asked or not (is_last or time.monotonic() >= self._not_before):
                return []
            made: dict[str, Closing] = {}
            with contextlib.suppress(IndexError):  # until it is empty, whoever else takes from it
                while True:
                    session_id, name = self._queue.popleft()
                    made.setdefault(session_id, Closing(session_id, [])).branches.append(name)
            if made:
                self._num_asked += len(made)
                self._begun = time.monotonic()
                self._over.clear()
            return list(made.values())

    def end(self, closing: Closing, error: Any = None) -> None:
        """It was asked, and has perhaps failed with a `grpc.RpcError`. That is nothing of the call that comes behind: a
        server that may not have heard of it is asked again by a later call, and of all else the log is told."""
        code = None if error is None else error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._not_before = time.monotonic() + PAUSE_SECONDS
        elif code not in (None, grpc.StatusCode.NOT_FOUND, *LATER):
            told = "branches %s of a session were dropped, and live until its lease ends: %s: %s"
            LOG.warning(told, ", ".join(closing.branches), code, error.details())
        self.leave(closing, is_over=code not in LATER)

    def leave(self, closing: Closing, is_over: bool = False) -> None:
        """It was not asked to the end; or (`is_over`) there is nothing left to ask."""
        if not is_over:
            self._queue.extend((closing.session_id, name) for name in closing.branches)
        with self._lock:
            self._num_asked -= 1
            if not self._num_asked:
                self._over.set()

    def patience(self, until: float) -> float:
        """For how many seconds a call that waits until then at most waits for what is being closed: all together wait
        for WAIT_SECONDS."""
        return max(0.0, min(until, self._begun + WAIT_SECONDS) - time.monotonic())

    def wait(self, until: float) -> bool:
        """Return when nothing is being closed, or (False) when patience ends."""
        return self._over.wait(self.patience(until))


def wait_until(left: float | None) -> float:
    """The time until which a call that has so many seconds may wait until what was dropped is closed."""
    return time.monotonic() + (WAIT_SECONDS if left is None else min(WAIT_SECONDS, WAIT_SHARE * left))
