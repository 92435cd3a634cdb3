"""Two ranks of which one is a fork of the test: what devices exchange, without a second interpreter to start."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from pagedec.kernels.link import Exchange

Work: TypeAlias = Callable[[Exchange], None]


def _exchange(end: socket.socket, rank: int) -> Exchange:
    reader = end.makefile("r")

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        end.sendall(json.dumps(own).encode() + b"\n")
        other = json.loads(reader.readline())
        return [own, other] if rank == 0 else [other, own]

    return exchange


@contextmanager
def beside(second: Work) -> Iterator[tuple[Exchange, Callable[[], int]]]:
    """Rank 1 does `second` in a fork. Gives what rank 0 tells and is told by, and what waits for the other's end and
    returns its status: 1 where it has raised something."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ours.close()
            second(_exchange(theirs, 1))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    status: list[int] = []

    def end() -> int:
        if not status:
            status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return status[0]

    try:
        yield _exchange(ours, 0), end
    finally:
        ours.close()
        if not status:
            os.kill(child, 9)
            end()
