"""What is around each call of each service: who asks, what an error becomes, what is logged and counted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.rpc import status_pb2

from pagedec.messages import DETAILS
from pagedec.serve.access import Client, Keys
from pagedec.serve.statuses import Refusal, code_of, status_of

LOG = logging.getLogger("pagedec.calls")
MOST_LOGGED = 100
"""Names of requests in a call's line."""
SHOWN_ID = 200
"""Characters that a client's name for a request may have."""
REQUEST_ID = "x-request-id"
"""Of the initial metadata: what a client calls his request."""
QUIET = "/grpc.health.v1.Health/"
"""Asked every few seconds: not worth a line."""
UNKNOWN = "unknown"
"""The client of a call that was over before anybody looked: gRPC then has forgotten the address."""


Read = Callable[[], Awaitable[Any]]
"""Brings what a call has sent: its message, or the stream of them."""


def as_it_is(error: Exception) -> Exception:
    """The error itself."""
    return error


@dataclass(slots=True)
class Rpc:
    """One call that runs. `meant`: see `Calls`; `request_ids`: the first of those that it has begun, for the log."""

    method: str
    client: Client
    context: Any
    began: float
    meant: Callable[[Exception], Exception] = as_it_is
    metadata: dict[str, Any] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)
    has_begun: bool = False
    """Its initial metadata was sent."""

    def note(self, request_id: str) -> None:
        """It has begun a request."""
        if len(self.request_ids) < MOST_LOGGED:  # a stream may live for days
            self.request_ids.append(request_id)

    @property
    def seconds_left(self) -> float | None:
        """Until its deadline."""
        left: float | None = self.context.time_remaining()
        return left


RPC: ContextVar[Rpc] = ContextVar("rpc")
"""The call that this task answers."""


class Observer(Protocol):
    """Counts calls."""

    def called(self, call: Rpc, code: str, seconds: float) -> None:
        """A call has ended."""


class Calls(grpc.aio.ServerInterceptor):
    """Stands before every service, those of others included."""

    def __init__(
        self,
        keys: Keys | None,
        send_timeout: float,
        observers: tuple[Observer, ...] = (),
        is_admin: bool = False,
        meant: Callable[[Exception], Exception] = as_it_is,
    ) -> None:
        """`meant`: the error that whoever asked is to have, of one that a call has ended with."""
        self._meant = meant
        self._keys, self._send_timeout, self._observers, self._is_admin = keys, send_timeout, observers, is_admin

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler with all of this around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        details, streams = handler_call_details, bool(handler.request_streaming)
        kinds = {
            (False, False): (grpc.stream_unary_rpc_method_handler, handler.unary_unary, self._one),
            (False, True): (grpc.stream_stream_rpc_method_handler, handler.unary_stream, self._many),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary, self._one),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream, self._many),
        }  # all of streams: of others gRPC's library reads the message before anybody looks who has sent it
        make, inner, around = kinds[streams, bool(handler.response_streaming)]
        read = _reader(handler.request_deserializer, streams)

        async def answer(messages: Any, context: Any) -> Any:
            return await around(inner, details, functools.partial(read, messages, context), context)

        return make(answer, None, handler.response_serializer)

    @contextlib.asynccontextmanager
    async def around(self, method: str, given: Any, context: Any) -> AsyncIterator[None]:
        """What is around one call: `method` by its full name, `given` its metadata. Errors abort `context`."""
        metadata = dict(given or ())
        call = Rpc(method, Client(name=peer_of(context)), context, time.monotonic(), self._meant, metadata)
        code = "OK"
        try:
            if self._keys is not None:
                call.client = self._keys.client(metadata)
                if self._is_admin and not call.client.is_admin:
                    raise Refusal("PERMISSION_DENIED", "NOT_ADMIN", "the token is of a client who may not do this")
            RPC.set(call)
            yield
        except asyncio.CancelledError:
            code = _left(call)
            raise
        except grpc.aio.InternalError:  # nothing can be sent: the cancellation is on its way
            code = _left(call)
            raise asyncio.CancelledError from None  # of anything else gRPC's library would log a trace
        except grpc.aio.AbortError:  # of a service that is not ours
            raise
        except Exception as error:
            status = failure(error, call)
            code = code_of(status).name
            try:
                await context.abort(code_of(status), status.message, ((DETAILS, status.SerializeToString()),))
            except grpc.aio.InternalError:  # as above
                raise asyncio.CancelledError from None
        finally:
            self._ended(call, _said(context) if code == "OK" else code)

    # ---- inside
    async def _one(self, inner: Any, details: grpc.HandlerCallDetails, read: Read, context: Any) -> Any:
        async with self.around(details.method, details.invocation_metadata, context):
            answer = inner(await read(), context)
            return await answer if inspect.isawaitable(answer) else answer

    async def _many(self, inner: Any, details: grpc.HandlerCallDetails, read: Read, context: Any) -> None:
        async with self.around(details.method, details.invocation_metadata, context):
            answers = inner(await read(), context)
            if not hasattr(answers, "__aiter__"):
                await answers
                return
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    await self._send(context, answer)

    async def _send(self, context: Any, message: Any) -> None:
        """Returns when the client's window has room; what is said meanwhile is merged by whoever says it."""
        try:
            async with asyncio.timeout(self._send_timeout):
                await begin_answers()
                await context.write(message)
        except TimeoutError:
            problem = f"nothing was read for {self._send_timeout:g} seconds, the server's send_timeout"
            raise Refusal("RESOURCE_EXHAUSTED", "READER_TOO_SLOW", problem) from None

    def _ended(self, call: Rpc, code: str) -> None:
        seconds = time.monotonic() - call.began
        for observer in self._observers:
            observer.called(call, code, seconds)
        if not call.method.startswith(QUIET):
            fields = {
                "method": call.method,
                "client": call.client.name,
                "code": code,
                "seconds": round(seconds, 6),
                "request_ids": call.request_ids,
            }
            LOG.info("%s %s", call.method, code, extra={"fields": fields})


