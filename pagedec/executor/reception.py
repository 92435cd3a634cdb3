"""Where workers from elsewhere come in: each says a token that nobody else knows, and which rank it is."""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from pagedec.executor.channel import Channel

HELLO_BYTES = 256
MOST_WAITING = 256
"""Connections that have not said who they are; where one more comes, the first of them is closed."""
LOOK_SECONDS = 0.5


def introduce(end: socket.socket, token: str, rank: int) -> None:
    """Say who this process is, at a worker's end."""
    end.sendall(json.dumps({"token": token, "rank": rank, "pid": os.getpid()}).encode().ljust(HELLO_BYTES))


def receive_ranks(
    listener: socket.socket, token: str, world: int, seconds: float, check: Callable[[], None]
) -> list[tuple[Channel, int]]:
    """The connections of all ranks, in their order, with their process ids. Whoever does not know the token is turned
    away, and whoever says nothing keeps nobody waiting. `check` is called now and then, and may raise what has ended a
    worker. Raises TimeoutError; no connection is left where anything is raised."""
    found: dict[int, tuple[socket.socket, int]] = {}
    waiting: dict[socket.socket, bytearray] = {}
    until = time.monotonic() + seconds
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(found) < world:
                if time.monotonic() > until:
                    missing = ", ".join(str(rank) for rank in range(world) if rank not in found)
                    raise TimeoutError(f"no worker has come for rank {missing} in {seconds:g} s")
                check()
                for key, _ in selector.select(LOOK_SECONDS):
                    if key.fileobj is listener:
                        _let_in(listener, waiting, selector)
                    elif key.fileobj in waiting:  # not one that was closed for another
                        end: Any = key.fileobj
                        _hear(end, waiting, selector, found, token, world)
        except BaseException:
            for end, _ in found.values():
                end.close()
            raise
        finally:
            for end in waiting:
                end.close()
    return [(Channel(end), pid) for end, pid in (found[rank] for rank in range(world))]


def _let_in(listener: socket.socket, waiting: dict[socket.socket, bytearray], selector: selectors.BaseSelector) -> None:
    try:
        end, _ = listener.accept()
    except OSError:  # it has gone meanwhile
        return
    if len(waiting) >= MOST_WAITING:
        _turn_away(next(iter(waiting)), waiting, selector)
    end.setblocking(False)
    waiting[end] = bytearray()
    selector.register(end, selectors.EVENT_READ)


def _turn_away(end: socket.socket, waiting: dict[socket.socket, bytearray], selector: selectors.BaseSelector) -> None:
    del waiting[end]
    selector.unregister(end)
    end.close()


def _hear(
    end: socket.socket,
    waiting: dict[socket.socket, bytearray],
    selector: selectors.BaseSelector,
    found: dict[int, tuple[socket.socket, int]],
    token: str,
    world: int,
) -> None:
    """Take what a connection says; it is one of the ranks where it has said all that one says."""
    said = waiting[end]
    try:
        piece = end.recv(HELLO_BYTES - len(said))
    except OSError:
        piece = b""
    said += piece
    if piece and len(said) < HELLO_BYTES:
        return
    told = _told(bytes(said), token, world)
    if told is None or told[0] in found:
        return _turn_away(end, waiting, selector)
    del waiting[end]
    selector.unregister(end)
    end.setblocking(True)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found[told[0]] = end, told[1]


def _told(said: bytes, token: str, world: int) -> tuple[int, int] | None:
    """A rank and a process id, of whoever knows the token."""
    try:
        told = json.loads(said)
        rank, pid, own = told["rank"], told["pid"], told["token"]
        knows = isinstance(own, str) and hmac.compare_digest(own.encode(), token.encode())
    except (ValueError, TypeError, KeyError, RecursionError):  # half a surrogate pair has no bytes, too
        return None
    if not knows:
        return None
    return (rank, pid) if type(rank) is int and type(pid) is int and 0 <= rank < world else None
