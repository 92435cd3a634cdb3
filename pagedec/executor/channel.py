"""Messages between an engine and a worker of its own, over a pair of sockets: a kind and a length, then that many
bytes."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

_HEAD = struct.Struct("<II")
MAX_BYTES = (1 << 32) - 1
PIECE_SECONDS = 0.5
"""Waiting is counted in pieces of so long: in one of them this process may have been stopped itself, by Ctrl-Z or with
its container, and whoever was stopped with it has had no time to say anything."""


class Kind(IntEnum):
    """What a message is. The engine sends LOAD, STEP, MASKS, DUE and TOLD, a worker the others and TOLD."""

    LOAD = 1  # a configuration
    READY = 2  # a worker's geometry: it has loaded
    FAILED = 3  # an error; the next step may come
    STEP = 4
    MASKS = 5  # of a step that is on its way
    ANSWERS = 6
    ROLLED = 7  # what the draft lane has rolled, where masks wait for it
    TOLD = 8  # something for all ranks; what all ranks have told
    PULSE = 9  # the worker is at work still
    DONE = 10  # a rank that answers nothing is through with a step
    BROKEN = 11  # an error that leaves other ranks in the middle of a step, or a device that works no more
    DUE = 12  # no step follows before the last one is answered


class Gone(EOFError):
    """The other end is gone. A class of its own: who reads a file that was cut off raises EOFError, too."""


class Clock:
    """Of seconds in which others could have said something: what a wait of `PIECE_SECONDS` took longer is left out."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def now(self) -> float:
        """To be asked behind each such wait."""
        last, self._last = self._last, time.monotonic()
        self._seconds += min(self._last - last, 2 * PIECE_SECONDS)
        return self._seconds


class Channel:
    """One end. Raises `Gone` where the other is. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._sending = end, threading.Lock()
        self._patience = 0.0
        self._left = memoryview(b"")
        """Of messages that were posted: what the other end has not taken yet."""
        self._arrivals, self._room = select.poll(), select.poll()
        self._arrivals.register(end, select.POLLIN)
        self._room.register(end, select.POLLOUT)

    def fileno(self) -> int:
        """What can be waited for."""
        return self._end.fileno()

    @property
    def address(self) -> str:
        """This end's machine, as the other end's reaches it."""
        return str(self._end.getsockname()[0]) if self._end.family == socket.AF_INET else "127.0.0.1"

    def wait_at_most(self, seconds: float) -> None:
        """Have `receive` raise `TimeoutError` where nothing comes for so long, and `send` where nothing is taken."""
        self._patience = seconds
        # Python's: the kernel's begins anew with every signal, as a profiler's
        self._end.settimeout(min(seconds, PIECE_SECONDS))

    def send(self, kind: Kind, payload: bytes | np.ndarray) -> None:
        """Send one message: bytes, or an array's."""
        head, view = _parts(kind, payload)
        if self._left:
            self.push(is_waited_for=True)
        parts = [memoryview(head), view]
        with self._sending:
            while parts:
                sent = self._patiently("takes", self._end.sendmsg, parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]

    def post(self, kind: Kind, payload: bytes | np.ndarray) -> bool:
        """The same, but what the other end does not take at once is left to `push`. True: nothing is."""
        self._left = memoryview(b"".join((self._left, *_parts(kind, payload))))
        return self.push()

    def push(self, is_waited_for: bool = False) -> bool:
        """Send what is left of messages that were posted, as far as the other end takes it; or all of it. True: nothing
        is left."""
        with self._sending:
            while self._left:
                if not is_waited_for and not self._room.poll(0):
                    return False
                flags = 0 if is_waited_for else socket.MSG_DONTWAIT
                sent = self._patiently("takes", self._end.send, self._left, flags)
                self._left = self._left[sent:]
        return True

    def watch(self, seconds: float) -> None:
        """Return when a message begins to come, or after `seconds`: to be woken would take longer than most engines
        need between two steps. Whoever else wants the processor gets it."""
        until = time.perf_counter() + seconds
        while not self._arrivals.poll(0) and time.perf_counter() < until:
            os.sched_yield()

    def receive(self) -> tuple[Kind, memoryview]:
        """The next message: its kind and its bytes, aligned for numbers of 64 bits."""
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        kind, size = _HEAD.unpack(head)
        payload = np.empty(-(-size // 8), np.int64).view(np.uint8).data[:size]
        self._fill(payload)
        return Kind(kind), payload

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._patiently("says", self._end.recv_into, view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise Gone("the other end is gone")
            done += count

    def _patiently(self, does: str, call: Callable[..., int], *arguments: Any) -> int:
        """Call the socket until it has done something. Raises `Gone`, or `TimeoutError` where time is over."""
        left = self._patience
        while True:
            try:
                return call(*arguments)
            except OSError as error:  # a broken pipe, or a connection reset
                if not isinstance(error, TimeoutError) or error.errno is not None:  # its own time has no number
                    raise Gone(f"the other end is gone: {error}") from error
                left -= PIECE_SECONDS
                if left <= 0:
                    raise TimeoutError(f"the other end {does} nothing") from error

    def close(self) -> None:
        self._end.close()


def _parts(kind: Kind, payload: bytes | np.ndarray) -> tuple[bytes, memoryview]:
    """A message's head, and its payload's bytes."""
    view = memoryview(payload if isinstance(payload, bytes) else payload.view(np.uint8).data)
    if view.nbytes > MAX_BYTES:
        raise ValueError(f"a message has {view.nbytes} bytes; it must have at most {MAX_BYTES}")
    return _HEAD.pack(kind, view.nbytes), view
