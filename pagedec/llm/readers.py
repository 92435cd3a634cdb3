"""Coroutines that read streams: the engine's thread wakes them, once a step and event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence

from pagedec.errors import RequestError
from pagedec.llm.streams import Stream
from pagedec.outputs import RequestOutput

MANY_REPORTED = 1000
"""Log-probabilities from which on outputs are made in a thread: a million of them take seconds."""


class Mailbox:
    """The readers of one event loop that have news: all of them are woken with one call, after each step. It does not
    keep the event loop."""

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = weakref.ref(events)
        self._ready: list[Reader] = []

    def put(self, reader: Reader) -> None:
        """Have a reader woken after the step. Called by the engine's thread alone."""
        self._ready.append(reader)

    def deliver(self) -> list[str]:
        """Wake the readers. Returns the requests of those whose event loop is closed."""
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        if self.wake(ready):
            return []
        return [reader.stream.job.request_id for reader in ready]

    def wake(self, readers: Sequence[Reader]) -> bool:
        """Have the event loop let readers go on. False: it is closed, and nobody has closed its iterators before."""
        events = self._events()
        try:
            if events is not None:
                events.call_soon_threadsafe(_go_on, readers)
        except RuntimeError:
            return False
        return events is not None


class Reader:
    """A coroutine that reads one stream."""

    def __init__(self, mailbox: Mailbox, stream: Stream) -> None:
        self.stream, self._mailbox = stream, mailbox
        self._posted = False  # its news are in the mailbox, or were read since
        self._waiter: asyncio.Future[None] | None = None
        stream.notify = self._notify

    async def news(self) -> None:
        """Return when there is news."""
        self._posted = False  # before looking: what comes from now on is posted again
        while not self.stream.has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            self._posted = False

    async def read(self) -> Iterator[RequestOutput]:
        """The outputs that the news make, when there is news; see `Stream.read`."""
        await self.news()
        return await outputs_of(self.stream)

    def wake(self) -> None:
        """Have it look again. Called in any thread."""
        self._mailbox.wake([self])

    def go_on(self) -> None:
        """Look again. Called in its event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _notify(self) -> None:
        if not self._posted:
            self._posted = True
            self._mailbox.put(self)


async def outputs_of(stream: Stream) -> Iterator[RequestOutput]:
    """What `Stream.read` gives, made in a thread where there is much to read."""
    if stream.num_reported < MANY_REPORTED:
        return stream.read()
    return _again(*await asyncio.to_thread(_all_of, stream))


def _all_of(stream: Stream) -> tuple[list[RequestOutput], RequestError | None]:
    """What is read, and what that raises at its end."""
    outputs: list[RequestOutput] = []
    try:
        for output in stream.read():
            outputs.append(output)
    except RequestError as error:
        return outputs, error
    return outputs, None


def _again(outputs: Sequence[RequestOutput], error: RequestError | None) -> Iterator[RequestOutput]:
    yield from outputs
    if error is not None:
        raise error


def _go_on(readers: Sequence[Reader]) -> None:
    for reader in readers:
        reader.go_on()
