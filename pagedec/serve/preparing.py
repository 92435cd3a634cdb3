"""What is long to be read or written beside the requests that run: each client's takes turns, others do not wait."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from pagedec.serve.calls import RPC

T = TypeVar("T")
SEATS = 2
"""Pieces of one client's work that are done at the same time. All clients' share threads and the interpreter: each has
the share that the others have, however many calls he sends."""
GRAMMARS = "grammars"
LONG_MESSAGE = 20_000
"""Bytes from which on a message is read in a thread: it may have a million fields, which take seconds."""


class Preparing:
    """Work in threads, such as templates and tokens, of which admission counts nothing. Belongs to a server's event
    loop."""

    def __init__(self) -> None:
        self._seats: dict[tuple[str, str], asyncio.Semaphore] = {}
        self._num_users: dict[tuple[str, str], int] = {}
        """Of seats, those that wait for one too. Nothing is kept of a client who has nothing."""
        self._running: set[asyncio.Task[object]] = set()
        self._compiling = asyncio.Lock()

    async def read(self, message: Message, read: Callable[[], T]) -> T:
        """What `read` makes of a message: in a thread where it is long."""
        return await self.in_thread(read) if message.ByteSize() > LONG_MESSAGE else read()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, when it is the turn of the client whose call runs."""
        return await self.run(functools.partial(asyncio.to_thread, work))

    async def compile(self, work: Callable[[], None]) -> None:
        """Compile a grammar, when it is the turn of the client whose call runs, and of the grammar among all clients'.
        The library compiles one at a time, and takes seconds for some: who waits for it in a thread takes that from all
        others."""

        async def in_turn() -> None:
            async with self._compiling:
                await asyncio.to_thread(work)

        await self.run(in_turn, GRAMMARS)

    async def run(self, work: Callable[[], Awaitable[T]], kind: str = "") -> T:
        """The same of what uses threads of its own. `kind`: of work that takes turns with its like alone. One call may
        not run what runs another piece within it. A call that is cancelled gives its seat back when its thread has
        ended, which nobody can cancel."""
        client = RPC.get().client.name, kind
        seats = self._seats.setdefault(client, asyncio.Semaphore(SEATS))
        self._num_users[client] = self._num_users.get(client, 0) + 1
        try:
            await seats.acquire()
        except BaseException:
            self._leave(client)
            raise

        def over(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            seats.release()
            self._leave(client)

        task = asyncio.ensure_future(_awaited(work))
        self._running.add(task)
        task.add_done_callback(over)
        return await asyncio.shield(task)

    def _leave(self, client: tuple[str, str]) -> None:
        self._num_users[client] -= 1
        if not self._num_users[client]:
            del self._num_users[client], self._seats[client]


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
