"""Many requests over one stream, each answered as it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

I = TypeVar("I")  # noqa: E741
A = TypeVar("A")
MOST_AT_ONCE = 256
"""Requests of one stream that run at the same time."""


class _End(NamedTuple):
    error: BaseException | None


async def side_by_side(
    items: AsyncIterator[I], answers: Callable[[I], AsyncGenerator[A, None]], most: int = MOST_AT_ONCE
) -> AsyncGenerator[A, None]:
    """The answers to all items, as they come. At most `most` items are answered at the same time, and further ones are
    read when others have ended; nor is a slow reader run ahead of by more than as many answers. Raises what reading or
    answering raises. Leaving it ends whatever runs."""
    ready: asyncio.Queue[A | _End] = asyncio.Queue()
    seats, room = asyncio.Semaphore(most), asyncio.Semaphore(most)
    running: set[asyncio.Task[None]] = set()

    def begin(what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        running.add(task)
        task.add_done_callback(over)

    def over(task: asyncio.Task[None]) -> None:
        running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None or not running:
            ready.put_nowait(_End(error))

    async def answer(item: I) -> None:
        try:
            async with contextlib.aclosing(answers(item)) as own:
                async for one in own:
                    await room.acquire()
                    ready.put_nowait(one)
        finally:
            seats.release()

    async def read() -> None:
        async for item in items:
            await seats.acquire()
            begin(answer(item))

    begin(read())
    try:
        while not isinstance(one := await ready.get(), _End):
            room.release()
            yield one
        if one.error is not None:
            raise one.error
    finally:
        left = list(running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
