"""Messages between an engine and a worker of its own, over a pair of sockets: a kind and a length, then that many
bytes."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from enum import IntEnum

import numpy as np

_HEAD = struct.Struct("<II")
MAX_BYTES = (1 << 32) - 1


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


class Channel:
    """One end. Raises `EOFError` where the other is gone. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._sending = end, threading.Lock()
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
        self._end.settimeout(seconds)  # Python's: the kernel's begins anew with every signal, as a profiler's

    def send(self, kind: Kind, payload: bytes | np.ndarray) -> None:
        """Send one message: bytes, or an array's."""
        head, view = _parts(kind, payload)
        if self._left:
            self.push(is_waited_for=True)
        parts = [memoryview(head), view]
        try:
            with self._sending:
                while parts:
                    sent = self._end.sendmsg(parts)
                    while parts and sent >= len(parts[0]):
                        sent -= len(parts.pop(0))
                    if sent:
                        parts[0] = parts[0][sent:]
        except OSError as error:  # a broken pipe, or a connection reset
            raise _failure(error, "takes") from error

    def post(self, kind: Kind, payload: bytes | np.ndarray) -> bool:
        """The same, but what the other end does not take at once is left to `push`. True: nothing is."""
        self._left = memoryview(b"".join((self._left, *_parts(kind, payload))))
        return self.push()

    def push(self, is_waited_for: bool = False) -> bool:
        """Send what is left of messages that were posted, as far as the other end takes it; or all of it. True: nothing
        is left."""
        try:
            with self._sending:
                while self._left:
                    if not is_waited_for and not self._room.poll(0):
                        return False
                    sent = self._end.send(self._left, 0 if is_waited_for else socket.MSG_DONTWAIT)
                    self._left = self._left[sent:]
        except OSError as error:
            raise _failure(error, "takes") from error
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
            try:
                count = self._end.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _failure(error, "says") from error
            if not count:
                raise EOFError("the other end is gone")
            done += count

    def close(self) -> None:
        self._end.close()


def _failure(error: OSError, does: str) -> Exception:
    """What a socket's error means: its own time is over where it has no number."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return TimeoutError(f"the other end {does} nothing")
    return EOFError(f"the other end is gone: {error}")


def _parts(kind: Kind, payload: bytes | np.ndarray) -> tuple[bytes, memoryview]:
    """A message's head, and its payload's bytes."""
    view = memoryview(payload if isinstance(payload, bytes) else payload.view(np.uint8).data)
    if view.nbytes > MAX_BYTES:
        raise ValueError(f"a message has {view.nbytes} bytes; it must have at most {MAX_BYTES}")
    return _HEAD.pack(kind, view.nbytes), view
