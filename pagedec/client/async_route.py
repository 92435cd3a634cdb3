"""The way to a server for coroutines: what `Route` is for threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc.aio

from pagedec.client.connection import (
    SERVICES,
    Deadline,
    Inquiry,
    Steady,
    Way,
    find,
    remaining,
    require_open,
)
from pagedec.client.dropped import Closing, DroppedBranches, closing_seconds
from pagedec.client.token_pieces import Out, TokenPieces
from pagedec.errors import RequestError
from pagedec.params import RequestParams

T = TypeVar("T")


class AsyncRoute:
    """A channel to a server, for the coroutines of one event loop."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self._credentials = way.credentials()
        self._channel: grpc.aio.Channel | None = None  # made in the event loop that uses it
        self._stubs: list[Any] = []
        self.is_closed = False
        self.dropped = DroppedBranches()
        self._closing = asyncio.Lock()

    async def ask(self, ask: Inquiry[T], timeout: float | None = None) -> T:
        """The answer of a unary call; see `Route.ask`."""
        deadline = self.way.deadline(timeout)
        await self._close_dropped(deadline)
        for pauses in itertools.count():
            try:
                return ask.read(await self._call(ask, deadline))
            except grpc.aio.AioRpcError as error:
                failure = ask.failure(error, deadline)
                pause = self.way.pause(failure, pauses, deadline, ask.is_safe)
                if pause is None:
                    raise failure from None
                await asyncio.sleep(pause)
        raise AssertionError

    async def read(self, ask: Inquiry[T], timeout: float | None = None) -> AsyncGenerator[T, None]:
        """The answers of a call, one by one; see `Route.begin`. Leaving them ends the call."""
        deadline = self.way.deadline(timeout)
        await self._close_dropped(deadline)
        steady, call = Steady(self.way, ask, deadline), self._call(ask, deadline)
        try:
            while True:
                try:
                    async for answer in call:
                        if not answer.ByteSize():
                            continue  # it says nothing: what a proxy had to send before an error
                        steady.has_begun = True
                        yield ask.read(answer)
                    return
                except grpc.aio.AioRpcError as error:
                    failure = ask.failure(error, deadline)
                pause, again = steady.again(failure)
                await asyncio.sleep(pause)
                call = self._call(again, deadline)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Give up the channel; what runs is cancelled."""
        try:
            await self._close_dropped()
        finally:
            self.is_closed = True
            if self._channel is not None:
                await self._channel.close()

    async def _close_dropped(self, deadline: Deadline | None = None) -> None:
        """Close what nobody holds any more; see `Route`."""
        if self.is_closed or not (self.dropped.is_due or self._closing.locked()):
            return
        seconds = closing_seconds(remaining(deadline))
        try:
            async with asyncio.timeout(seconds), self._closing:
                if self.dropped.is_due:
                    with self.dropped.closings(seconds) as closings:
                        await asyncio.gather(*(self._end(closing, seconds) for closing in closings))
        except TimeoutError:
            return  # the next call goes on with it

    async def _end(self, closing: Closing, seconds: float) -> None:
        close = find(self._stubs, "CloseSession")
        try:
            await close(closing.request, timeout=seconds, metadata=self.way.metadata)
        except grpc.aio.AioRpcError as error:
            closing.end(error)
        else:
            closing.end()

    def _call(self, ask: Inquiry[T], deadline: Deadline | None) -> Any:
        require_open(self.is_closed)
        if self._channel is None:
            way = self.way
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(way.target, way.all_options)
            else:
                self._channel = grpc.aio.secure_channel(way.target, self._credentials, way.all_options)
            self._stubs = [service(self._channel) for service in SERVICES]
        method = find(self._stubs, ask.rpc)
        return method(ask.message, timeout=remaining(deadline), metadata=self.way.metadata)


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T | RequestError]:
    """What calls bring that run at the same time; see `Route.together`."""
    tasks = [asyncio.ensure_future(_or_failure(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _or_failure(call: Awaitable[T]) -> T | RequestError:
    try:
        return await call
    except RequestError as error:
        return error


async def learned(line: AsyncRoute, pieces: TokenPieces, output: Out, params: RequestParams) -> Out:
    """The output, whose tree shows texts where it is whole and has several answers: a tree that is drawn can ask nobody
    then."""
    if not output.finished or len(output.outputs) < 2:
        return output
    lacking = pieces.asking(output, params)
    if lacking is not None:
        await line.ask(lacking)
    return pieces.spelled(output, params, _unasked)


def _unasked(lacking: Inquiry[None]) -> None:
    raise AssertionError(lacking)