def _left(call: Rpc) -> str:
    """How a call has ended whose client is gone, or has no time left."""
    left = call.seconds_left
    return "CANCELLED" if left is None or left > 0 else "DEADLINE_EXCEEDED"


def _said(context: Any) -> str:
    """What a service has set as its status; those that are not ours do."""
    number = context.code()
    return next((code.name for code in grpc.StatusCode if number in (code, code.value[0])), "OK")


def _reader(parse: Callable[[bytes], Any], streams: bool) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Any]]:
    """Reads the message of a call, or gives a stream of them. Left to gRPC, bytes that are no message would be an error
    of the server, and a call without one would not end."""

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception:  # of whatever parses
            raise Refusal("INVALID_ARGUMENT", "MESSAGE_MALFORMED", "the bytes are no message of this type") from None

    async def each(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in messages:
            yield parsed(data)

    async def many(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        return each(messages)

    async def one(messages: AsyncIterator[bytes], context: Any) -> Any:
        data = await context.read()
        if data is grpc.aio.EOF:
            raise Refusal("INVALID_ARGUMENT", "MESSAGE_MALFORMED", "the call must have a message, and has none")
        return parsed(data)

    return many if streams else one


def failure(error: Exception, call: Rpc) -> status_pb2.Status:
    """The status of an error that is being handled. What is our own is logged: whoever asked is told no more of it."""
    status = status_of(call.meant(error))
    if code_of(status) is grpc.StatusCode.INTERNAL:
        LOG.exception("%s", call.method, extra={"fields": {"request_ids": call.request_ids}})
    return status


async def echo(request_id: str) -> None:
    """Tell the client of the call that runs, before anything else, what he calls his request."""
    if 0 < len(request_id) <= SHOWN_ID and request_id.isascii() and request_id.isprintable():
        await begin_answers(((REQUEST_ID, request_id),))


async def begin_answers(metadata: Sequence[tuple[str, str]] = ()) -> None:
    """Send the initial metadata of the call that runs, if it was not sent. It waits for no reader. Left to the first
    message it would be sent with the status once more where nobody reads that message, and gRPC's library sends neither
    then: the call would not end."""
    call = RPC.get()
    if not call.has_begun:
        call.has_begun = True
        await call.context.send_initial_metadata(metadata)


def peer_of(context: Any) -> str:
    """The address that a call comes from, without its port; `UNKNOWN` of one that is over."""
    peer = str(context.peer()) or UNKNOWN
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
