"""The way to a server for coroutines: what `Route` is for threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc.aio

from pagedec.client.connection import SERVICES, Inquiry, Steady, Way, find, require_open
from pagedec.client.deadlines import Deadline, remaining
from pagedec.client.dropped import CLOSING_SECONDS, Closing, DroppedBranches, wait_until
from pagedec.client.failures import ClientClosed
from pagedec.client.token_pieces import Out, TokenPieces
from pagedec.errors import PagedecError, RequestError
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
        self._closings = set[asyncio.Task[None]]()

    async def ask(self, ask: Inquiry[T], timeout: float | None = None) -> T:
        """The answer of a unary call; see `Route.ask`."""
        deadline = self.way.deadline(timeout)
        await self._close_dropped(deadline)
        for pauses in itertools.count():
            try:
                return ask.read(await self._call(ask, deadline))
            except asyncio.CancelledError as cancelled:
                raise self._ended(cancelled) from None
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
        failure: PagedecError
        try:
            while True:
                try:
                    async for answer in call:
                        if not answer.ByteSize():
                            continue  # it says nothing: what a proxy had to send before an error
                        steady.has_begun = True
                        yield ask.read(answer)
                    return
                except asyncio.CancelledError as cancelled:
                    failure = self._ended(cancelled)
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
            await self._close_dropped(is_last=True)
        finally:
            self.is_closed = True
            for task in self._closings:
                task.cancel()
            if self._channel is not None:
                await self._channel.close()

    async def _close_dropped(self, deadline: Deadline | None = None, is_last: bool = False) -> None:
        """Close what nobody holds any more; see `Route`. A closing goes on where who waits for it is cancelled."""
        until = wait_until(remaining(deadline))
        for _ in range(2 if self.dropped.is_due and not self.is_closed else 0):
            closings = self.dropped.take(is_last)
            self._closings |= {asyncio.create_task(self._end(closing)) for closing in closings}
            if self._closings:
                await asyncio.wait(self._closings, timeout=self.dropped.patience(until))
            if self._closings or closings:
                return

    async def _end(self, closing: Closing) -> None:
        close = find(self._stubs, "CloseSession")
        try:
            await close(closing.request, timeout=CLOSING_SECONDS, metadata=self.way.metadata)
        except grpc.aio.AioRpcError as error:
            self.dropped.end(closing, error)
        except asyncio.CancelledError:
            self.dropped.leave(closing)
            raise
        else:
            self.dropped.end(closing)
        finally:
            self._closings.discard(asyncio.current_task())

    def _ended(self, cancelled: asyncio.CancelledError) -> ClientClosed:
        """What a call has failed with that the client's end has cancelled, and nobody its task. Raises it where it was
        the task."""
        task = asyncio.current_task()
        if not self.is_closed or task is None or task.cancelling():
            raise cancelled
        return ClientClosed()

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
